"""Backends that send something else than a Preheat server. A gateway's caller gets a typed error, never half a stream.

`tests/load/test_attacks.py` has those that need minutes or much memory.
"""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway.bounded_reading import MAX_DESCRIPTION_BYTES
from tests.support.gateway import running_gateway
from tests.support.scripted_gateway import (
    ACCEPTED,
    DESCRIPTION,
    DONE,
    IMAGE,
    NATIVE,
    OPENAI,
    PICTURE,
    STEP,
    ScriptedGateway,
    lines,
    scripted_gateway,
)
from tests.support.scripted_server import Answer, ScriptedServer


@pytest.fixture(scope="module")
def gateway() -> Iterator[ScriptedGateway]:
    with scripted_gateway() as gateway:
        yield gateway


def without(event: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name != key}


# What a backend sends -> a part of the reason. The first line is valid.
BROKEN_LATER: dict[str, tuple[Answer, str]] = {
    "end after accepted": (lines(ACCEPTED), "connection ended"),
    "shorter than stated": (lines(ACCEPTED, headers={"Content-Length": "9999"}), "connection ended"),
    "done without an image": (lines(ACCEPTED, DONE), "0 of 1 images"),
    "image twice": (lines(ACCEPTED, IMAGE, IMAGE, DONE), "image 0 twice"),
    "image too many": (lines(ACCEPTED, IMAGE, IMAGE | {"index": 1}, DONE), "image 1 of 1"),
    "index negative": (lines(ACCEPTED, IMAGE | {"index": -1}, DONE), "image.index"),
    "accepted twice": (lines(ACCEPTED, ACCEPTED, IMAGE, DONE), "line 2 is 'accepted'"),
    "unknown event": (lines(ACCEPTED, {"event": "picture"}, IMAGE, DONE), "line 2 is not valid"),
    "no event": (lines(ACCEPTED, {}, IMAGE, DONE), "line 2 is not valid"),
    "image of no bytes": (lines(ACCEPTED, IMAGE | {"data": ""}, DONE), "image.data"),
    "image not in base64": (lines(ACCEPTED, IMAGE | {"data": "!" + PICTURE}, DONE), "image.data"),
    "unknown format": (lines(ACCEPTED, IMAGE | {"format": "html"}, DONE), "image.format"),
    "preview of a number": (lines(ACCEPTED, STEP | {"preview": 7}, IMAGE, DONE), "step.preview"),
    "timings as a list": (lines(ACCEPTED, IMAGE, DONE | {"timings": [1]}), "done.timings"),
    "not JSON": (lines(ACCEPTED, b"picture", DONE), "line 2 is not valid"),
    "not UTF-8": (lines(ACCEPTED, b'{"event": "\xff"}', DONE), "line 2 is not valid"),
    "half a surrogate pair": (lines(ACCEPTED, IMAGE, DONE | {"warnings": ["\ud800"]}), "line 3 is not valid"),
    "not a number": (lines(ACCEPTED, IMAGE, DONE | {"time": float("nan")}), "line 3 is not valid"),
    "overflow in an unknown field": (lines(ACCEPTED, b'{"event": "heartbeat", "x": [1e999]}'), "line 2 is not valid"),
    "deep": (lines(ACCEPTED, b'{"a":' * 5000 + b"1" + b"}" * 5000), "line 2 is not valid"),
    "many values": (lines(ACCEPTED, b'{"a": [' + b"{}," * 100_000 + b"1]}"), "more than 20000 values"),
    "long line": (lines(ACCEPTED, b'{"a": "' + b"a" * 2_000_000 + b'"}'), "line of more than"),
    "error without a reason": (lines(ACCEPTED, {"event": "error", "status": 500}), "error.error"),
    "error with a wrong status": (lines(ACCEPTED, {"event": "error", "error": "no", "status": 200}), "error.status"),
    **{
        f"{event['event']} without {key}": (lines(*before, without(event, key), DONE), f"{event['event']}.{key}")
        for event, before, keys in (
            (IMAGE, [ACCEPTED], ("index", "data", "seed", "format", "width", "height")),
            (STEP, [ACCEPTED], ("step", "steps")),
        )
        for key in keys
    },
}  # fmt: skip
# The first line is not valid, or there is none.
HTML = b"<html><body>Bad gateway</body></html>"
BROKEN_FIRST: dict[str, tuple[Answer, str]] = {
    "empty": (Answer(200, b""), "connection ended"),
    "HTML": (Answer(200, HTML, {"Content-Type": "text/html"}), "line 1 is not valid"),
    "JSON of an error": (Answer(500, b'{"error": {"message": "no"}}'), "answered 500"),
    "half a surrogate pair in an error": (Answer(400, b'{"error": "\\ud800"}'), "answered 400"),
    "large error": (Answer(500, b'{"error": "' + b"a" * 2_000_000 + b'"}'), "answered 500"),
    "redirect": (Answer(302, b'{"error": "moved"}', {"Location": "http://127.0.0.1:1/"}), "answered 302"),
    "unknown status": (Answer(999, b'{"error": "no"}'), "answered 999"),
    "accepted without seed": (lines(without(ACCEPTED, "seed"), IMAGE, DONE), "accepted.seed"),
    "compressed": (
        Answer(200, gzip.compress(lines(ACCEPTED, IMAGE, DONE).body), {"Content-Encoding": "gzip"}), "compressed",
    ),
}  # fmt: skip


