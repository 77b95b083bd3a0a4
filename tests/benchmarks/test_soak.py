"""Random requests of what a server describes, and what the soak reports about its answers and its memory."""

import io
import json
import random
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from benchmarks.soak import main, random_request
from model.request_fields import GenerationRequest
from tests.support.http_server import HttpServer, QuietHandler

DESCRIBED: dict[str, Any] = {
    "release": "style/1",
    "models": ["style/1"],
    "sizes": {"min": 64, "max": 512, "multiple": 32},
    "image_sizes": {"sizes": [[64, 64], [96, 64]]},
    "requires_masks": False,
    "has_refiner": True,
    "samplers": ["Euler", "LCM"],
    "forecasts": {"Euler": ["off", "fast"], "LCM": ["off"]},
    "loras": ["a", "b", "c"],
    "controlnets": {"edges": 0, "all": 3},
    "control_sizes": {"edges": {"min": 64, "max": 512, "multiple": 64}, "all": {"sizes": []}},
    "ip_adapters": {"face": 2},
    "ip_adapter_sizes": {"min": 64, "max": 512, "multiple": 64},
}


def test_requests_use_everything_that_is_described() -> None:
    generator, fields = random.Random(0), Counter[str]()
    for _ in range(500):
        request = random_request(DESCRIBED, generator, max_steps=4)
        GenerationRequest.model_validate(request)
        fields.update(name for name, value in request.items() if value)
        assert "image" not in request or request["height"] == 64
        assert request.get("forecast", "off") in DESCRIBED["forecasts"][request["scheduler"]]
        assert not {"edges"} ^ {one["name"] for one in request.get("controls", [{"name": "edges"}])}
    assert {"image", "masks", "loras", "controls", "ip_adapters", "use_refiner", "forecast", "stream"} <= fields.keys()


def test_requests_of_a_release_without_options_have_none() -> None:
    nothing: dict[str, Any] = {"loras": [], "controlnets": {}, "control_sizes": {}, "ip_adapters": {}}
    nothing |= {"image_sizes": None, "has_refiner": False, "ip_adapter_sizes": None}
    for seed in range(100):
        request = random_request(DESCRIBED | nothing, random.Random(seed), max_steps=4)
        assert not {"image", "masks", "loras", "controls", "ip_adapters", "use_refiner"} & request.keys()


class Handler(QuietHandler):
    """Answers with pictures of the requested size. `fault` changes that."""

    fault = ""
    began = 0.0

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if request.get("describe"):
            return self.answer(DESCRIBED)
        if self.fault == "refuses":
            return self.answer({"error": "no"}, 500)
        size = (8, 8) if self.fault == "size" else (request["width"], request["height"])
        Image.new("RGB", size).save(file := io.BytesIO(), format="PNG")
        images = [{"data": b64encode(file.getvalue()).decode()} for _ in range(request["num_images"])]
        if not request["stream"]:
            return self.answer({"images": images})
        end = {"event": "error"} if self.fault == "stream" else {"event": "done"}
        events = [*({"event": "image", **image} for image in images), end]
        return self.answer("\n".join(map(json.dumps, events)))

    def do_GET(self) -> None:
        grown = 2**30 * (1 + (self.fault == "memory" and time.monotonic() > self.began + 0.8))
        held = int(self.fault == "held")
        self.answer(f'preheat_host_memory_bytes {grown}\npreheat_active_images{{component="unet"}} {held}\n')

    def answer(self, body: Any, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("benchmarks.soak._SAMPLE_SECONDS", 0.05)
    monkeypatch.setattr("benchmarks.soak._SETTLE_SECONDS", 0.1)
    Handler.began = time.monotonic()
    with HttpServer(Handler) as server:
        yield f"http://127.0.0.1:{server.port}"


@pytest.mark.parametrize(
    "fault, message",
    [
        ("", ""),
        ("refuses", "times 500: "),
        ("size", "times pictures of [(8, 8)"),
        ("stream", "times a stream ended with {'event': 'error'}"),
        ("memory", "host memory grew from 1024 to 2048 MiB"),
        ("held", "images are still held: preheat_active_images"),
    ],
)
def test_reports_what_is_wrong(
    fault: str, message: str, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Handler, "fault", fault)
    arguments = [url, "--seconds", "1", "--clients", "2", "--leave", "0.2"]
    if not message:
        main(arguments)
        [row] = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert row["failed"] == 0 and set(row["host_mib"]) == {1024} and len(row["host_mib"]) > 1
        return
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 1 and message in capsys.readouterr().err
