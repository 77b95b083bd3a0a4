"""Attacks on a real `preheat gateway`: health answers, memory is bounded, the requests of another key succeed.

PREHEAT_ATTACK_SECONDS is the duration of each attack (15 in `make test-load`). Without it the tests are skipped. The
attacks are the table of tests/support/attacks.py.
"""

import base64
import http.client
import io
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from tests.support.attacks import ATTACKS
from tests.support.scripted_server import Answer, ScriptedServer
from tests.support.waiting import eventually

SECONDS = float(os.environ.get("PREHEAT_ATTACK_SECONDS", "0"))
ATTACKER, OTHER = "sk-attacker-0123456789", "sk-other-0123456789abc"
MAX_HEALTH_SECONDS = 0.5
MAX_MEMORY_MIB = 300  # above the idle gateway
RECOVERY_SECONDS = 5  # after the attack

pytestmark = pytest.mark.skipif(not SECONDS, reason="PREHEAT_ATTACK_SECONDS is not set")


def answer(_: int, request: dict[str, Any]) -> Answer:
    """Answer as a server that generates images at once."""
    if request.get("describe"):
        return Answer(200, b'{"release": "toy/1", "defaults": {"num_inference_steps": 2}}')
    image = {"event": "image", "index": 0, "data": "eA==", "seed": 1, "format": "png", "width": 64, "height": 64}
    done = {"event": "done", "time": 0.1, "timings": {}, "warnings": [], "engine": {"release": "toy/1"}}
    events = ({"event": "accepted", "seed": 1, "steps": 1, "release": "toy/1"}, image, done)
    return Answer(200, b"".join(json.dumps(event).encode() + b"\n" for event in events))


def noise_image() -> bytes:
    """Return a PNG of about 2 MiB."""
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (900, 800, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG", compress_level=0)
    return file.getvalue()


@contextmanager
def gateway_process(folder: Path) -> Iterator[tuple[psutil.Process, int]]:
    """Run `preheat gateway` with two keys in front of a scripted server. Yields the process and its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    keys = folder / "keys"
    keys.write_text(f"attacker {ATTACKER}\nother {OTHER}\n")
    with ScriptedServer(answer) as backend, (folder / "gateway.log").open("wb") as log:
        command = (sys.executable, "-m", "engine_builder.commands.main", "gateway", "--key-file", str(keys))
        backend_url = backend.url.removesuffix("/production/predict")
        process = subprocess.Popen(
            [*command, "--port", str(port), "--backend", f"{backend_url}/production/predict"], stdout=log, stderr=log
        )
        try:
            eventually(lambda: is_healthy(port), "the gateway serves")
            yield psutil.Process(process.pid), port
        finally:
            process.terminate()
            process.wait(30)


def is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def requests_of_other_key(port: int) -> dict[str, Callable[[], httpx.Response]]:
    """Return requests with and without an image, by a name."""
    image, limits = noise_image(), httpx.Limits(max_keepalive_connections=0)
    client = httpx.Client(
        base_url=f"http://127.0.0.1:{port}",
        headers={"Authorization": f"Bearer {OTHER}"},
        limits=limits,
        timeout=60,
        trust_env=False,
    )
    native = {"prompt": "x", "image": base64.b64encode(image).decode()}
    generation, parts = {"prompt": "x"}, {"image": ("a.png", image, "image/png"), "prompt": (None, "x")}
    return {
        "text": lambda: client.post("/v1/images/generations", json=generation),
        "image": lambda: client.post("/v1/models/model:predict", json=native),
        "form": lambda: client.post("/v1/images/edits", files=parts),
    }


@pytest.mark.parametrize("attack", ATTACKS)
def test_gateway_serves_others_during(attack: str, tmp_path: Path, show_progress: Callable[[str], None]) -> None:
    with gateway_process(tmp_path) as (process, port), ThreadPoolExecutor(4) as pool:
        others = requests_of_other_key(port)
        expected = {name: send().status_code for name, send in others.items()}
        assert set(expected.values()) == {200}, expected
        idle = process.memory_info().rss
        attacker = subprocess.Popen(
            [sys.executable, "-m", "tests.support.attacks", attack, str(port), ATTACKER, str(SECONDS)]
        )
        delays, peak, problems = [], idle, []
        sent: dict[str, int] = dict.fromkeys(others, 0)

        def send_until(end: float, name: str) -> None:
            while time.monotonic() < end:
                began = time.monotonic()
                try:
                    answer = others[name]()
                    if answer.status_code != 200:
                        problems.append(f"{name}: {answer.status_code} {answer.text[:200]}")
                except httpx.HTTPError as error:
                    problems.append(f"{name}: {error!r}")
                sent[name] += 1
                if time.monotonic() - began > 10:
                    problems.append(f"{name}: took {time.monotonic() - began:.1f} s")
                time.sleep(0.1)

        end = time.monotonic() + SECONDS + RECOVERY_SECONDS
        working: list[Future[None]] = [pool.submit(send_until, end, name) for name in others]
        while time.monotonic() < end:
            began = time.monotonic()
            if not is_healthy(port):
                problems.append("health: no answer with status 200 within 5 s")
            delays.append(time.monotonic() - began)
            peak = max(peak, process.memory_info().rss)
            time.sleep(0.02)
        for future in working:
            future.result()
        attacker.wait(60)
        growth = (peak - idle) / 2**20
        show_progress(
            f"{attack}: health {statistics.median(delays) * 1e3:.0f} ms, at most {max(delays) * 1e3:.0f}; "
            f"memory +{growth:.0f} MiB; {sent} requests of others; {len(problems)} problems {problems[:2]}"
        )
        assert problems == []
        assert growth <= MAX_MEMORY_MIB
        assert max(delays) <= MAX_HEALTH_SECONDS
