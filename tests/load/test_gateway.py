"""64 clients through a gateway with two real servers, one of which is killed half-way.

PREHEAT_GATEWAY_SECONDS is the duration of the load (60 in `make test-load`).
"""

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from model.store.store import Store
from preheat.local_server.server import Layout, Server
from tests.conftest import READY_SECONDS
from tests.support.gateway import running_gateway
from tests.support.images import Pixels, largest_difference, pixels
from tests.support.predictions import PREDICT_PATH, http_client, many_connections, predict

CLIENTS = 64
SECONDS = float(os.environ.get("PREHEAT_GATEWAY_SECONDS", "5"))
STREAM_SHARE = 0.3
# Requests that share batches. Their sizes, steps and seeds differ, so that a wrong picture is noticed.
REQUESTS: list[dict[str, Any]] = [
    {
        "prompt": ["a red circle", "two green squares on white", "a blue line"][number % 3],
        "width": [64, 96][number % 2],
        "height": 64,
        "num_inference_steps": 2 + number % 3,
        "seed": number,
        "output_format": "png",
    }
    for number in range(12)
]


def openai_body(request: dict[str, Any], stream: bool) -> dict[str, Any]:
    body = {key: value for key, value in request.items() if key not in ("width", "height")}
    return body | {"size": f"{request['width']}x{request['height']}", "stream": stream}


def picture_or_error(answer: httpx.Response) -> tuple[str | None, str]:
    """Return the base64 of the picture, or None and the reason that the answer states."""
    if answer.status_code != 200:
        error = answer.json()["error"]
        return None, f"{answer.status_code} {error if isinstance(error, str) else error['message']}"
    kind = answer.headers["Content-Type"].partition(";")[0]
    if kind == "text/event-stream":
        last = json.loads(answer.text.strip().rpartition("data: ")[2])
        return last.get("b64_json"), f"event {last['error']['message']}" if "error" in last else ""
    if kind == "application/x-ndjson":
        events = [json.loads(line) for line in answer.text.splitlines()]
        image = next((event["data"] for event in events if event["event"] == "image"), None)
        return (image, "") if events[-1]["event"] == "done" else (None, f"event {events[-1]['error']}")
    body = answer.json()
    image = body["data"] if isinstance(body["data"], str) else body["data"][0]["b64_json"]
    return image, ""


def test_no_request_is_lost_when_a_server_is_killed(
    server: Server, layout: Layout, store: Store, release: str, tmp_path: Path, show_progress: Callable[[str], None]
) -> None:
    with http_client(server) as direct:
        expected: list[Pixels] = [pixels(predict(direct, **request)["data"]) for request in REQUESTS]
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    lost: list[str] = []
    answered_after_kill = 0

    async def send_requests(number: int, client: httpx.AsyncClient, end: float, killed: asyncio.Event) -> None:
        nonlocal answered_after_kill
        rng = random.Random(number)
        while time.monotonic() < end:
            index, stream = rng.randrange(len(REQUESTS)), rng.random() < STREAM_SHARE
            request, after_kill = REQUESTS[index], killed.is_set()
            counts["sent"] += 1
            try:
                if rng.random() < 0.5:
                    answer = await client.post("/v1/images/generations", json=openai_body(request, stream))
                else:
                    answer = await client.post(PREDICT_PATH, json=request | {"stream": stream})
                image, reason = picture_or_error(answer)
            except Exception as error:  # no answer, or one that cannot be read
                lost.append(repr(error))
                continue
            if image is None:
                counts[f"refused: {reason[:70]}"] += 1
                if len(reason) < 20:
                    lost.append(f"no reason: {reason}")
                await asyncio.sleep(min(1, float(answer.headers.get("Retry-After", 0))))
            elif largest_difference(pixels(image), expected[index]) > 1:
                wrong.append(f"request {index}")
            else:
                counts["right"] += 1
                answered_after_kill += after_kill

    async def run_clients(url: str, kill: Callable[[], None]) -> None:
        async with many_connections(url) as client:
            end, killed = time.monotonic() + SECONDS, asyncio.Event()
            clients = [asyncio.create_task(send_requests(n, client, end, killed)) for n in range(CLIENTS)]
            await asyncio.sleep(SECONDS / 2)
            kill()
            killed.set()
            await asyncio.gather(*clients)

    environment = {"PREHEAT_STORE": store.url, "PREHEAT_RELEASE": release}
    with Server(layout, environment=environment, log=tmp_path / "server.log") as victim:
        victim.wait_ready(READY_SECONDS)
        with running_gateway([victim.url, server.url]) as url:
            asyncio.run(run_clients(url, lambda: os.kill(victim.pid, signal.SIGKILL)))
            health = httpx.get(f"{url}/health", trust_env=False).json()
    show_progress(f"{CLIENTS} clients for {SECONDS:g} s: {dict(counts)}, right after the kill: {answered_after_kill}")
    assert wrong == [] and lost == []
    refused = sum(count for name, count in counts.items() if name.startswith("refused"))
    assert counts["sent"] == counts["right"] + refused
    assert any("connection ended" in name for name in counts), "no request was in flight at the kill"
    assert answered_after_kill > 0
    assert [backend["up"] for backend in health["backends"]] == [False, True]
