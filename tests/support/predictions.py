"""Prediction requests to a real server, over HTTP."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from preheat.local_server.server import Server
from tests.support.images import Pixels, pixels

PREDICT_PATH = "/v1/models/model:predict"
PROMPT = "a large red circle on a blue background"
SMALL = {"prompt": PROMPT, "width": 64, "height": 64, "num_inference_steps": 2, "output_format": "png"}
TIMEOUT_SECONDS = 180  # a request that waits this long fails
LOAD_TIMEOUT_SECONDS = 300  # the same under the load of many clients


@contextmanager
def http_client(server: Server) -> Iterator[httpx.Client]:
    """A client with enough connections for concurrent requests."""
    limits = httpx.Limits(max_connections=64)
    with httpx.Client(base_url=server.url, trust_env=False, timeout=TIMEOUT_SECONDS, limits=limits) as client:
        yield client


def many_connections(url: str) -> httpx.AsyncClient:
    """A client with a connection for each of any number of concurrent requests."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=LOAD_TIMEOUT_SECONDS, limits=limits)


def picture_of(answer: httpx.Response) -> Pixels:
    """Return the first image of an answer. Fails unless its status is 200."""
    assert answer.status_code == 200, answer.text
    return pixels(answer.json()["images"][0]["data"])


def post(client: httpx.Client, **request: object) -> httpx.Response:
    return client.post(PREDICT_PATH, json=request)


def predict(client: httpx.Client, **request: object) -> dict[str, Any]:
    """Return the body of a response. Fails unless its status is 200."""
    response = post(client, **request)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body
