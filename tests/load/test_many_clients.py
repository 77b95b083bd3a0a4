"""Many clients at once, some of which disconnect: all others get their own images, and health checks are answered.

The tests take minutes, so each is skipped without its variable. PREHEAT_LOAD_SECONDS is the duration of the load
(120 in `make test-load`), PREHEAT_SOAK_IMAGES the number of images that are generated while the server's memory is
watched (1,000), PREHEAT_SOAK_SECONDS the duration of random requests (120).
"""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable

import httpx
import pytest

from benchmarks.soak import soak
from preheat.local_server.demo import read_metrics
from preheat.local_server.server import Server
from tests.support.load import HealthProbe
from tests.support.load_requests import REQUESTS, decoded_images, problem_of
from tests.support.predictions import LOAD_TIMEOUT_SECONDS, PREDICT_PATH, many_connections

CLIENTS = 64
DISCONNECT_SHARE = 0.2  # of the requests
STREAM_SHARE = 0.3
LOAD_SECONDS = float(os.environ.get("PREHEAT_LOAD_SECONDS", "0"))
SOAK_IMAGES = int(os.environ.get("PREHEAT_SOAK_IMAGES", "0"))
SOAK_SECONDS = float(os.environ.get("PREHEAT_SOAK_SECONDS", "0"))


@pytest.mark.skipif(not LOAD_SECONDS, reason="takes minutes: set PREHEAT_LOAD_SECONDS=120, or run `make test-load`")
def test_each_client_gets_its_own_images(server: Server, show_progress: Callable[[str], None]) -> None:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=LOAD_TIMEOUT_SECONDS) as client:
        expected = [decoded_images(client.post(PREDICT_PATH, json=request)) for request in REQUESTS]
    counts: Counter[str] = Counter()
    errors: list[str] = []

    async def send_requests(number: int, client: httpx.AsyncClient, end: float) -> None:
        rng = random.Random(number)
        while time.monotonic() < end:
            index = rng.randrange(len(REQUESTS))
            request = REQUESTS[index] | {"stream": rng.random() < STREAM_SHARE}
            try:
                if rng.random() < DISCONNECT_SHARE:
                    async with asyncio.timeout(rng.uniform(0, 2)):
                        await client.post(PREDICT_PATH, json=request)
                    counts["answered before disconnecting"] += 1
                    continue
                answer = await client.post(PREDICT_PATH, json=request)
            except TimeoutError:
                counts["disconnected"] += 1
                continue
            if answer.status_code == 429:
                counts["refused"] += 1
                await asyncio.sleep(rng.uniform(0.5, 1) * int(answer.headers["Retry-After"]))
                continue
            counts[str(answer.status_code)] += 1
            if problem := problem_of(answer, expected[index]):
                errors.append(problem)

    async def run_clients() -> None:
        async with many_connections(server.url) as client:
            end = time.monotonic() + LOAD_SECONDS
            await asyncio.gather(*(send_requests(number, client, end) for number in range(CLIENTS)))

    with HealthProbe(f"{server.url}/v1/models/model") as probe:
        asyncio.run(run_clients())
    p50, p99 = (probe.seconds[len(probe.seconds) * percent // 100] * 1000 for percent in (50, 99))
    show_progress(
        f"{CLIENTS} clients for {LOAD_SECONDS:g} s: {dict(counts)}; {len(probe.seconds)} health checks: "
        f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, slowest {probe.seconds[-1] * 1000:.1f} ms"
    )
    assert errors == []
    assert counts["200"] > CLIENTS and counts["disconnected"] > 0
    assert probe.failed == 0


@pytest.mark.skipif(not SOAK_IMAGES, reason="takes minutes: set PREHEAT_SOAK_IMAGES=1000, or run `make test-load`")
def test_memory_does_not_grow(server: Server, show_progress: Callable[[str], None]) -> None:
    """The limit is 2 % more than after the first hundred images."""
    resident_bytes: list[float] = []
    with httpx.Client(base_url=server.url, trust_env=False, timeout=LOAD_TIMEOUT_SECONDS) as client:
        for done in range(0, SOAK_IMAGES, 4):
            request = REQUESTS[done % len(REQUESTS)] | {"num_images": 4, "stream": done % 3 == 0}
            answer = client.post(PREDICT_PATH, json=request)
            assert answer.status_code == 200, answer.text[:200]
            if (done + 4) % 100 == 0:
                resident_bytes.append(read_metrics(server.url)["preheat_host_memory_bytes"])
    show_progress("resident MiB after each 100 images: " + ", ".join(f"{size / 2**20:.0f}" for size in resident_bytes))
    assert max(resident_bytes[1:]) < 1.02 * resident_bytes[0]


@pytest.mark.skipif(not SOAK_SECONDS, reason="takes minutes: set PREHEAT_SOAK_SECONDS=120, or run `make test-load`")
def test_random_requests_leave_nothing_behind(server: Server, show_progress: Callable[[str], None]) -> None:
    result = soak(server.url, SOAK_SECONDS, clients=6, leave_share=0.1, max_steps=4)
    show_progress(f"{len(result.latencies)} answers, {result.left} left, MiB: {result.memory_mib('host')}")
    assert result.failures() == []
    assert len(result.latencies) > 100 and result.left
