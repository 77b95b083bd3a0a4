"""What the load tests share: a gateway in a process of its own, memory of processes, and a probe of health."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from tests.support.ports import free_port
from tests.support.repository import REPOSITORY
from tests.support.waiting import eventually


def memory_mib(pid: int, entry: str) -> float:
    """Return VmRSS, the resident memory now, or VmHWM, the most so far."""
    [kilobytes] = re.findall(rf"^{entry}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(kilobytes) / 1024


def is_healthy(url: str) -> bool:
    try:  # without httpx, whose client takes longer than an answer
        with urlopen(url, timeout=5) as answer:
            return answer.status == 200  # type: ignore[no-any-return]
    except OSError:
        return False


@contextmanager
def gateway_process(folder: Path, *options: str) -> Iterator[tuple[str, int]]:
    """Run `preheat gateway` with these options. Yields its URL and process id. Its log is folder/log."""
    port = free_port()
    command = [sys.executable, "-m", "preheat", "gateway", "--port", str(port), *options]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log) as process,
    ):
        url = f"http://127.0.0.1:{port}"
        try:
            eventually(lambda: is_healthy(f"{url}/health"), "the gateway serves")
            yield url, process.pid
        finally:
            process.terminate()


class HealthProbe:
    """Checks an address twenty times a second while its `with` block runs.

    It is a process of its own: in this one, the answers would wait for its clients.
    """

    def __init__(self, url: str) -> None:
        self.seconds: list[float] = []
        """Duration of each check, sorted."""
        self.failed = 0
        self._command = [sys.executable, "-m", "tests.support.load", url]

    def __enter__(self) -> "HealthProbe":
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(self._command, cwd=REPOSITORY, text=True, **pipes)
        return self

    def __exit__(self, *_: object) -> None:
        output, _ = self._process.communicate()
        self.seconds, self.failed = json.loads(output)


def send_repeatedly(calls: dict[str, Callable[[], str]], seconds: float) -> dict[str, list[float]]:
    """Call each function again and again, each in a thread. It returns "", or what is wrong with an answer.

    Returns the durations of its calls by name. Fails for a wrong answer.
    """
    end = time.monotonic() + seconds
    durations: dict[str, list[float]] = {name: [] for name in calls}

    def send(name: str) -> None:
        while time.monotonic() < end:
            began = time.monotonic()
            problem = calls[name]()
            assert not problem, f"{name}: {problem}"
            durations[name].append(time.monotonic() - began)
            time.sleep(0.1)

    with ThreadPoolExecutor(len(calls)) as pool:
        for sending in [pool.submit(send, name) for name in calls]:
            sending.result()
    return durations


def main() -> None:
    """Check an address until standard input is closed. Print the sorted durations, and how many checks failed."""
    closed, durations, failed = threading.Event(), [], 0
    threading.Thread(target=lambda: (sys.stdin.read(), closed.set()), daemon=True).start()
    while not closed.wait(0.05):
        began = time.perf_counter()
        failed += not is_healthy(sys.argv[1])
        durations.append(time.perf_counter() - began)
    print(json.dumps([sorted(durations), failed]))


if __name__ == "__main__":
    main()
