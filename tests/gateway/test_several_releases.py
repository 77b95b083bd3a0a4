"""A gateway in front of servers with several releases: what it offers, and servers that leave a release."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from tests.support.gateway import running_gateway
from tests.support.predictions import PREDICT_PATH
from tests.support.scripted_gateway import ACCEPTED, DESCRIPTION, DONE, IMAGE, OPENAI, lines
from tests.support.scripted_server import Answer, ScriptedServer

A, B, C, D = "a/1", "b/1", "c/1", "d/1"
ADAPTER = {"name": "style", "bytes": 16, "used": None, "place": "host"}


def serving(releases: list[str], adapter: dict[str, Any] = ADAPTER, seconds: float = 0.0) -> ScriptedServer:
    """Return a server of `releases`, which a test may change, and of an adapter. `seconds`: until it describes them."""

    def answer(_: int, request: dict[str, Any]) -> Answer:
        release = request.get("model") or releases[0]
        if release not in releases:
            return Answer(400, b'{"error": "model: no", "kind": "refused", "field": "model"}')
        if any(one["name"] != adapter["name"] for one in request.get("loras", [])):
            return Answer(400, b'{"error": "loras.0: no", "kind": "refused", "field": "loras.0"}')
        if request.get("describe"):
            time.sleep(seconds)
            description = DESCRIPTION | {"release": release, "models": releases, "adapters": [adapter]}
            return Answer(200, json.dumps(description).encode())
        return lines(ACCEPTED | {"release": release}, IMAGE, DONE | {"engine": {"release": release}})

    return ScriptedServer(answer)


@contextmanager
def gateway_of(*servers: list[str]) -> Iterator[str]:
    with ExitStack() as stack:
        backends = [stack.enter_context(serving(releases)) for releases in servers]
        yield stack.enter_context(running_gateway([backend.url for backend in backends]))


def post(url: str, path: str = OPENAI, **values: Any) -> httpx.Response:
    return httpx.post(url + path, json={"prompt": "a circle"} | values, trust_env=False, timeout=60)


def served(url: str, **values: Any) -> str:
    """Return the release that made an image."""
    answer = post(url, **values)
    assert answer.status_code == 200, answer.text
    release: str = answer.json()["preheat"]["engine"]["release"]
    return release


@pytest.mark.parametrize("servers", [([A], [B], [A]), ([A, B], [A]), ([A, B], [B, A])])
def test_default_is_the_first_release_of_the_first_server(servers: tuple[list[str], ...]) -> None:
    with gateway_of(*servers) as url:
        assert [served(url) for _ in servers] == [A for _ in servers]
        listed = httpx.get(f"{url}/v1/models", trust_env=False, timeout=60).json()["data"]
        assert [model["id"] for model in listed] == [A, B]


def test_default_is_of_a_server_that_is_up() -> None:
    with serving([A]) as first, serving([B]) as second, running_gateway([first.url, second.url]) as url:
        assert served(url) == A
        first.__exit__(None, None, None)
        ended = post(url)  # the gateway notices it by this request
        assert ended.status_code == 503 and f"No backend of {A} can be reached" in ended.text
        assert [served(url) for _ in range(3)] == [B] * 3


def test_goes_to_a_server_that_has_the_adapters() -> None:
    with (
        serving([A]) as first,
        serving([A], ADAPTER | {"name": "other"}) as second,
        running_gateway([first.url, second.url]) as url,
    ):
        for name in ("style", "other") * 4:
            assert served(url, loras=[{"name": name, "scale": 1}]) == A
        refused = post(url, loras=[{"name": "third"}])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "loras.0")


def test_waits_for_the_description_of_a_server_that_has_the_adapters() -> None:
    with (
        serving([A]) as first,
        serving([A], ADAPTER | {"name": "other"}, 0.5) as second,
        running_gateway([first.url, second.url]) as url,
    ):
        assert served(url, loras=[{"name": "other", "scale": 1}]) == A


def test_lists_the_adapters_of_each_server() -> None:
    with gateway_of([A, B], [A]) as url:
        found = httpx.get(f"{url}/v1/loras", trust_env=False, timeout=60).json()["data"]
        assert [one["model"] for one in found] == [A, B, A] and len({one["server"] for one in found}) == 2
        assert all(one.items() > ADAPTER.items() for one in found)


def test_goes_to_another_server_when_one_has_left_a_release() -> None:
    first = [A, B]
    with gateway_of(first, [B, C]) as url:
        assert [served(url, model=name) for name in (A, B, C)] == [A, B, C]
        first[:] = [A, D]
        assert [served(url, model=B) for _ in range(4)] == [B] * 4
        assert served(url, model=D) == D  # the first server was described again


def test_says_that_the_only_server_has_left_a_release() -> None:
    only = [A, B]
    with gateway_of(only) as url:
        assert served(url, model=B) == B
        only[:] = [A]
        changed = post(url, model=B)
        assert changed.status_code == 503 and changed.json()["error"]["code"] == "release_changed"
        assert post(url, model=B).status_code == 404


def test_a_name_of_a_model_must_be_clear() -> None:
    with gateway_of([A, "b/2", B], [C]) as url:
        assert served(url, model="a") == A and served(url, model="c") == C
        assert post(url, model="b").status_code == 404
        refused = post(url, f"{PREDICT_PATH}?model={A}", model=C)
        assert refused.status_code == 400 and refused.json()["field"] == "model"
        assert post(url, f"{PREDICT_PATH}?model={C}", model=C).json()["engine"]["release"] == C


def test_descriptions_of_all_releases_are_bounded() -> None:
    large = [f"model/{number}" for number in range(4000)]  # each description lists all of them
    with gateway_of(large, [B]) as url:
        assert served(url) == B
