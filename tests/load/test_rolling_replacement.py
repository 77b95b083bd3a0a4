"""Two real servers behind HAProxy with deploy/haproxy.cfg are replaced in turn: no request is lost or answered wrongly.

Without PREHEAT_LOAD_SECONDS a few clients send requests while each server is replaced once. With it, 32 clients send
requests for that many seconds, and the servers are replaced again and again.
"""

import asyncio
import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from engine_builder.stores.store import WritableStore
from preheat.local_server.server import Layout, Server
from tests.conftest import READY_SECONDS
from tests.support.balancer import NAMES, Balancer, balancer, haproxy
from tests.support.images import Pixels, file_of
from tests.support.load_requests import REQUESTS, decoded_images, problem_of
from tests.support.ports import free_port
from tests.support.predictions import PREDICT_PATH, SMALL, many_connections
from tests.support.waiting import eventually

SECONDS = float(os.environ.get("PREHEAT_LOAD_SECONDS", "0"))
CLIENTS = 32 if SECONDS else 4
# The balancer does not keep a request of this size, so it cannot repeat it at another server.
LARGE = SMALL | {
    "image": file_of(np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)),
    "resize": "stretch", "strength": 1.0, "seed": 1,
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _haproxy() -> None:
    """Skip the tests before a server starts for them."""
    haproxy()


def drain(running: Balancer, name: str) -> None:
    """Let a server finish its requests while the other one gets all new ones."""
    running.command(f"set server preheat/{name} state drain")
    eventually(lambda: running.statistic("scur", name) == "0", f"{name} has no request")


def keep(running: Balancer, name: str) -> None:
    """Wait for a request: the server gets SIGTERM with requests in flight, while the balancer sends it new ones."""
    eventually(lambda: running.statistic("scur", name) != "0", f"{name} has a request")


@pytest.mark.parametrize(
    ("prepare", "requests"), [(keep, REQUESTS), (drain, [*REQUESTS[:8], LARGE])], ids=["SIGTERM", "drained"]
)
def test_rolling_replacement_loses_no_request(
    prepare: Callable[[Balancer, str], None],
    requests: list[dict[str, Any]],
    layout: Layout,
    store: WritableStore,
    release: str,
    tmp_path: Path,
    show_progress: Callable[[str], None],
) -> None:
    environment = {"PREHEAT_STORE": store.url, "PREHEAT_RELEASE": release, "PREHEAT_GRACE_SECONDS": "120"}
    servers = {name: Server(layout, environment=environment, port=free_port()) for name in NAMES}
    counts: Counter[str] = Counter()
    errors: list[str] = []
    in_flight: list[int] = []
    replaced = asyncio.Event()

    def replace(running: Balancer, name: str) -> None:
        """Replace a server as a release does: it finishes its requests and ends by itself, and a new one starts."""
        prepare(running, name)
        in_flight.append(int(running.statistic("scur", name)))
        os.kill(servers[name].pid, signal.SIGTERM)
        assert servers[name].wait() == -signal.SIGTERM  # uvicorn repeats the signal when everything is answered
        servers[name].stop()
        servers[name].start().wait_ready(READY_SECONDS)
        running.command(f"set server preheat/{name} state ready")
        running.wait_up(name)

    async def replace_all(running: Balancer) -> None:
        end = time.monotonic() + SECONDS
        try:
            while not in_flight or time.monotonic() < end:
                for name in NAMES:
                    await asyncio.to_thread(replace, running, name)
        finally:
            replaced.set()

    async def send_requests(number: int, client: httpx.AsyncClient, expected: list[list[Pixels]]) -> None:
        rng = random.Random(number)
        while not replaced.is_set():
            index = rng.randrange(len(requests))
            try:
                answer = await client.post(PREDICT_PATH, json=requests[index] | {"stream": rng.random() < 0.3})
            except httpx.HTTPError as error:
                errors.append(repr(error))
                continue
            counts[str(answer.status_code)] += 1
            if problem := problem_of(answer, expected[index]):
                errors.append(problem)
            else:
                counts["images"] += len(expected[index])

    async def run(running: Balancer) -> None:
        async with many_connections(running.url) as client:
            expected = [decoded_images(await client.post(PREDICT_PATH, json=request)) for request in requests]
            sending = (send_requests(number, client, expected) for number in range(CLIENTS))
            await asyncio.gather(replace_all(running), *sending)

    try:
        for server in servers.values():
            server.start()
        for server in servers.values():
            server.wait_ready(READY_SECONDS)
        with balancer(tmp_path, [server.port for server in servers.values()]) as running:
            for name in NAMES:
                running.wait_up(name)
            asyncio.run(run(running))
    finally:
        for server in servers.values():
            server.stop()
    show_progress(
        f"{CLIENTS} clients: {dict(counts)}, {len(errors)} errors; {len(in_flight)} replacements with {in_flight} "
        "requests in flight"
    )
    assert errors == []
    assert counts["200"] > CLIENTS and len(in_flight) >= 2
    assert prepare is drain or any(in_flight), "no request was in flight at a SIGTERM"


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_frees_its_slot(stream: bool, server: Server, tmp_path: Path) -> None:
    """The balancer passes the events of a stream on at once, and the end of the client's connection."""

    def cancelled() -> float:
        text = httpx.get(f"{server.url}/metrics/", trust_env=False).text
        return sum(map(float, re.findall(r"^preheat_cancellations_total\{.*\} (\S+)", text, re.MULTILINE)))

    before = cancelled()
    with balancer(tmp_path, [server.port, free_port()]) as running:
        running.wait_up("first")
        request = SMALL | {"num_inference_steps": 100, "num_images": 8, "stream": stream, "preview_every": 1}
        if stream:
            with httpx.stream("POST", running.url + PREDICT_PATH, json=request, trust_env=False) as answer:
                lines = answer.iter_lines()
                events = [json.loads(next(lines))["event"] for _ in range(3)]
            assert events[0] == "accepted" and "done" not in events
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(running.url + PREDICT_PATH, json=request, trust_env=False, timeout=0.5)
        eventually(lambda: cancelled() == before + 1, "the request is cancelled")
