"""A real server with two workers: its images are those of one process, and the end of a worker loses no request."""

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from engine_builder.stores.store import WritableStore
from model.workers.process import METRICS_SECONDS
from preheat.local_server.server import Layout, Server
from tests.conftest import READY_SECONDS
from tests.support.images import largest_difference, pixels
from tests.support.predictions import PREDICT_PATH, http_client
from tests.support.waiting import TIMEOUT_SECONDS, eventually
from tests.support.workers import log_of, serving, started, worker_pids

REQUEST = {"prompt": "a red circle on a blue background", "seed": 3, "num_inference_steps": 6, "output_format": "png"}
LONG = REQUEST | {"num_inference_steps": 50, "num_images": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="module")
def shared(layout: Layout, store: WritableStore, release: str, folder: Path) -> Iterator[Server]:
    with started(layout, store, release, folder) as running:
        yield running


@pytest.fixture
def pool(shared: Server) -> Server:
    """A server with two workers, both of which serve."""
    eventually(lambda: len(serving(shared)) == 2, "two workers that serve", READY_SECONDS)
    return shared


@pytest.fixture
def client(pool: Server) -> Iterator[httpx.Client]:
    with http_client(pool) as client:
        yield client


def moved(server: Server) -> int:
    """Return the requests that went to another worker at the end of one."""
    return sum(int(count) for count in re.findall(r"worker_ended.*?moved\D+(\d+)", log_of(server)))


def picture(response: httpx.Response, index: int = 0) -> Any:
    assert response.status_code == 200, response.text
    return pixels(response.json()["images"][index]["data"])


def metric(client: httpx.Client, name: str) -> float:
    text = client.get("/metrics/").text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def settled(client: httpx.Client, name: str) -> float:
    """Return a metric that no longer changes. Workers send their metrics every METRICS_SECONDS."""
    value = metric(client, name)
    for _ in range(TIMEOUT_SECONDS):
        time.sleep(METRICS_SECONDS + 0.5)
        before, value = value, metric(client, name)
        if before == value:
            return value
    raise AssertionError(f"{name} still changes")


def wait_for_image_in_loop(client: httpx.Client) -> None:
    eventually(lambda: metric(client, "preheat_active_images") >= 1, "an image in a loop")


def test_pictures_are_those_of_one_process(server: Server, client: httpx.Client) -> None:
    with http_client(server) as one:
        expected = picture(one.post(PREDICT_PATH, json=REQUEST))
        described = [c.post(PREDICT_PATH, json={"prompt": "", "describe": True}).json() for c in (one, client)]
    for _ in range(2):  # one on each worker
        assert largest_difference(picture(client.post(PREDICT_PATH, json=REQUEST)), expected) <= 1
    assert described[0] == described[1]


@pytest.mark.full
def test_concurrent_requests_use_both_workers(pool: Server, client: httpx.Client) -> None:
    pids = worker_pids(pool)

    def cpu() -> list[float]:
        return [psutil.Process(pid).cpu_times().user for pid in pids]

    before = cpu()
    with ThreadPoolExecutor(4) as threads:
        requests = [REQUEST | {"seed": seed, "num_inference_steps": 30} for seed in range(4)]
        answers = list(threads.map(lambda request: client.post(PREDICT_PATH, json=request), requests))
    spent = [after - earlier for after, earlier in zip(cpu(), before, strict=True)]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert min(spent) > 0.2 * max(spent), spent


def test_refuses_what_only_a_worker_can_plan(client: httpx.Client) -> None:
    """The weight of a prompt is checked when the request is planned."""
    for stream in (False, True):
        request = REQUEST | {"prompt": "(word:1000)", "prompt_syntax": "weighted", "stream": stream}
        answer = client.post(PREDICT_PATH, json=request)
        assert answer.status_code == 400 and answer.json()["field"] == "prompt", answer.text


@pytest.mark.full
def test_metrics_add_the_workers_and_keep_ended_ones(pool: Server, client: httpx.Client) -> None:
    images, steps = (settled(client, f"preheat_{name}_total") for name in ("images", "steps"))
    for seed in range(2):
        picture(client.post(PREDICT_PATH, json=REQUEST | {"seed": seed}))
    eventually(lambda: metric(client, "preheat_images_total") == images + 2, "two more images")
    assert settled(client, "preheat_steps_total") == metric(client, "preheat_step_seconds_count") == steps + 12
    resident = [psutil.Process(pid).memory_info().rss for pid in (pool.pid, *worker_pids(pool))]
    assert metric(client, "preheat_host_memory_bytes") == pytest.approx(sum(resident), rel=0.1)
    for pid in worker_pids(pool):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: client.get("/v1/models/model").status_code == 503, "an unhealthy server")
    assert metric(client, "preheat_healthy") == 0
    assert metric(client, "preheat_images_total") == images + 2
    assert metric(client, "preheat_cold_start_seconds") > 0


