"""Random requests of what a server describes, and what the soak reports about its answers and its memory."""

import io
import json
import random
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from benchmarks.soak import Soak, main, random_request, soak
from model.api.describe import describe
from model.api.images import resolve_with_images
from model.denoising.sampler_specs import SAMPLERS
from model.loading.served import ServedIpAdapter, ServedModel, ServedRelease, SizeList, SizeRange
from model.request_fields import Defaults, GenerationRequest
from tests.support.http_server import HttpServer, QuietHandler

RANGE = SizeRange(64, 512, 32)
PLAIN = ServedModel(64, 64, RANGE, has_refiner=False, defaults=Defaults(), release="style/1")
FULL = replace(
    PLAIN,
    has_refiner=True,
    defaults=Defaults(use_refiner=True),
    image_sizes=SizeList(((64, 64), (96, 64))),
    loras=("a", "b", "c"),
    controlnets={"edges": 0, "all": 3, "never": 0},
    control_sizes={"edges": RANGE, "all": SizeList(((64, 64),)), "never": SizeList(())},
    ip_adapters={"face": ServedIpAdapter(images=2, side=16)},
    ip_adapter_sizes=RANGE,
)
SERVED = {
    "plain": PLAIN,
    "full": FULL,
    "checked": replace(FULL, safety="blank"),
    "inpainting": replace(FULL, has_refiner=False, defaults=Defaults(), requires_masks=True),
}


def described(served: ServedModel) -> dict[str, Any]:
    release = ServedRelease(served, "style/1", "target", "runtime", "CPU", tuple(SAMPLERS))
    adapters = [{"name": name, "bytes": None, "used": None, "place": "store"} for name in served.loras]
    return json.loads(json.dumps(describe(release, ["style/1"], adapters)))  # type: ignore[arg-type, no-any-return]


@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize("max_steps", [2, 4, 1000])
def test_requests_are_accepted(kind: str, max_steps: int) -> None:
    served, generator, fields = SERVED[kind], random.Random(0), Counter[str]()
    for _ in range(200):
        request = random_request(described(served), generator, max_steps)
        resolve_with_images(GenerationRequest.model_validate(request), served)
        fields.update(name for name, value in request.items() if value)
    optional = {"image", "masks", "loras", "controls", "ip_adapters"}
    assert optional & fields.keys() == (set() if kind == "plain" else optional)
    assert ("use_refiner" in fields) == served.has_refiner and fields["stream"] and fields["negative_prompt"]


class Handler(QuietHandler):
    """Answers with pictures of the requested size. `fault` changes that."""

    fault = ""
    asked = 0
    scrapes = 0

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if request.get("describe"):
            return self.answer(described(FULL))
        type(self).asked += 1
        if self.fault == "refuses":
            return self.answer({"error": f"number {self.asked}"}, 500)
        if self.fault == "is busy" and self.asked % 2:
            return self.answer({"error": "busy"}, 429)
        scale = 1 if self.fault == "size" else request["upscale"]
        image = Image.new("RGB", (scale * request["width"] + (self.fault == "size"), scale * request["height"]))
        image.save(file := io.BytesIO(), format="PNG")
        data = b64encode(b"text" if self.fault == "no picture" else file.getvalue()).decode()
        images = [{"data": data}] * request["num_images"]
        if not request["stream"]:
            return self.answer({} if self.fault == "no images" else {"images": images})
        end = {"event": "error"} if self.fault == "stream" else {"event": "done"}
        text = "\n".join(json.dumps(event) for event in [*({"event": "image"} | one for one in images), end])
        return self.answer(text[:-3] if self.fault == "cut stream" else text)

    def do_GET(self) -> None:
        type(self).scrapes += 1
        if self.fault == "no metrics" and self.scrapes > 1:
            return self.answer("", 500)
        held = int(self.fault == "held")
        memory = "" if self.fault == "no memory" else f"preheat_host_memory_bytes {2**30}\n"
        self.answer(f'{memory}preheat_active_images{{component="unet"}} {held}\n')

    def answer(self, body: Any, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())