def is_502(answer: httpx.Response, error: dict[str, Any], code: str, message: str, reason: str) -> bool:
    is_typed = answer.headers["Content-Type"] == "application/json" and error[code] == "backend_failed"
    return answer.status_code == 502 and is_typed and reason in error[message] and len(error[message]) < 600


@pytest.mark.parametrize("group", [BROKEN_LATER, BROKEN_FIRST], ids=["later", "first"])
def test_answers_a_broken_backend_with_status_502(
    group: dict[str, tuple[Answer, str]], gateway: ScriptedGateway
) -> None:
    for case, (gateway.answer, reason) in group.items():
        for stream in (False, True) if group is BROKEN_FIRST else (False,):  # no stream has begun
            native = gateway.post(NATIVE, width=64, height=64, stream=stream)
            assert is_502(native, native.json(), "kind", "error", reason), (case, native.text)
            openai = gateway.post(OPENAI, size="64x64", stream=stream)
            assert is_502(openai, openai.json()["error"], "code", "message", reason), (case, openai.text)


def test_ends_a_broken_backends_stream_with_an_error(gateway: ScriptedGateway) -> None:
    for case, (gateway.answer, reason) in BROKEN_LATER.items():
        native = gateway.post(NATIVE, stream=True, width=64, height=64)
        last = json.loads(native.text.splitlines()[-1])
        assert native.status_code == 200 and last.keys() == {"event", "status", "error", "kind"}, case
        assert (last["event"], last["status"], last["kind"]) == ("error", 502, "backend_failed"), case
        openai = gateway.post(OPENAI, stream=True, size="64x64", partial_images=1)
        name, data = openai.text.rstrip("\n").split("\n\n")[-1].splitlines()
        assert openai.status_code == 200 and openai.text.endswith("\n\n") and name == "event: error", case
        error = json.loads(data.removeprefix("data: "))["error"]
        assert error["code"] == "backend_failed" and error["type"] == "server_error", case
        assert reason in last["error"] and reason in error["message"], case


def test_serves_older_and_newer_servers(gateway: ScriptedGateway) -> None:
    for key in ("request_id", "release", "ahead", "status", "time", "timings", "warnings", "engine"):
        gateway.answer = lines(without(ACCEPTED, key), IMAGE, without(DONE, key))
        assert gateway.post(NATIVE).json()["data"] == gateway.post(OPENAI).json()["data"][0]["b64_json"] == PICTURE
    gateway.answer = lines(ACCEPTED, IMAGE | {"hash": [1, {"a": None}]}, DONE)
    assert gateway.post(NATIVE).json()["images"][0]["hash"] == [1, {"a": None}]
    gateway.answer = lines(ACCEPTED, IMAGE | {"flagged": True}, IMAGE | {"index": 1}, DONE)
    assert gateway.post(OPENAI, n=2).json()["preheat"]["flagged"] == [True, False]


def test_states_a_possible_time_to_wait(gateway: ScriptedGateway) -> None:
    for value, seconds in (("7", 7), ("0", 1), ("-3", 1), ("99999", 3600), ("9" * 400, 1), ("Wed, 21 Oct 2015", 1)):
        gateway.answer = Answer(429, b"x", {"Retry-After": value})
        assert gateway.post(NATIVE).headers["Retry-After"] == str(seconds), value


def test_keeps_no_cookies_of_a_backend() -> None:
    answer = lines(ACCEPTED, IMAGE, DONE, headers={"Set-Cookie": "a=1; Path=/"})
    description = Answer(200, json.dumps(DESCRIPTION).encode(), {"Set-Cookie": "a=1; Path=/"})
    script = lambda _, request: description if request.get("describe") else answer  # noqa: E731
    with ScriptedServer(script) as backend, running_gateway([backend.url]) as url:
        for _ in range(2):
            assert ScriptedGateway(url).post(NATIVE).status_code == 200
    assert not any("cookie" in headers for headers in backend.headers)
    assert all(headers["accept-encoding"] == "identity" for headers in backend.headers)


DESCRIPTIONS: dict[str, Answer] = {
    "HTML": Answer(200, HTML),
    "empty": Answer(200, b""),
    "no release": Answer(200, b'{"defaults": {"num_inference_steps": 2}}'),
    "long release": lines(DESCRIPTION | {"release": "a" * 300}),
    "no defaults": Answer(200, b'{"release": "toy/1"}'),
    "steps of text": lines(DESCRIPTION | {"defaults": {"num_inference_steps": "2"}}),
    "samplers of a number": lines(DESCRIPTION | {"samplers": 7}),
    "half a surrogate pair": Answer(200, b'{"release": "\\ud800", "defaults": {"num_inference_steps": 2}}'),
    "large": lines(DESCRIPTION | {"loras": ["a" * MAX_DESCRIPTION_BYTES]}),
    "compressed": Answer(200, gzip.compress(json.dumps(DESCRIPTION).encode()), {"Content-Encoding": "gzip"}),
    "redirect": Answer(302, b"", {"Location": "/"}),
}


@pytest.mark.parametrize("case", DESCRIPTIONS)
def test_does_not_use_a_backend_without_a_valid_description(case: str) -> None:
    with ScriptedServer(lambda *_: DESCRIPTIONS[case]) as backend, running_gateway([backend.url]) as url:
        assert ScriptedGateway(url).post(OPENAI).json()["error"]["code"] == "backend_unavailable"
        described = httpx.get(f"{url}/v1/description", trust_env=False, timeout=60)
        assert described.status_code == 200 and described.json()["models"] == []
