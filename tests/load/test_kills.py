"""Clients of a server with two workers, which are killed at random moments, also while they load.

PREHEAT_KILL_SECONDS is the duration of the load (90 in `make test-load`). Without it the test is skipped.
"""

import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from engine_builder.local_server.server import Layout, Server
from engine_builder.stores.store import WritableStore
from tests.conftest import READY_SECONDS
from tests.support.images import largest_difference, pixels
from tests.support.predictions import PREDICT_PATH, http_client, predict
from tests.support.waiting import eventually
from tests.support.workers import log_of, serving, started, worker_pids

SECONDS = float(os.environ.get("PREHEAT_KILL_SECONDS", "0"))
CLIENTS = 12
MAX_STARTS = 2.5  # of a worker, in which the server serves again after the last kill
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "a blue line", "width": 64, "height": 64, "num_inference_steps": 4 + 2 * number, "seed": number,
     "num_images": 1 + number % 3, "output_format": "png", "preview_every": 2}
    for number in range(6)
]  # fmt: skip


def check_events(lines: list[str], expected: list[Any]) -> str:
    """Return "done" or "error" for a stream. Fails unless its events are in order, and each image is right."""
    events = [json.loads(line) for line in lines]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "accepted" and set(kinds[1:-1]) <= {"step", "image", "heartbeat"}, kinds
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == sorted(steps), steps
    assert {event["steps"] for event in events if event["event"] in ("accepted", "step")} == {events[0]["steps"]}
    images = {event["index"]: event["data"] for event in events if event["event"] == "image"}
    assert kinds.count("image") == len(images)
    assert all(largest_difference(pixels(data), expected[index]) <= 1 for index, data in images.items())
    if kinds[-1] == "done":
        assert len(images) == len(expected) and steps[-1] == events[0]["steps"]
    else:
        assert (kinds[-1], events[-1]["status"]) == ("error", 503), events[-1]
    return kinds[-1]


def send_requests(number: int, url: str, expected: list[list[Any]], end: threading.Event, counts: Counter[str]) -> None:
    rng = random.Random(number)
    with httpx.Client(base_url=url, trust_env=False, timeout=READY_SECONDS) as client:
        while not end.is_set():
            index, stream = rng.randrange(len(REQUESTS)), rng.random() < 0.5
            counts["sent"] += 1
            answer = client.post(PREDICT_PATH, json=REQUESTS[index] | {"stream": stream})
            if answer.status_code == 503:
                assert answer.headers["Retry-After"] and answer.json()["kind"] == "unavailable"
                counts["503"] += 1
                time.sleep(0.1)
            elif stream and answer.status_code == 200:
                counts[check_events(answer.text.splitlines(), expected[index])] += 1
            else:
                images = [pixels(image["data"]) for image in answer.json()["images"]]
                assert len(images) == len(expected[index])
                assert all(largest_difference(*pair) <= 1 for pair in zip(images, expected[index], strict=True))
                counts["200"] += 1


def seconds_until_served(server: Server, client: httpx.Client, pids: list[int]) -> float:
    """Kill processes, and return the seconds until a worker serves that was not one of them."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()

    def is_back() -> bool:
        return bool(set(serving(server)) - set(pids)) and client.get("/v1/models/model").status_code == 200

    eventually(is_back, "a worker that serves", READY_SECONDS)
    return time.monotonic() - began


@pytest.mark.skipif(not SECONDS, reason="takes minutes: set PREHEAT_KILL_SECONDS=90, or run `make test-load`")
def test_kills_of_workers_lose_no_request(
    layout: Layout, store: WritableStore, release: str, tmp_path: Path, show_progress: Callable[[str], None]
) -> None:
    counts: Counter[str] = Counter()
    failed: list[BaseException] = []
    end, rng = threading.Event(), random.Random(0)
    limits = {"max_queue": 64}
    with started(layout, store, release, tmp_path, limits=limits) as server, http_client(server) as client:
        expected = [[pixels(image["data"]) for image in predict(client, **body)["images"]] for body in REQUESTS]
        eventually(lambda: len(serving(server)) == 2, "two workers that serve", READY_SECONDS)
        start_seconds = seconds_until_served(server, client, worker_pids(server))

        def run(number: int) -> None:
            try:
                send_requests(number, server.url, expected, end, counts)
            except BaseException as error:
                failed.append(error)

        clients = [threading.Thread(target=run, args=[number]) for number in range(CLIENTS)]
        for thread in clients:
            thread.start()
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            time.sleep(rng.uniform(0.5, 5))
            if pids := worker_pids(server):
                psutil.Process(rng.choice(pids)).kill()
                counts["kills"] += 1
        again_seconds = seconds_until_served(server, client, worker_pids(server))
        end.set()
        for thread in clients:
            thread.join()
        logged = Counter(re.findall(r'\\"request\\": \\"(\w+)\\"', log_of(server)))
    show_progress(
        f"{SECONDS:g} s of kills: {dict(counts)}; a start takes {start_seconds:.1f} s, service again after "
        f"{again_seconds:.1f} s"
    )
    assert failed == []
    assert counts["sent"] == counts["200"] + counts["done"] + counts["error"] + counts["503"]
    assert set(logged.values()) == {1}  # no request is answered twice
    assert counts["200"] and counts["done"]
    assert again_seconds < MAX_STARTS * start_seconds
