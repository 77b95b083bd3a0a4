"""The real `truss predict` command, and the client that saves its images or sends requests itself."""

import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from engine_builder.files import NotWritable
from engine_builder.local_server.client import CallFailed, generate, save_images, save_predicted
from engine_builder.local_server.server import Server
from tests.support import stub_truss
from tests.support.fake_baseten import FakeBaseten
from tests.support.scripted_server import Answer, ScriptedServer

NOISE_MODEL = """
    import base64
    import io

    from PIL import Image
    from starlette.responses import JSONResponse

    class Model:
        async def predict(self, request):
            if "prompt" not in request:
                return JSONResponse({"error": "prompt: is missing"}, status_code=400)
            images = []
            for seed in range(request.get("num_images", 1)):
                file = io.BytesIO()
                Image.effect_noise((64, 64), 100 + seed).save(file, "JPEG")
                images.append({"data": base64.b64encode(file.getvalue()).decode(), "seed": seed})
            return {"status": "success", "data": images[0]["data"], "images": images}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(stub_truss.make_layout(tmp_path_factory.mktemp("noise"), NOISE_MODEL)) as server:
        server.wait_ready(120)
        yield server


def truss_predict(baseten: FakeBaseten, home: Path, request: dict[str, object]) -> subprocess.CompletedProcess[str]:
    """Run `truss predict` with a request."""
    truss = str(Path(sys.executable).with_name("truss"))
    return subprocess.run(
        [truss, "predict", "--model", baseten.model_id, "-d", json.dumps(request)],
        cwd=home,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **baseten.environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_saves_the_image_that_truss_predict_prints(server: Server, tmp_path: Path) -> None:
    with FakeBaseten(server.url) as baseten:
        ran = truss_predict(baseten, tmp_path, {"prompt": "a lighthouse"})
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("Calling predict on development deployment"), "what save_predicted skips is gone"
    assert baseten.requested_paths == ["/graphql/", "/development/predict"]
    [path] = save_predicted(io.BytesIO(ran.stdout.encode()), tmp_path / "out.png")
    assert path == tmp_path / "out.jpg"
    with Image.open(path) as image:
        assert (image.format, image.size) == ("JPEG", (64, 64))


def test_reports_a_refusal_that_truss_predict_ignores(server: Server, tmp_path: Path) -> None:
    with FakeBaseten(server.url) as baseten:
        ran = truss_predict(baseten, tmp_path, {})
    assert ran.returncode == 0
    with pytest.raises(CallFailed, match="prompt: is missing"):
        save_predicted(io.BytesIO(ran.stdout.encode()), tmp_path / "out.png")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("", "no response to save"),
        ("Calling predict on deployment ID v1...\n", "no response to save in 'Calling predict"),
        ('Calling...\n{"data": "abc', "cut off"),
        ('{"data": "not base64!"}', "not base64"),
        ('{"data": "' + base64.b64encode(b"#!/bin/sh").decode() + '"}', "not a PNG, JPEG or WebP"),
        ('{"data": null}', "returned no image"),
        ('{"data":' + "[" * 200_000, "not JSON"),
        ('[[1, "{"]]', "cut off"),
        ('{"images": 3}', "returned no image"),
        ('{"images": {"data": "x"}}', "returned no image"),
        ('{"images": [3]}', "returned no image"),
        ('{"images": [{"data": [1]}]}', "returned no image"),
        ('{"data": "é"}', "not base64"),
        ('{"images": [], "error": {"message": "seed: -1 is too small"}}', "seed: -1 is too small"),
    ],
)
def test_refuses_output_without_an_image(output: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CallFailed, match=message):
        save_predicted(io.BytesIO(output.encode()), tmp_path / "out.png")
    assert not list(tmp_path.iterdir())


def test_generate_returns_the_response(server: Server, tmp_path: Path) -> None:
    response = generate(server.url, {"prompt": "two", "num_images": 2}, timeout=60)
    paths = save_images(response, tmp_path / "new" / "out.jpeg")
    assert [path.name for path in paths] == ["out-1.jpeg", "out-2.jpeg"]
    assert [path.read_bytes() for path in paths] == [base64.b64decode(i["data"]) for i in response["images"]]


def test_generate_reports_a_refusal(server: Server) -> None:
    with pytest.raises(CallFailed, match="400: prompt: is missing") as refusal:
        generate(server.url, {}, timeout=60)
    assert refusal.value.status == 400


@pytest.mark.parametrize("url", ["http://localhost:80a", "http://[x"])
def test_generate_refuses_an_invalid_url(url: str) -> None:
    with pytest.raises(CallFailed, match="is not the URL of a server"):
        generate(url, {"prompt": "x"}, timeout=5)


def test_reports_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    image = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()
    with pytest.raises(NotWritable, match="file is not a folder. Name another file"):
        save_images({"data": image}, tmp_path / "file" / "out.png")


def test_generate_reports_that_no_server_answers() -> None:
    with pytest.raises(CallFailed, match="cannot be reached.*preheat serve") as failure:
        generate("http://127.0.0.1:9", {"prompt": "x"}, timeout=5)
    assert failure.value.status is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "ended its answer before the images were finished"),
        (b'{"event": "accepted", "ahead": 0}\n', "ended its answer before the images were finished"),
        (b'{"event": "done"}\n', "an invalid event: .*done"),
        (b"<html>\n", "an invalid event: '<html>'"),
        (b"[1]\n", "an invalid event"),
        (b'{"event": "error", "status": 500, "error": "it broke"}\n', "500: it broke"),
    ],
)
def test_generate_reports_an_invalid_stream(body: bytes, message: str) -> None:
    with ScriptedServer(lambda number, request: Answer(200, body)) as server:
        with pytest.raises(CallFailed, match=message):
            generate(f"http://127.0.0.1:{server.port}", {"prompt": "x"}, timeout=60, progress=lambda event: None)


@pytest.mark.parametrize(
    ("name", "format", "expected"),
    [
        ("out.png", "PNG", "out.png"),
        ("out", "WEBP", "out.webp"),
        ("release-1.0", "PNG", "release-1.0.png"),
        ("out.JPG", "PNG", "out.png"),
    ],
)
def test_suffix_is_that_of_the_images_format(name: str, format: str, expected: str, tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, format)
    [path] = save_images({"data": base64.b64encode(file.getvalue()).decode()}, tmp_path / name)
    assert path == tmp_path / expected
