"""Over HTTP, on the real server: overload, clients that leave, streams, deadlines, ids, metrics, draining, failure."""

import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from engine_builder.local_server.client import CallFailed, generate
from engine_builder.local_server.server import Layout, Server
from model.store.store import Store
from tests.conftest import READY_SECONDS
from tests.support.image_process import run_in_image
from tests.test_serving import PROMPT, SMALL, opened, pixels, post, predict

PREDICT = "/v1/models/model:predict"
LONG = {"prompt": PROMPT, "width": 256, "height": 256, "num_inference_steps": 100}  # some five seconds on two cores


@pytest.fixture(scope="module")
def small_server(
    layout: Layout, store: Store, release: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path]]:
    """Queues 8 images, gives a request 5 seconds, and logs prompts."""
    folder = tmp_path_factory.mktemp("small")
    root = folder / "root"
    shutil.copytree(layout.root, root)
    config = yaml.safe_load((root / "app" / "config.yaml").read_text())
    config["model_metadata"]["preheat"] |= {
        "limits": {"max_queue": 8, "deadline_seconds": 5, "sizes_at_once": 1},
        "log_prompts": True,
    }
    (root / "app" / "config.yaml").write_text(yaml.safe_dump(config))
    limited = Layout(root, root / "app", root / "packages", config)
    environment = {"PREHEAT_STORE": store.url, "PREHEAT_RELEASE": release}
    with Server(limited, environment=environment, log=folder / "server.log") as server:
        server.wait_ready(READY_SECONDS)
        yield server, folder / "server.log"


@pytest.fixture(scope="module")
def small(small_server: tuple[Server, Path]) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_connections=64)
    with httpx.Client(base_url=small_server[0].url, trust_env=False, timeout=READY_SECONDS, limits=limits) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=READY_SECONDS) as client:
        yield client


def measured(client: httpx.Client) -> dict[str, float]:
    """Every sample of the server's metrics, by its name and labels."""
    lines = client.get("/metrics/").text.splitlines()
    samples = [line.rpartition(" ") for line in lines if line.startswith("preheat_")]
    return {name: float(value) for name, _, value in samples}


