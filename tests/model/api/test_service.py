"""Over HTTP, on the real server: streams, overload, deadlines, clients that leave, ids, logs, metrics, termination."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client import REGISTRY
from starlette.requests import Request

from model.api.images import Part, UndecodedRequest
from model.api.resolve import resolve
from model.api.service import Service
from model.cold_start import ColdStart
from model.loading.load import Loaded
from model.loading.served import Defaults, ServedModel, SizeList
from model.pipeline import spec
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import GenerationParams
from model.pipeline.request_plan import RequestPlan
from model.pipeline.runner import Runner
from model.request_fields import GenerationRequest
from model.scheduling.scheduler import Scheduler
from model.settings import Limits
from model.statuses import STATUSES
from model.store.store import Store
from preheat.local_server.client import CallFailed, generate
from preheat.local_server.server import Layout, Server
from tests.conftest import READY_SECONDS
from tests.support.images import file_of, largest_difference, open_image, pixels
from tests.support.in_process import serve_in_process
from tests.support.linear_networks import linear_model, stub
from tests.support.predictions import PREDICT_PATH, PROMPT, SMALL, http_client, post, predict
from tests.support.waiting import eventually

LONG = {"prompt": PROMPT, "width": 256, "height": 256, "num_inference_steps": 100}  # some five seconds on two cores
ACTIVE = 'preheat_active_images{component="unet"}'
STEPS = 'preheat_steps_total{component="unet"}'


@pytest.fixture(scope="module")
def limited(loaded: Loaded) -> Iterator[httpx.Client]:
    """A server in this process that queues 8 images, serves one size at a time, and logs prompts."""
    with serve_in_process(loaded, Limits(max_queue=8, sizes_at_once=1), log_prompts=True) as client:
        yield client


def samples(client: httpx.Client) -> dict[str, float]:
    """Every sample of the server's metrics, by its name and labels."""
    lines = client.get("/metrics/").text.splitlines()
    parts = [line.rpartition(" ") for line in lines if line.startswith("preheat_")]
    return {name: float(value) for name, _, value in parts}


def wait_for_active(client: httpx.Client, images: int) -> None:
    eventually(lambda: samples(client)[ACTIVE] == images, f"{images} images in the UNet's loops", READY_SECONDS)


