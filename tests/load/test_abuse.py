"""Many clients at once, some of which leave: everyone else gets its own picture, and health is answered meanwhile.

PREHEAT_LOAD_SECONDS says for how long (120 in `make load`), PREHEAT_SOAK_IMAGES how many images are drawn one after
another while the server's memory is watched (1,000 there). Both are skipped unless asked for: they take minutes.
"""

import asyncio
import base64
import io
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import psutil
import pytest
from PIL import Image

from engine_builder.local_server.server import Server

PREDICT = "/v1/models/model:predict"
CLIENTS = 64
LEAVES = 0.2
HEALTH_SECONDS = 0.1
SECONDS = float(os.environ.get("PREHEAT_LOAD_SECONDS", "0"))
IMAGES = int(os.environ.get("PREHEAT_SOAK_IMAGES", "0"))
WAIT = 300

# What the clients ask for: prompts, sizes, samplers, steps and guidance that meet each other in every mix.
REQUESTS: list[dict[str, Any]] = [
    {
        "prompt": ["a red circle", "two green squares on white", "a blue line"][number % 3],
        "width": [64, 96, 128][number % 3],
        "height": [64, 96][number % 2],
        "scheduler": ["Euler", "Euler a", "DDIM", "DPM++ 2M", "DPM++ 2M SDE Karras"][number % 5],
        "num_inference_steps": 2 + number % 4,
        "guidance_scale": [7.5, 1.0][number % 2],
        "use_refiner": number % 4 == 0,
        "num_images": 1 + number % 2,
        "seed": number,
        "output_format": "png",
    }
    for number in range(24)
]


def pictures(body: dict[str, Any]) -> list[npt.NDArray[np.uint8]]:
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(image["data"])))) for image in body["images"]]


PROBE = """
import json, sys, threading, time, httpx
closed, seconds, failed, late = threading.Event(), [], 0, 0.0
threading.Thread(target=lambda: (sys.stdin.read(), closed.set()), daemon=True).start()
with httpx.Client(base_url=sys.argv[1], trust_env=False, timeout=30) as client:
    while True:
        waits = time.perf_counter()
        if closed.wait(0.05):
            break
        began = time.perf_counter()
        late = max(late, began - waits - 0.05)
        failed += client.get("/v1/models/model").status_code != 200
        seconds.append(time.perf_counter() - began)
print(json.dumps({"seconds": sorted(seconds), "failed": failed, "late": late}))
"""


class Health:
    """Asks for the server's health twenty times a second, from a process of its own: in this one the answers would wait
    for 64 clients and the decoding of their pictures."""

    def __init__(self, url: str) -> None:
        self.seconds: list[float] = []  # of each answer, sorted
        self.failed = 0
        self.late = 0.0  # the most that the machine kept this process itself from running
        self._url = url

    def __enter__(self) -> "Health":
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROBE, self._url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        output, _ = self._process.communicate()
        found = json.loads(output)
        self.seconds, self.failed, self.late = found["seconds"], found["failed"], found["late"]


@pytest.mark.skipif(not SECONDS, reason="takes minutes: set PREHEAT_LOAD_SECONDS=120, or run `make load`")
def test_everyone_who_stays_gets_the_right_picture(server: Server, show_progress: Callable[[str], None]) -> None:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=WAIT) as client:
        alone = [pictures(client.post(PREDICT, json=request).json()) for request in REQUESTS]
    counts: Counter[str] = Counter()
    wrong: list[str] = []

    async def visitor(number: int, client: httpx.AsyncClient, end: float) -> None:
        chance = random.Random(number)
        while time.monotonic() < end:
            which = chance.randrange(len(REQUESTS))
            request = REQUESTS[which] | {"stream": chance.random() < 0.3}
            try:
                if chance.random() < LEAVES:
                    async with asyncio.timeout(chance.uniform(0, 2)):
                        await client.post(PREDICT, json=request)
                    counts["answered before it left"] += 1
                    continue
                answer = await client.post(PREDICT, json=request)
            except TimeoutError:
                counts["left"] += 1
                continue
            if answer.status_code == 429:
                counts["refused"] += 1
                await asyncio.sleep(chance.uniform(0.5, 1) * int(answer.headers["Retry-After"]))
                continue
            counts[str(answer.status_code)] += 1
            if answer.status_code != 200:
                wrong.append(f"{answer.status_code} {answer.text[:200]}")
                continue
            got = pictures(_whole(answer) if request["stream"] else answer.json())
            for one, expected in zip(got, alone[which], strict=True):
                if np.abs(one.astype(int) - expected.astype(int)).max() > 1:
                    wrong.append(f"another picture for request {which}")

    async def crowd() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=WAIT, limits=limits) as client:
            end = time.monotonic() + SECONDS
            await asyncio.gather(*(visitor(number, client, end) for number in range(CLIENTS)))

    with Health(server.url) as health:
        asyncio.run(crowd())
    worst = sorted(health.seconds)
    show_progress(
        f"{CLIENTS} clients for {SECONDS:g} s: {dict(counts)}; health asked {len(worst)} times, "
        f"p50 {worst[len(worst) // 2] * 1000:.1f} ms, p99 {worst[len(worst) * 99 // 100] * 1000:.1f} ms, "
        f"worst {worst[-1] * 1000:.1f} ms; the process that asked was itself kept waiting {health.late * 1000:.0f} ms"
    )
    assert wrong == []
    assert counts["200"] > CLIENTS and counts["left"] > 0
    assert health.failed == 0
    assert worst[-1] <= HEALTH_SECONDS


def _whole(answer: httpx.Response) -> dict[str, Any]:
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines[-1]["event"] == "done", lines[-1]
    return {"images": sorted((line for line in lines if line["event"] == "image"), key=lambda line: line["index"])}


@pytest.mark.skipif(not IMAGES, reason="takes minutes: set PREHEAT_SOAK_IMAGES=1000, or run `make load`")
def test_memory_does_not_grow(server: Server, show_progress: Callable[[str], None]) -> None:
    """Less than 2 % after the first hundred images."""
    process = psutil.Process(server.pid)
    resident: list[int] = []
    with httpx.Client(base_url=server.url, trust_env=False, timeout=WAIT) as client:
        drawn = 0
        while drawn < IMAGES:
            request = REQUESTS[drawn % len(REQUESTS)] | {"num_images": 4, "stream": drawn % 3 == 0}
            answer = client.post(PREDICT, json=request)
            assert answer.status_code == 200, answer.text[:200]
            drawn += 4
            if drawn % 100 == 0:
                resident.append(process.memory_info().rss)
    show_progress("resident MiB after each 100 images: " + ", ".join(f"{size / 2**20:.0f}" for size in resident))
    assert max(resident[1:]) < 1.02 * resident[0]
