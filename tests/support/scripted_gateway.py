"""A gateway whose backend sends what a test scripts, and the events of a valid answer."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.gateway import running_gateway
from tests.support.predictions import PREDICT_PATH
from tests.support.scripted_server import Answer, ScriptedServer

PICTURE = base64.b64encode(b"a picture").decode()
ACCEPTED: dict[str, Any] = {
    "event": "accepted", "request_id": "1", "release": "toy/1", "seed": 1, "steps": 1, "ahead": 0,
}  # fmt: skip
STEP: dict[str, Any] = {"event": "step", "step": 1, "steps": 1}
IMAGE: dict[str, Any] = {
    "event": "image", "index": 0, "data": PICTURE, "seed": 1, "format": "png", "width": 64, "height": 64,
}  # fmt: skip
DONE: dict[str, Any] = {
    "event": "done", "status": "success", "time": 1.5, "timings": {"text": 1}, "warnings": [],
    "engine": {"release": "toy/1", "target": "cpu", "runtime": "eager"},
}  # fmt: skip
DESCRIPTION: dict[str, Any] = {"release": "toy/1", "defaults": {"num_inference_steps": 2}}
NATIVE, OPENAI = PREDICT_PATH, "/v1/images/generations"


@dataclass
class ScriptedGateway:
    """The gateway's address, and what its only backend sends, by default one image."""

    url: str = ""
    description: Answer = field(default_factory=lambda: Answer(200, json.dumps(DESCRIPTION).encode()))
    answer: Answer = field(default_factory=lambda: lines(ACCEPTED, STEP, IMAGE, DONE))

    def post(self, path: str, *, stream: bool = False, **values: Any) -> httpx.Response:
        body = {"prompt": "a red circle", "stream": stream} | values
        return httpx.post(self.url + path, json=body, trust_env=False, timeout=60)


def lines(*events: dict[str, Any] | bytes, headers: dict[str, str] | None = None, status: int = 200) -> Answer:
    parts = (event if isinstance(event, bytes) else json.dumps(event).encode() for event in events)
    return Answer(status, b"".join(part + b"\n" for part in parts), headers or {})


@contextmanager
def scripted_gateway(history: Path | None = None, key_file: Path | None = None) -> Iterator[ScriptedGateway]:
    """Run a gateway with one backend."""
    gateway = ScriptedGateway()

    def answer(_: int, request: dict[str, Any]) -> Answer:
        return gateway.description if request.get("describe") else gateway.answer

    with ScriptedServer(answer) as backend, running_gateway([backend.url], key_file, history) as gateway.url:
        yield gateway