@contextmanager
def open_stream(client: httpx.Client, **request: object) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a stream. It is closed with the block, whether it has ended or not."""
    with client.stream("POST", PREDICT_PATH, json={**request, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/x-ndjson"
        yield (json.loads(line) for line in response.iter_lines())


def stream_events(client: httpx.Client, **request: object) -> list[dict[str, Any]]:
    with open_stream(client, **request) as events:
        return list(events)


# -- streams ----------------------------------------------------------------------------------------------------------


def test_stream_has_every_step_and_ends_with_the_images(client: httpx.Client) -> None:
    request = SMALL | {"num_inference_steps": 12, "seed": 4, "use_refiner": True, "num_images": 2}
    response = predict(client, **request)
    events = stream_events(client, **request, preview_every=4)
    assert events[0]["event"] == "accepted" and events[-1]["event"] == "done"
    assert (events[0]["seed"], events[0]["steps"]) == (4, 24)
    steps = [event for event in events if event["event"] == "step"]
    numbers = [event["step"] for event in steps]
    assert len(numbers) >= 20 and numbers == sorted(numbers) and set(numbers) <= set(range(1, 25))
    plain = [event["step"] for event in steps if "preview" not in event]
    assert len(set(plain)) == len(plain)
    assert {event["steps"] for event in steps} == {24}
    previews = [event["preview"] for event in steps if "preview" in event]
    assert len(previews) >= 2 and all(open_image(data).size == (8, 8) for data in previews)
    images = {event["index"]: event for event in events if event["event"] == "image"}
    assert [images[index]["seed"] for index in range(2)] == [4, 5]
    for index, image in enumerate(response["images"]):
        assert largest_difference(pixels(images[index]["data"]), pixels(image["data"])) <= 1
    assert events[-1]["engine"] == response["engine"]
    assert events[-1]["timings"].keys() == response["timings"].keys()


def test_last_preview_resembles_the_image(client: httpx.Client) -> None:
    request = {"prompt": PROMPT, "seed": 7, "num_inference_steps": 20, "output_format": "png"}
    events = stream_events(client, **request, preview_every=19)
    [preview] = [pixels(event["preview"]) for event in events if "preview" in event]
    [image] = [open_image(event["data"]) for event in events if event["event"] == "image"]
    small = np.asarray(image.resize(preview.shape[1::-1]))
    assert np.abs(preview.astype(int) - small.astype(int)).mean() < 0.1 * 255
    assert np.corrcoef(preview.ravel(), small.ravel())[0, 1] > 0.9


def test_waiting_stream_has_heartbeats(limited: httpx.Client) -> None:
    """It waits because images of another size run."""
    with open_stream(limited, **LONG | {"width": 128, "height": 128}, num_images=8) as running:
        while next(running)["event"] != "step":  # until then the images fill the queue
            pass
        with open_stream(limited, **SMALL) as waiting:
            assert [next(waiting)["event"] for _ in range(2)] == ["accepted", "heartbeat"]


# -- limits -----------------------------------------------------------------------------------------------------------


def test_refuses_requests_beyond_the_queue(limited: httpx.Client) -> None:
    def send(seed: int) -> httpx.Response:
        return post(limited, **SMALL | {"seed": seed, "num_inference_steps": 4, "num_images": 4})

    with ThreadPoolExecutor(24) as threads:
        responses = list(threads.map(send, range(24)))
    assert {response.status_code for response in responses} == {200, 429}
    for response in responses:
        if response.status_code == 429:
            assert 1 <= int(response.headers["Retry-After"]) <= 60
            assert response.json()["kind"] == "overloaded" and "Repeat the request in" in response.json()["error"]
    eventually(lambda: samples(limited)["preheat_queue_images"] == 0, "the queue is empty again")


def test_deadline_ends_requests_and_streams(loaded: Loaded) -> None:
    events: list[dict[str, Any]] = []
    request = LONG | {"width": 128, "height": 128, "num_images": 4}
    with serve_in_process(loaded, Limits(deadline_seconds=3)) as client, ThreadPoolExecutor(1) as threads:
        streamed = threads.submit(generate, str(client.base_url), request, READY_SECONDS, events.append)
        response = post(client, **request)
        with pytest.raises(CallFailed, match="504: The images were not finished within 3 s") as failure:
            streamed.result()
        wait_for_active(client, 0)
        predict(client, **SMALL)
    assert failure.value.status == response.status_code == 504
    assert "within 3 s" in response.json()["error"] and response.json()["kind"] == "deadline"
    assert any(event["event"] == "step" for event in events), "the stream failed before it began"


# -- clients that leave -----------------------------------------------------------------------------------------------


@contextmanager
def open_request(client: httpx.Client, **request: object) -> Iterator[None]:
    """Send a request without waiting for its response. The connection is closed with the block."""
    body = json.dumps(request).encode()
    head = f"POST {PREDICT_PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        yield


@pytest.mark.parametrize("send", [open_request, open_stream], ids=["request", "stream"])
def test_client_that_leaves_ends_its_request(send: Any, client: httpx.Client, server: Server, release: str) -> None:
    cancelled = 'preheat_cancellations_total{state="running"}'
    answered = f'preheat_requests_total{{release="{release}",status="499"}}'
    before = samples(client)
    with http_client(server) as leaving, send(leaving, **LONG):
        wait_for_active(client, 1)
    eventually(lambda: samples(client)[cancelled] == before[cancelled] + 1, "the request is cancelled")
    wait_for_active(client, 0)
    eventually(lambda: samples(client).get(answered, 0) == before.get(answered, 0) + 1, "it is counted once")
    assert samples(client)[STEPS] < before[STEPS] + 100
    predict(client, **SMALL)


# -- ids, logs, metrics -----------------------------------------------------------------------------------------------


def test_request_id_is_in_response_and_log(limited: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    def send(identity: str, **changes: object) -> httpx.Response:
        return limited.post(PREDICT_PATH, json=SMALL | changes, headers={"X-Request-Id": identity})

    with caplog.at_level(logging.INFO, "preheat"):
        response, refused = send("order-66.a"), send("order-67", width=100)
    assert response.headers["X-Request-Id"] == "order-66.a"
    assert refused.headers["X-Request-Id"] == "order-67"
    [entry] = [json.loads(record.message) for record in caplog.records if '"order-66.a"' in record.message]
    assert entry["event"] == "request" and entry["status"] == 200
    assert entry["prompt"] == PROMPT and entry["timings"].keys() == response.json()["timings"].keys()
    generated = {send("a b\tc").headers["X-Request-Id"] for _ in range(2)}  # that one is not safe to log
    assert len(generated) == 2 and all(re.fullmatch(r"[0-9a-f]{32}", identity) for identity in generated)


def test_metrics_count_a_request(client: httpx.Client, release: str) -> None:
    before = samples(client)
    predict(client, **SMALL, num_images=2)
    predict(client, prompt=PROMPT, describe=True)  # counts as no request
    post(client, **SMALL | {"width": 100})
    after = samples(client)

    def increase(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert increase('preheat_images_total{task="text_to_image"}') == 2
    assert increase(f'preheat_requests_total{{release="{release}",status="200"}}') == 1
    assert increase('preheat_errors_total{kind="refused"}') == 1
    assert {f'preheat_errors_total{{kind="{kind}"}}' for _, kind in STATUSES} <= before.keys()
    assert 2 <= increase(STEPS) <= 4
    assert increase('preheat_step_images_sum{component="unet"}') == 4
    assert increase("preheat_queue_wait_seconds_count") == 1
    for stage in ("text", "denoise", "decode", "encode"):
        assert increase(f'preheat_stage_seconds_count{{stage="{stage}"}}') == 1
    assert after["preheat_queue_images"] == 0 and after["preheat_healthy"] == 1


def test_health_is_answered_while_the_device_is_busy(client: httpx.Client) -> None:
    """A run of an engine does not block the server's other threads."""
    with open_stream(client, **LONG, num_images=8):
        wait_for_active(client, 8)
        begun, answers = samples(client)[STEPS], 0
        while samples(client)[STEPS] < begun + 3:
            assert client.get("/v1/models/model").status_code == 200
            answers += 1
    wait_for_active(client, 0)
    assert answers > 6  # several a step; at most one if a step held Python's lock


