"""The client: sends requests, reads the output of `truss predict`, and saves images."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from engine_builder.files import NotWritable
from engine_builder.local_server.client import CallFailed, generate, save_images, save_predicted
from engine_builder.local_server.server import Server
from tests.support import stub_truss
from tests.support.noise_model import NOISE_MODEL
from tests.support.scripted_server import Answer, ScriptedServer

SHELL_SCRIPT_BASE64 = base64.b64encode(b"#!/bin/sh").decode()
UNUSED_URL = "http://127.0.0.1:9"  # the port of the discard service, which does not run


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(stub_truss.make_layout(tmp_path_factory.mktemp("noise"), NOISE_MODEL)) as server:
        server.wait_ready(120)
        yield server


def test_generate_returns_the_response(server: Server, tmp_path: Path) -> None:
    response = generate(server.url, {"prompt": "two", "num_images": 2}, timeout=60)
    paths = save_images(response, tmp_path / "new" / "out.jpeg")
    assert [path.name for path in paths] == ["out-1.jpeg", "out-2.jpeg"]
    assert [path.read_bytes() for path in paths] == [base64.b64decode(image["data"]) for image in response["images"]]


def test_generate_reports_a_refusal(server: Server) -> None:
    with pytest.raises(CallFailed, match="400: prompt: is missing") as refusal:
        generate(server.url, {}, timeout=60)
    assert refusal.value.status == 400


@pytest.mark.parametrize("url", ["http://localhost:80a", "http://[x"])
def test_generate_refuses_an_invalid_url(url: str) -> None:
    with pytest.raises(CallFailed, match="is not the URL of a server"):
        generate(url, {"prompt": "x"}, timeout=5)


def test_generate_reports_that_no_server_answers() -> None:
    with pytest.raises(CallFailed, match="cannot be reached.*preheat serve") as failure:
        generate(UNUSED_URL, {"prompt": "x"}, timeout=5)
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
    ("output", "message"),
    [
        pytest.param("", "no response to save", id="empty"),
        pytest.param("Calling predict on deployment ID v1...\n", "no response to save in 'Calling predict", id="text"),
        pytest.param('Calling...\n{"data": "abc', "cut off", id="cut off"),
        pytest.param('{"data": "not base64!"}', "not base64", id="not base64"),
        pytest.param('{"data": "é"}', "not base64", id="not ASCII"),
        pytest.param(f'{{"data": "{SHELL_SCRIPT_BASE64}"}}', "not a PNG, JPEG or WebP", id="not an image"),
        pytest.param('{"data": null}', "returned no image", id="null"),
        pytest.param('{"data":' + "[" * 200_000, "not JSON", id="nested too deeply"),
        # The response is read from the first brace on.
        pytest.param('[[1, "{"]]', "cut off or not JSON", id="brace in a string"),
        pytest.param('{"images": 3}', "returned no image", id="images are a number"),
        pytest.param('{"images": {"data": "x"}}', "returned no image", id="images are an object"),
        pytest.param('{"images": [3]}', "returned no image", id="image is a number"),
        pytest.param('{"images": [{"data": [1]}]}', "returned no image", id="data is a list"),
        pytest.param(
            '{"images": [], "error": {"message": "seed: -1 is too small"}}', "seed: -1 is too small", id="refusal"
        ),
    ],
)
def test_save_predicted_refuses_output_without_an_image(output: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CallFailed, match=message):
        save_predicted(io.BytesIO(output.encode()), tmp_path / "out.png")
    assert not list(tmp_path.iterdir())


def test_save_images_refuses_a_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    image = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()
    with pytest.raises(NotWritable, match="file is not a folder. Name another file"):
        save_images({"data": image}, tmp_path / "file" / "out.png")


@pytest.mark.parametrize(
    ("name", "image_format", "saved_name"),
    [
        ("out.png", "PNG", "out.png"),
        ("out", "WEBP", "out.webp"),
        ("release-1.0", "PNG", "release-1.0.png"),
        ("out.JPG", "PNG", "out.png"),
    ],
)
def test_save_images_uses_the_suffix_of_the_format(
    name: str, image_format: str, saved_name: str, tmp_path: Path
) -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, image_format)
    [path] = save_images({"data": base64.b64encode(file.getvalue()).decode()}, tmp_path / name)
    assert path == tmp_path / saved_name
