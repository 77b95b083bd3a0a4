"""`preheat serve` is stopped by SIGTERM while 30 requests are in flight, 15 of them streams."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from engine_builder.stores.store import WritableStore
from tests.conftest import READY_SECONDS
from tests.support.predictions import PREDICT_PATH, SMALL
from tests.support.repository import REPOSITORY
from tests.support.waiting import eventually

REQUESTS = 30
IN_FLIGHT = ("preheat_active_images", "preheat_queue_images")


def in_flight(url: str) -> float:
    text = httpx.get(f"{url}/metrics/", trust_env=False).text
    samples = [line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] in IN_FLIGHT]
    return sum(float(line.rpartition(" ")[2]) for line in samples)


@pytest.mark.skipif("PREHEAT_KILL_SECONDS" not in os.environ, reason="set PREHEAT_KILL_SECONDS")
@pytest.mark.parametrize("grace, steps, expected", [(150, 8, "right"), (2, 100, "503")])
def test_stopped_serve_answers_all_requests(
    grace: int,
    steps: int,
    expected: str,
    store: WritableStore,
    release: str,
    show_progress: Callable[[str], None],
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    answers: list[str] = []

    def send(number: int) -> None:
        request: dict[str, Any] = SMALL | {"num_inference_steps": steps, "seed": number, "stream": number % 2 == 0}
        try:
            answer = httpx.post(url + PREDICT_PATH, json=request, timeout=READY_SECONDS, trust_env=False)
            last = json.loads(answer.text.splitlines()[-1])
            is_right = answer.status_code == 200 and last["status"] == "success"
            answers.append("right" if is_right else str(last.get("status", answer.status_code)))
        except Exception as error:  # no answer, or one that cannot be read
            answers.append(repr(error))

    command = [sys.executable, "-m", "engine_builder.commands.main", "serve", release, "--store", store.url]
    with subprocess.Popen(
        [*command, "--port", str(port)],
        cwd=REPOSITORY,
        env=os.environ | {"PREHEAT_GRACE_SECONDS": str(grace)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert any("Serving" in line for line in process.stdout)
        threads = [threading.Thread(target=send, args=[number]) for number in range(REQUESTS)]
        for thread in threads:
            thread.start()
        eventually(lambda: in_flight(url) + len(answers) >= REQUESTS, "all requests are in flight")
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        process.communicate(timeout=READY_SECONDS)
    show_progress(f"SIGTERM with a grace period of {grace} s: {dict(Counter(answers))}, exit code {process.returncode}")
    assert process.returncode == 0
    assert set(answers) <= {"right", expected} and expected in answers