def eventually(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + READY_SECONDS
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def streamed(client: httpx.Client, **request: object) -> list[dict[str, Any]]:
    with client.stream("POST", PREDICT, json={**request, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in answer.iter_lines()]


# -- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_tells_each_step_and_ends_with_the_pictures(client: httpx.Client) -> None:
    asked = SMALL | {"num_inference_steps": 12, "seed": 4, "use_refiner": True, "num_images": 2}
    plain = predict(client, **asked)
    lines = streamed(client, **asked, preview_every=4)
    assert lines[0]["event"] == "accepted" and lines[-1]["event"] == "done"
    assert (lines[0]["seed"], lines[0]["steps"]) == (4, 24)
    steps = [line for line in lines if line["event"] == "step"]
    told = [line["step"] for line in steps]
    assert len(told) >= 20 and len(set(told)) == len(told) and set(told) <= set(range(1, 25))
    assert {line["steps"] for line in steps} == {24}
    previews = [line["preview"] for line in steps if "preview" in line]
    assert len(previews) >= 2 and all(opened(data).size == (8, 8) for data in previews)
    images = {line["index"]: line for line in lines if line["event"] == "image"}
    assert [images[index]["seed"] for index in range(2)] == [4, 5]
    for index, image in enumerate(plain["images"]):
        assert np.abs(pixels(images[index]["data"]).astype(int) - pixels(image["data"]).astype(int)).max() <= 1
    assert lines[-1]["engine"] == plain["engine"] and lines[-1]["timings"].keys() == plain["timings"].keys()


def test_a_preview_looks_like_the_picture(client: httpx.Client) -> None:
    """The last preview of a picture, against the picture made as small."""
    lines = streamed(client, prompt=PROMPT, seed=7, num_inference_steps=20, preview_every=19, output_format="png")
    [preview] = [np.asarray(opened(line["preview"])) for line in lines if "preview" in line]
    [image] = [opened(line["data"]) for line in lines if line["event"] == "image"]
    small = np.asarray(image.resize(preview.shape[1::-1]))
    assert np.abs(preview.astype(int) - small.astype(int)).mean() < 0.2 * 255
    assert np.corrcoef(preview.ravel(), small.ravel())[0, 1] > 0.8


def test_a_stream_is_refused_before_it_begins(client: httpx.Client) -> None:
    answer = post(client, **SMALL | {"width": 100}, stream=True)
    assert answer.status_code == 400
    assert answer.json()["kind"] == "refused" and answer.json()["field"] == "width"


def test_whoever_waits_is_told(small: httpx.Client) -> None:
    """The one size that is drawn at a time is another's."""
    with small.stream("POST", PREDICT, json=LONG | {"stream": True}) as first:
        going = first.iter_lines()
        assert json.loads(next(going))["event"] == "accepted"
        lines = streamed(small, **SMALL)
    assert [line for line in lines if line["event"] == "heartbeat"]


def test_the_client_puts_a_stream_together(server: Server, client: httpx.Client) -> None:
    told: list[dict[str, Any]] = []
    asked = SMALL | {"seed": 4, "num_images": 2}
    response = generate(server.url, asked, READY_SECONDS, told.append)
    plain = predict(client, **asked)
    assert response.keys() == plain.keys()
    assert [image["seed"] for image in response["images"]] == [4, 5]
    assert response["data"] == response["images"][0]["data"]
    assert told[0]["event"] == "accepted" and {line["event"] for line in told} >= {"accepted", "step"}
    assert max(line["step"] for line in told if line["event"] == "step") == told[0]["steps"] == 4


def test_the_client_says_why_a_stream_failed(server: Server, small_server: tuple[Server, Path]) -> None:
    told: list[dict[str, Any]] = []
    with pytest.raises(CallFailed, match="400: width: 100 is not served"):
        generate(server.url, SMALL | {"width": 100}, READY_SECONDS, lambda line: None)
    with pytest.raises(CallFailed, match="504: The images were not finished within 5 s") as failure:
        generate(small_server[0].url, LONG | {"num_images": 8}, READY_SECONDS, told.append)
    assert failure.value.status == 504
    assert any(line["event"] == "step" for line in told), "the error was not a late one"


# -- limits -----------------------------------------------------------------------------------------------------------


def test_what_is_too_much_is_refused_at_once_and_the_rest_is_drawn(small: httpx.Client) -> None:
    def ask(seed: int) -> httpx.Response:
        return post(small, **SMALL | {"seed": seed, "num_inference_steps": 4, "num_images": 4})

    with ThreadPoolExecutor(24) as threads:
        answers = list(threads.map(ask, range(24)))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    for answer in answers:
        if answer.status_code == 429:
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
            assert answer.json()["kind"] == "overloaded" and "Repeat the request in" in answer.json()["error"]
    eventually(lambda: measured(small)["preheat_queue_images"] == 0, "the queue is empty again")


def test_a_request_that_takes_too_long_is_given_up(small: httpx.Client) -> None:
    answer = post(small, **LONG, num_images=8)
    assert answer.status_code == 504
    assert "within 5 s" in answer.json()["error"] and answer.json()["kind"] == "deadline"
    eventually(lambda: measured(small)['preheat_active_images{component="unet"}'] == 0, "its rows are free")
    assert post(small, **SMALL).status_code == 200


# -- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_rows(stream: bool, client: httpx.Client, server: Server) -> None:
    name = 'preheat_cancellations_total{state="running"}'
    before = measured(client).get(name, 0)
    answers = 'preheat_requests_total{status="499"}'
    answered = measured(client).get(answers, 0)
    steps = measured(client).get('preheat_steps_total{component="unet"}', 0)
    with httpx.Client(base_url=server.url, trust_env=False, timeout=READY_SECONDS) as leaving:
        with leaving.stream("POST", PREDICT, json=LONG | {"stream": True}) if stream else _sent(leaving) as answer:
            eventually(lambda: measured(client)['preheat_active_images{component="unet"}'] == 1, "it runs")
            del answer
    eventually(lambda: measured(client)[name] == before + 1, "it is counted as cancelled")
    eventually(lambda: measured(client)['preheat_active_images{component="unet"}'] == 0, "its rows are free")
    eventually(lambda: measured(client).get(answers, 0) == answered + 1, "it is counted as answered, once")
    assert measured(client)['preheat_steps_total{component="unet"}'] < steps + 100
    assert predict(client, **SMALL)["status"] == "success"


class _sent:
    """A request whose answer nobody waits for: the socket closes at the end."""

    def __init__(self, client: httpx.Client) -> None:
        import socket

        url = client.base_url
        self._socket = socket.create_connection((url.host, url.port))
        body = json.dumps(LONG).encode()
        head = f"POST {PREDICT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        self._socket.sendall(head.encode() + b"\r\n\r\n" + body)

    def __enter__(self) -> "_sent":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


# -- ids, logs, metrics -----------------------------------------------------------------------------------------------


def test_a_request_has_an_id_from_answer_to_log(
    small: httpx.Client, small_server: tuple[Server, Path], client: httpx.Client
) -> None:
    given = small.post(PREDICT, json=SMALL, headers={"X-Request-Id": "order-66.a"})
    assert given.headers["X-Request-Id"] == "order-66.a"
    refused = small.post(PREDICT, json=SMALL | {"width": 100}, headers={"X-Request-Id": "order-67"})
    assert refused.headers["X-Request-Id"] == "order-67"
    log = small_server[1].read_text()
    [entry] = [_logged(line) for line in log.splitlines() if '\\"request\\": \\"order-66.a\\"' in line]
    assert entry["event"] == "request" and entry["status"] == 200 and entry["prompt"] == PROMPT
    assert entry["timings"].keys() == given.json()["timings"].keys()
    made = {small.post(PREDICT, json=SMALL, headers={"X-Request-Id": "a b\tc"}).headers["X-Request-Id"] for _ in "12"}
    assert len(made) == 2 and all(re.fullmatch(r"[0-9a-f]{32}", identity) for identity in made)


def _logged(line: str) -> dict[str, Any]:
    return json.loads(json.loads(line)["message"])


def test_the_log_does_not_say_what_was_asked_for(layout: Layout, store: Store, release: str, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    environment = {"PREHEAT_STORE": store.url, "PREHEAT_RELEASE": release}
    secret = "a purple rhinoceros of Saxony"
    with Server(layout, environment=environment, log=log) as server:
        server.wait_ready(READY_SECONDS)
        with httpx.Client(base_url=server.url, trust_env=False, timeout=READY_SECONDS) as client:
            predict(client, **SMALL | {"prompt": secret, "negative_prompt": secret})
            assert post(client, **SMALL | {"prompt": secret, "width": 100}).status_code == 400
            # ... and a process that is told to end while it draws still answers, and takes nothing new.
            with ThreadPoolExecutor(2) as threads:
                answer = threads.submit(post, client, **LONG | {"num_inference_steps": 40})
                eventually(lambda: measured(client)['preheat_active_images{component="unet"}'] == 1, "it runs")
                queued = threads.submit(post, client, **SMALL | {"num_images": 8})
                time.sleep(0.2)
                subprocess.run(["kill", "-TERM", str(server.pid)], check=True)
                eventually(lambda: _refuses(server), "new connections are refused")
                assert answer.result().status_code == 200 and queued.result().status_code == 200
        assert server.wait() in (0, -signal.SIGTERM, 143)
    assert "rhinoceros" not in log.read_text()
    assert log.read_text().count('\\"status\\": 200') == 3


def _refuses(server: Server) -> bool:
    try:
        httpx.get(f"{server.url}/", trust_env=False)
    except httpx.TransportError:
        return True
    return False


def test_what_is_promised_is_measured(client: httpx.Client) -> None:
    before = measured(client)
    predict(client, **SMALL, num_images=2)
    post(client, **SMALL | {"width": 100})
    after = measured(client)

    def more(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert more("preheat_images_total") == 2
    assert more('preheat_requests_total{status="200"}') == 1
    assert more('preheat_errors_total{kind="refused"}') == 1
    assert 2 <= more('preheat_steps_total{component="unet"}') <= 4
    assert more('preheat_step_images_sum{component="unet"}') == 4
    assert more("preheat_queue_wait_seconds_count") == 1
    for stage in ("text", "denoise", "decode", "encode"):
        assert more(f'preheat_stage_seconds_count{{stage="{stage}"}}') == 1
    assert after["preheat_queue_images"] == 0 and after["preheat_healthy"] == 1


def test_health_is_answered_while_the_device_is_busy(client: httpx.Client, server: Server) -> None:
    """A run of an engine does not keep the server's other threads waiting."""
    with ThreadPoolExecutor(1) as threads:
        busy = threads.submit(post, client, **LONG | {"num_images": 8, "num_inference_steps": 10})
        eventually(lambda: measured(client)['preheat_active_images{component="unet"}'] == 8, "it runs")
        began, asked = measured(client)['preheat_steps_total{component="unet"}'], 0
        while measured(client)['preheat_steps_total{component="unet"}'] < began + 3:
            assert client.get("/v1/models/model").status_code == 200
            asked += 1
        assert busy.result().status_code == 200
    # Several answers a step: with Python's lock held through a step there would be one at most.
    assert asked > 6


DIES = """
    import asyncio, json, sys
    import torch, yaml
    from starlette.requests import Request
    from model.model import Model
    from model.api.request import GenerationRequest

    model = Model(config=yaml.safe_load(open("config.yaml")))
    model.load()
    loops = model._scheduler.model.loops
    for loop in loops.values():
        def fail():
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        loop.step = fail
    http = Request({"type": "http", "headers": []}, lambda: asyncio.Event().wait())

    async def ask():
        first = await model.predict(GenerationRequest(prompt="a circle"), http)
        second = await model.predict(GenerationRequest(prompt="a circle"), http)
        healthy = await model.is_healthy()
        print(json.dumps([first.status_code, json.loads(first.body)["kind"], second.status_code, healthy]), flush=True)
        await asyncio.sleep(60)

    asyncio.run(ask())
"""


def test_a_gpu_that_failed_ends_the_process(layout: Layout, store: Store, release: str) -> None:
    """So that it is replaced, after its callers were answered."""
    ran = run_in_image(DIES, layout, store, release, READY_SECONDS)
    assert ran.returncode == 70, ran.stderr
    assert json.loads(ran.stdout) == [503, "unavailable", 503, False]