def busy_worker(server: Server) -> int:
    """Return the process of the one worker that generates images. The other one may still measure its batches."""
    processes = [psutil.Process(pid) for pid in worker_pids(server)]
    for _ in range(20):
        before = [process.cpu_times().user for process in processes]
        time.sleep(0.4)
        spent = [process.cpu_times().user - began for process, began in zip(processes, before, strict=True)]
        if max(spent) > 0.1 + 4 * min(spent):
            return processes[spent.index(max(spent))].pid
    raise AssertionError("both workers are busy, or none is")


def begin_long_request(client: httpx.Client, threads: ThreadPoolExecutor) -> Any:
    """Start LONG, and return its future answer once its images are in a loop."""
    settled(client, "preheat_active_images")
    answer = threads.submit(client.post, PREDICT_PATH, json=LONG)
    wait_for_image_in_loop(client)
    return answer


@pytest.mark.parametrize("sent", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
def test_another_worker_answers_for_one_that_ends(sent: int, pool: Server, client: httpx.Client) -> None:
    expected = client.post(PREDICT_PATH, json=LONG)
    moved_before = moved(pool)
    with ThreadPoolExecutor(1) as threads:
        answer = begin_long_request(client, threads)
        os.kill(busy_worker(pool), sent)
        got = answer.result()
    eventually(lambda: moved(pool) == moved_before + 1, "the log of the end of the worker")
    for index in range(2):
        assert largest_difference(picture(got, index), picture(expected, index)) <= 1


@pytest.mark.full
def test_stream_has_each_image_once_after_the_end_of_a_worker(pool: Server, client: httpx.Client) -> None:
    """The request has so many images that the last ones wait for the first."""
    request = REQUEST | {"num_images": 8, "num_inference_steps": 20, "stream": True, "width": 256, "height": 256}
    settled(client, "preheat_active_images")
    events, moved_before = [], moved(pool)
    with client.stream("POST", PREDICT_PATH, json=request) as answer:
        for line in answer.iter_lines():
            event = httpx.Response(200, text=line).json()
            events.append(event)
            if [event["event"] for event in events].count("image") == 1 and event["event"] == "image":
                os.kill(busy_worker(pool), signal.SIGKILL)
    assert events[-1]["event"] == "done", events[-1]
    eventually(lambda: moved(pool) == moved_before + 1, "the log of the end of the worker")
    indices = [event["index"] for event in events if event["event"] == "image"]
    assert sorted(indices) == list(range(8))
    seeds = {event["index"]: event["seed"] for event in events if event["event"] == "image"}
    assert seeds == {index: 3 + index for index in range(8)}
    whole = client.post(PREDICT_PATH, json={**request, "stream": False})
    for event in events:
        if event["event"] == "image":
            assert largest_difference(pixels(event["data"]), picture(whole, event["index"])) <= 1


@pytest.mark.full
def test_without_workers_requests_are_unavailable_until_one_is_back(pool: Server, client: httpx.Client) -> None:
    with ThreadPoolExecutor(1) as threads:
        answer = begin_long_request(client, threads)
        for pid in worker_pids(pool):
            os.kill(pid, signal.SIGKILL)
        answer = answer.result()
    assert (answer.status_code, answer.json()["kind"]) == (503, "unavailable"), answer.text
    assert "being started again" in answer.json()["error"]
    assert client.post(PREDICT_PATH, json=REQUEST).status_code == 503
    assert client.get("/v1/models/model").status_code == 503
    eventually(lambda: client.get("/v1/models/model").status_code == 200, "a worker that serves", READY_SECONDS)
    assert client.post(PREDICT_PATH, json=REQUEST).status_code == 200


@pytest.mark.full
def test_workers_end_with_a_killed_server(layout: Layout, store: WritableStore, release: str, tmp_path: Path) -> None:
    with started(layout, store, release, tmp_path) as running:
        workers = worker_pids(running)
        assert len(workers) == 2
        os.kill(running.pid, signal.SIGKILL)
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "the end of the workers", 30)