# -- failure and termination ------------------------------------------------------------------------------------------


@contextmanager
def serving(model: LoadedModel | None = None, deadline_seconds: float = 300.0) -> Iterator[tuple[Service, Scheduler]]:
    """The service of a model in this process, by default of one that generates at once."""
    sizes = SizeList(((64, 64),))
    served = ServedModel(64, 64, sizes, True, Defaults(num_inference_steps=2), image_sizes=sizes)
    model = model or linear_model()
    scheduler = Scheduler([Runner(model)], Limits(deadline_seconds=deadline_seconds), lambda: None)
    loaded = Loaded(model, served, "linear/1", "cpu", "aot_inductor", 0)
    yield Service([loaded.summary], scheduler, ColdStart(), False), scheduler
    scheduler.close()


async def answer_to(service: Service, left: asyncio.Event | None = None, **fields: Any) -> Any:
    """Return the answer to a request, whose client leaves when `left` is set."""

    async def receive() -> dict[str, str]:
        await (left or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    request = GenerationRequest(**{"prompt": "a circle"} | fields)
    return await service.answer(request, Request({"type": "http", "headers": []}, receive))


def test_ended_server_does_not_decode_images() -> None:
    with serving() as (service, scheduler):
        assert asyncio.run(answer_to(service, image="AAAA")).status_code == 400
        scheduler.close()
        answer = asyncio.run(answer_to(service, image="AAAA"))
        assert answer.status_code == 503 and answer.headers["Retry-After"] == "5"


@dataclass
class SlowDecoder:
    """In place of `read_images`: each request has two parts that take until `finish`. `begun`: their prompts."""

    def __post_init__(self) -> None:
        self.begun: list[str] = []
        self.finish = threading.Event()

    def __call__(self, request: GenerationRequest, served: ServedModel) -> UndecodedRequest:
        def decode() -> Any:
            self.begun.append(request.prompt)
            assert self.finish.wait(READY_SECONDS)

        return UndecodedRequest(resolve(request, served, (64, 64)), 2 * [Part(64**2, decode)])


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDecoder]:
    decoder = SlowDecoder()
    monkeypatch.setattr("model.api.service.read_images", decoder)
    yield decoder
    decoder.finish.set()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(READY_SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


def test_deadline_includes_decoding(decoder: SlowDecoder) -> None:
    async def answer_three() -> None:
        answers = (answer_to(service, prompt=prompt, image="AAAA", strength=1.0) for prompt in "abc")
        assert [response.status_code for response in await asyncio.gather(*answers)] == [504, 504, 504]
        assert decoder.begun == ["a"] and not decoder.finish.is_set(), "b and c waited for the thread"
        decoder.finish.set()
        await asyncio.sleep(0.05)
        assert decoder.begun == ["a"], "the others, and the second part of a, were answered before they were decoded"

    with serving(deadline_seconds=0.05) as (service, _):
        asyncio.run(answer_three())


def test_client_that_leaves_is_not_decoded(decoder: SlowDecoder) -> None:
    def answer(prompt: str, left: asyncio.Event | None = None) -> "asyncio.Task[Any]":
        return asyncio.create_task(answer_to(service, left, prompt=prompt, image="AAAA", strength=1.0))

    async def answer_four() -> None:
        left = asyncio.Event()
        staying = [answer(prompt) for prompt in "ab"]
        await until(lambda: decoder.begun == ["a"])
        leaving, last = answer("c", left), answer("d")
        await asyncio.sleep(0.05)
        left.set()
        assert (await leaving).status_code == 499
        assert not decoder.finish.is_set()
        decoder.finish.set()
        assert [(await task).status_code for task in (*staying, last)] == [200, 200, 200]
        assert sorted(decoder.begun) == ["a", "a", "b", "b", "d", "d"]

    with serving() as (service, _):
        asyncio.run(answer_four())


def cancellations() -> dict[str, float]:
    states = ("decoding", "queued", "running")
    return {state: REGISTRY.get_sample_value("preheat_cancellations_total", {"state": state}) or 0 for state in states}


class SlowReader:
    """Reads a request's long prompts until `finish`, for a service whose scheduler begins no image."""

    def __init__(self, service: Service, scheduler: Scheduler) -> None:
        self.begun, self.finish, self.idle = threading.Event(), threading.Event(), threading.Event()
        self.left = asyncio.Event()
        self._service, self._plan = service, scheduler.runners[0].plan
        scheduler.call(lambda: self.idle.wait(READY_SECONDS))
        scheduler.runners[0].plan = self._read  # type: ignore[method-assign]

    def _read(self, params: GenerationParams) -> RequestPlan:
        self.begun.set()
        assert self.finish.wait(READY_SECONDS)
        return self._plan(params)

    def answer(self) -> "asyncio.Task[Any]":
        return asyncio.create_task(answer_to(self._service, self.left, prompt="a" * 4000))


@pytest.mark.parametrize("end", ["client leaves", "answer is cancelled", "another one waits"])
def test_request_that_ends_while_it_is_submitted_is_cancelled_once(end: str) -> None:
    before = cancellations()

    async def end_requests() -> None:
        reader = SlowReader(service, scheduler)
        answers = [reader.answer() for _ in range(1 + (end == "another one waits"))]  # the second waits for the thread
        await until(reader.begun.is_set)
        if end == "answer is cancelled":
            answers[0].cancel()
        else:
            reader.left.set()
        await asyncio.wait(answers)
        assert answers[0].cancelled() or answers[0].result().status_code == 499
        after = before | {"decoding": before["decoding"] + len(answers) - 1}
        assert cancellations() == after
        reader.finish.set()
        await until(lambda: cancellations() == after | {"queued": before["queued"] + 1})
        reader.idle.set()

    with serving() as (service, scheduler):
        asyncio.run(end_requests())


def test_accepted_request_releases_its_texts() -> None:
    """Truss keeps the request object until the answer."""
    data = file_of(np.zeros((64, 64, 3), np.uint8))
    request = GenerationRequest(prompt="a circle", image=data, strength=1.0, masks=[{"image": data}])
    http = Request({"type": "http", "headers": []}, lambda: asyncio.Event().wait())
    with serving() as (service, _):
        response: Any = asyncio.run(service.answer(request, http))
    assert response.status_code == 200
    assert data not in str(request)


def test_broken_image_is_an_error_with_its_seed(caplog: pytest.LogCaptureFixture) -> None:
    """The next request is served."""
    model = linear_model()
    stub(model, spec.UNET).poison = (0, float("nan"))

    async def answer_twice() -> list[Any]:
        return [await answer_to(service, seed=987654) for _ in range(2)]

    with serving(model) as (service, _):
        broken, sound = asyncio.run(answer_twice())
    body = json.loads(broken.body)
    assert (broken.status_code, body["kind"]) == (500, "broken_image")
    assert "NaN or infinite" in body["error"] and "987654" in body["error"]
    assert "during denoising" in body["error"] and "preheat build --precision" in body["error"]
    assert "data" not in body
    assert "broken_image" in caplog.text and "987654" in caplog.text
    assert sound.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_overflowing_request_is_no_fault_of_the_server(stream: bool) -> None:
    """The other image of the batch is finished."""
    model = linear_model()
    stub(model, spec.UNET).poison = (0, float("inf"))

    async def last_entry(**fields: Any) -> dict[str, Any]:
        response = await answer_to(service, **fields)
        if not fields.get("stream"):
            return {"status": response.status_code, **json.loads(response.body)}
        return [json.loads(line) async for line in response.body_iterator][-1]

    async def answer_both() -> list[dict[str, Any]]:
        return await asyncio.gather(last_entry(guidance_scale=30, seed=9, stream=stream), last_entry())

    with serving(model) as (service, _):
        broken, sound = asyncio.run(answer_both())
    assert (broken["status"], broken["kind"], broken["field"]) == (422, "overflow", "guidance_scale")
    assert "guidance_scale 30" in broken["error"]
    assert sound["status"] == "success"


@dataclass
class Termination:
    """The results of a server that was terminated while it had a running and a waiting request."""

    statuses: list[int]
    late: httpx.Response
    """The answer to a request that arrived afterwards."""
    exit_code: int
    log: str


SECRET = "a purple rhinoceros of Saxony"


@pytest.fixture(scope="module")
def termination(layout: Layout, store: Store, release: str, tmp_path_factory: pytest.TempPathFactory) -> Termination:
    """All requests have the prompt SECRET. One of them was refused, one was answered before."""
    log = tmp_path_factory.mktemp("terminated") / "server.log"
    secret = {"prompt": SECRET, "negative_prompt": SECRET}
    environment = {"PREHEAT_STORE": store.url, "PREHEAT_RELEASE": release}
    with Server(layout, environment=environment, log=log) as server, http_client(server) as client:
        server.wait_ready(READY_SECONDS)
        predict(client, **SMALL | secret)
        assert post(client, **SMALL | secret | {"width": 100}).status_code == 400
        with ThreadPoolExecutor(2) as threads:
            running = threads.submit(post, client, **LONG | secret | {"num_inference_steps": 40})
            wait_for_active(client, 1)
            waiting = threads.submit(post, client, **LONG | secret | {"num_images": 8, "num_inference_steps": 2})

            def accepted() -> float:
                counts = samples(client)
                return counts[ACTIVE] + counts["preheat_queue_images"]

            eventually(lambda: accepted() == 9, "both requests are accepted")
            os.kill(server.pid, signal.SIGTERM)
            eventually(lambda: client.get("/v1/models/model").status_code == 503, "the server is not ready")
            late = post(client, **SMALL | secret)
            eventually(lambda: refuses_connections(server), "new connections are refused")
            statuses = [future.result().status_code for future in (running, waiting)]
        return Termination(statuses, late, server.wait(), log.read_text())


def refuses_connections(server: Server) -> bool:
    try:
        httpx.get(f"{server.url}/", trust_env=False)
    except httpx.TransportError:
        return True
    return False


def test_terminated_server_answers_accepted_requests(termination: Termination) -> None:
    assert termination.statuses == [200, 200]
    assert termination.exit_code in (0, -signal.SIGTERM, 143)
    assert termination.log.count('\\"status\\": 200') == 3
    assert termination.late.status_code == 503 and termination.late.headers["Retry-After"] == "5"


def test_log_has_no_prompts(termination: Termination) -> None:
    assert "rhinoceros" in SECRET and "rhinoceros" not in termination.log