@pytest.fixture
def url() -> Iterator[str]:
    Handler.asked = Handler.scrapes = 0
    with HttpServer(Handler) as server:
        yield f"http://127.0.0.1:{server.port}"


@pytest.mark.parametrize(
    "fault, messages",
    [
        ("", []),
        ("is busy", []),
        ("refuses", ["times 500: {'error'", "No request was answered."]),
        ("size", ["times a broken answer: pictures of [("]),
        ("no picture", ["times a broken answer: UnidentifiedImageError"]),
        ("no images", ["times a broken answer: KeyError('images')"]),
        ("stream", ["times a broken answer: the stream ended with {'event': 'error'}"]),
        ("cut stream", ["times a broken answer: JSONDecodeError"]),
        ("held", ["1 times images held after the last answer: {'preheat_active_images"]),
        ("no metrics", ["times metrics: http://127.0.0.1:", "memory is not known"]),
        ("no memory", ["The host memory is not known in both halves of the time."]),
    ],
)
def test_reports_what_is_wrong(fault: str, messages: list[str], url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "fault", fault)
    result = soak(url, 3, 2, leave_share=0.0, max_steps=4, sample_seconds=0.1, settle_seconds=0.1)
    failures = " ".join(result.failures()).replace('"', "'")
    assert all(message in failures for message in messages), failures
    assert bool(failures) == bool(messages) and bool(result.refused) == (fault == "is busy")
    assert sum(result.problems.values()) == 0 or len(result.examples) == 1, "equal errors are one kind"


def test_clients_leave(url: str) -> None:
    result = soak(url, 1, 2, leave_share=1.0, max_steps=4, sample_seconds=0.1)
    assert result.left and not result.problems


def test_judges_memory_by_the_halves_of_the_time() -> None:
    def failures(*samples: tuple[float, float]) -> list[str]:
        result = Soak(100.0, latencies=[1.0], memory={"host": [(at, gib * 2**30) for at, gib in samples]})
        return result.failures()

    assert failures((5, 1.0), (45, 2.0), (55, 2.0), (101, 2.1)) == []
    assert failures((5, 1.0), (45, 1.0), (55, 1.2)) == ["The host memory grew from 1024 to 1229 MiB."]
    for missing in ([(5, 1.0), (45, 1.0)], [(55, 1.0)], [(5, 0.0), (55, 0.0)], []):
        assert failures(*missing) == ["The host memory is not known in both halves of the time."]
    result = Soak(100.0, memory={"gpu": [(5, 2**30), (6, 2**31), (99, 2**20)]})
    assert result.memory_mib("gpu") == [2048, *[None] * 8, 1]


def test_prints_a_row_and_ends_with_the_failures(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main([url, "--seconds", "5", "--clients", "1"])
    [row] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["failed"] == 0 and 1024 in row["host_mib"] and len(row["host_mib"]) == 10
    monkeypatch.setattr(Handler, "fault", "refuses")
    with pytest.raises(SystemExit, match="times 500: "):
        main([url, "--seconds", "1", "--clients", "1"])
    for wrong in ([url, "--max-steps", "1"], [], [url, "--release", "style/1"], [url, "--lora", "x"]):
        with pytest.raises(SystemExit):
            main(wrong)
    with pytest.raises(SystemExit, match="cannot be read"):
        main(["127.0.0.1:9", "--seconds", "1"])
    with pytest.raises(SystemExit, match="cannot be read"):
        main(["http://127.0.0.1:9", "--seconds", "1"])


def test_starts_a_server_of_a_release(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []

    @contextmanager
    def serving(*arguments: Any, loras: Any) -> Iterator[Any]:
        started.append((*arguments, loras))
        yield SimpleNamespace(url=url, wait_ready=started.append)

    monkeypatch.setattr("benchmarks.soak.serving", serving)
    main(
        [
            "--release",
            "style/1",
            "--store",
            "a store",
            "--config",
            "a.yaml",
            "--lora",
            "b",
            "--seconds",
            "5",
            "--clients",
            "1",
        ]
    )
    (_, config, _, *served), _ = started
    assert (config, served) == (Path("a.yaml"), ["a store", ["style/1"], ["b"]])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])[0]["runs"] > 0
