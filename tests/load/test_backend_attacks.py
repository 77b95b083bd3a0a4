"""Attacks of a backend on a real `preheat gateway`, and a locked history: others are served, and memory is bounded.

PREHEAT_ATTACK_SECONDS is the duration of each attack (15 in `make test-load`). Without it the tests are skipped.
"""

import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from urllib.request import urlopen

import httpx
import pytest

from tests.support.backend_attacks import ATTACKS, RELEASE
from tests.support.predictions import PREDICT_PATH
from tests.support.scripted_gateway import ACCEPTED, DESCRIPTION, DONE, IMAGE, lines
from tests.support.scripted_server import ScriptedServer
from tests.support.sqlite_lock import locked
from tests.support.waiting import eventually

SECONDS = float(os.environ.get("PREHEAT_ATTACK_SECONDS", "0"))
VICTIMS = 16  # requests at once that the attacking backend answers
MAX_HEALTH_SECONDS = 0.5
MAX_MEMORY_MIB = 300  # above the idle gateway
OPTIONS = {"trust_env": False, "timeout": 120}

pytestmark = pytest.mark.skipif(not SECONDS, reason="PREHEAT_ATTACK_SECONDS is not set")


@contextmanager
def gateway_process(folder: Path, attack: str) -> Iterator[tuple[str, int]]:
    """Run `preheat gateway` in front of a good and an attacking backend. Yields its URL and process id."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    good = ScriptedServer(
        lambda _, request: lines(DESCRIPTION) if request.get("describe") else lines(ACCEPTED, IMAGE, DONE)
    )
    attacker = [sys.executable, "-m", "tests.support.backend_attacks", attack]
    with good, subprocess.Popen(attacker, stdout=subprocess.PIPE, text=True) as evil:
        assert evil.stdout is not None
        backends = ["--backend", good.url, "--backend", f"http://127.0.0.1:{int(evil.stdout.readline())}"]
        command = [sys.executable, "-m", "engine_builder.commands.main", "gateway", "--port", str(port), *backends]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen([*command, "--history", str(folder / "history")], stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            eventually(lambda: status_of_health(url) == 200, "the gateway serves")
            yield url, process.pid
        finally:
            process.terminate()
            process.wait(30)
            evil.kill()


def status_of_health(url: str) -> int:
    try:  # without httpx, whose client takes longer than an answer
        with urlopen(f"{url}/health", timeout=10) as answer:
            return int(answer.status)
    except OSError:
        return 0


def memory_mib(pid: int, name: str) -> float:
    """Return VmRSS, the memory now, or VmHWM, the most so far."""
    text = Path(f"/proc/{pid}/status").read_text()
    return float(re.findall(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)[0]) / 1024


@pytest.mark.parametrize("attack", [*ATTACKS, "locked history"])
def test_gateway_serves_others_during(attack: str, tmp_path: Path, show_progress: Callable[[str], None]) -> None:
    lock = locked(tmp_path / "history", "DELETE FROM history") if attack == "locked history" else nullcontext()
    outcomes: Counter[str] = Counter()
    delays: list[float] = []
    with gateway_process(tmp_path, attack if attack in ATTACKS else "endless health") as (url, pid):
        images = {"prompt": "x", "width": 1024, "height": 1024}
        # The description of the good backend is known, so the first request does not wait.
        assert httpx.post(f"{url}{PREDICT_PATH}?model=toy/1", json=images, **OPTIONS).status_code == 200  # type: ignore[arg-type]
        idle = memory_mib(pid, "VmRSS")
        end = time.monotonic() + SECONDS

        def use_attacker(number: int) -> None:
            while time.monotonic() < end:
                sizes = images if number % 4 > 1 else {"prompt": "x"}
                body = sizes | {"stream": number % 2 > 0}
                path = f"{PREDICT_PATH}?model={RELEASE}"
                try:
                    with httpx.stream("POST", url + path, json=body, trust_env=False, timeout=SECONDS + 1) as answer:
                        for _ in answer.iter_bytes():
                            if time.monotonic() > end:
                                break
                    outcomes[f"attacked {answer.status_code}"] += 1
                except httpx.TimeoutException:
                    outcomes["attacked waits"] += 1

        def use_other() -> None:
            while time.monotonic() < end:
                began = time.monotonic()
                answer = httpx.post(f"{url}{PREDICT_PATH}?model=toy/1", json=images, **OPTIONS)  # type: ignore[arg-type]
                outcomes[f"other {answer.status_code}"] += 1
                outcomes["other late"] += time.monotonic() - began > 5
                time.sleep(0.05)

        with lock, ThreadPoolExecutor(VICTIMS + 1) as pool:
            working = [pool.submit(use_other), *(pool.submit(use_attacker, number) for number in range(VICTIMS))]
            while time.monotonic() < end:
                began = time.monotonic()
                outcomes[f"health {status_of_health(url)}"] += 1
                delays.append(time.monotonic() - began)
                time.sleep(0.05)
            for future in working:
                future.result()
        growth = memory_mib(pid, "VmHWM") - idle
    show_progress(f"{attack}: {dict(outcomes)}, health {max(delays):.2f} s, {growth:.0f} MiB above {idle:.0f} MiB")
    assert "Traceback" not in (tmp_path / "log").read_text()
    others = {name for name in outcomes if name.startswith(("other ", "health "))}
    assert others <= {"other 200", "other late", "health 200"}
    assert outcomes["other late"] == 0 and outcomes["attacked 500"] == 0
    assert max(delays) < MAX_HEALTH_SECONDS and growth < MAX_MEMORY_MIB
