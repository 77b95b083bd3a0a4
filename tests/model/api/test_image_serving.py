"""Requests with images over HTTP: post-processing, and what is refused before any work."""

import base64
import io
import json
import os
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from engine_builder.local_server.server import Server
from tests.support.images import Pixels, file_of, largest_difference, open_image, pixels
from tests.support.predictions import PREDICT_PATH, PROMPT, SMALL, TIMEOUT_SECONDS, http_client, post, predict
from tests.support.repository import REPOSITORY

SIZE = 64
EDIT = SMALL | {"num_inference_steps": 4, "strength": 0.9, "seed": 5}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with http_client(server) as client:
        yield client


def photo(width: int = SIZE, height: int = SIZE) -> Pixels:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def square(begin: int, end: int) -> Pixels:
    mask = np.zeros((SIZE, SIZE), np.uint8)
    mask[begin:end, begin:end] = 255
    return mask


def test_composite_keeps_the_pixels_outside_the_masks(client: httpx.Client) -> None:
    original, masks = photo(), [square(8, 24), square(40, 60)]
    request = EDIT | {"image": file_of(original), "masks": [{"image": file_of(mask)} for mask in masks]}
    plain = pixels(predict(client, **request)["data"])
    image = pixels(predict(client, **request, composite=True)["data"])
    outside = (masks[0] == 0) & (masks[1] == 0)
    assert (plain[outside] != original[outside]).any()
    np.testing.assert_array_equal(image[outside], original[outside])
    np.testing.assert_array_equal(image[~outside], plain[~outside])


def test_feathered_composite_blends_the_edge(client: httpx.Client) -> None:
    original = photo()
    masks = [{"image": file_of(square(16, 48)), "feather": 2}]
    request = EDIT | {"image": file_of(original), "masks": masks}
    plain = pixels(predict(client, **request)["data"])
    image = pixels(predict(client, **request, composite=True)["data"])
    np.testing.assert_array_equal(image[:8], original[:8])
    np.testing.assert_array_equal(image[24:40, 24:40], plain[24:40, 24:40])
    assert (image[32, 15] != original[32, 15]).any() and (image[32, 15] != plain[32, 15]).any()


def test_color_match_changes_the_colours(client: httpx.Client) -> None:
    original, mask = photo(), square(16, 48)
    request = EDIT | {"image": file_of(original), "masks": [{"image": file_of(mask)}]}
    plain, matched = (pixels(predict(client, **request, color_match=match)["data"]) for match in (False, True))
    ring = mask == 0
    errors = [np.abs(image[ring].mean(axis=0) - original[ring].mean(axis=0)).max() for image in (plain, matched)]
    assert errors[1] < 2 < errors[0]


def test_enlarges_images_of_every_kind(client: httpx.Client) -> None:
    for fields in ({}, {"image": file_of(photo())}):
        body = predict(client, **EDIT | fields | ({} if fields else {"strength": None}), upscale=2)
        [image] = body["images"]
        assert (image["width"], image["height"]) == (2 * SIZE, 2 * SIZE) == open_image(image["data"]).size


def test_size_is_that_of_the_image(client: httpx.Client) -> None:
    request = EDIT | {"image": file_of(photo(96, 64)), "width": None, "height": None}
    [image] = predict(client, **request)["images"]
    assert (image["width"], image["height"]) == (96, 64)


def test_image_does_not_depend_on_its_file(client: httpx.Client) -> None:
    """The same pixels as PNG, rotated PNG and data: URL give the same image."""
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.fromarray(photo()).transpose(Image.Transpose.ROTATE_90).save(file, "PNG", exif=exif)
    variants = [
        file_of(photo()),
        "data:image/png;base64," + file_of(photo()),
        base64.b64encode(file.getvalue()).decode(),
    ]
    first, *others = [pixels(predict(client, **EDIT, image=variant)["data"]) for variant in variants]
    assert [largest_difference(first, other) for other in others] == [0, 0]


def reference_examples() -> list[tuple[str, str]]:
    """Return the language and the text of each code block about input images in the request reference."""
    page = (REPOSITORY / "docs" / "requests.md").read_text()
    section = page[page.index("## Input images") : page.index("## Samplers")]
    return re.findall(r"^```(\w+)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def command_of(language: str, code: str, url: str) -> list[str]:
    """Return the command that runs an example. JSON is the body of a request."""
    if language == "json":
        return ["curl", "--fail", "-s", "-o", "answer.json", "-H", "Content-Type: application/json", "-d", code,
                url + PREDICT_PATH]  # fmt: skip
    return [sys.executable, "-c", code] if language == "python" else ["bash", "-ec", code]


@pytest.mark.parametrize(("language", "code"), reference_examples())
def test_example_of_the_reference_works(language: str, code: str, server: Server, tmp_path: Path) -> None:
    for name, levels in (("photo", photo()), ("left", square(0, 20)), ("right", square(40, 60))):
        Image.fromarray(levels).save(tmp_path / f"{name}.png")
    code = code.replace("http://127.0.0.1:8080", server.url)
    code = code.replace(".venv/bin/preheat generate", f"{sys.executable} -m engine_builder.commands.main generate "
                        f"--url {server.url}")  # fmt: skip
    ran = subprocess.run(
        command_of(language, code, server.url), cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True, text=True, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    made = [path for path in tmp_path.iterdir() if path.stem not in ("photo", "left", "right")]
    assert made
    for path in made:
        if path.suffix == ".json":
            assert json.loads(path.read_text())["status"] == "success"
        else:
            with Image.open(path) as image:
                assert image.size == (SIZE, SIZE)


def png_of_size(width: int, height: int) -> str:
    header = struct.pack(">I4sIIBBBBB", 13, b"IHDR", width, height, 8, 2, 0, 0, 0)
    data = struct.pack(">I4s", 0, b"IDAT") + struct.pack(">I", zlib.crc32(b"IDAT"))
    end = struct.pack(">I4sI", 0, b"IEND", zlib.crc32(b"IEND"))
    return base64.b64encode(
        b"\x89PNG\r\n\x1a\n" + header + struct.pack(">I", zlib.crc32(header[4:])) + data + end
    ).decode()


MASK = {"image": file_of(square(0, 32))}


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"image": "AAAA"}, "image", "is not PNG, JPEG or WebP"),
        ({"image": "http://127.0.0.1/cat.png"}, "image", "other URLs are not fetched"),
        ({"image": png_of_size(100_000, 100_000)}, "image", "100000 x 100000 pixels. At most 32 megapixels"),
        ({"image": png_of_size(SIZE, SIZE)}, "image", "truncated or damaged"),
        ({"image": file_of(photo())[:4000]}, "image", "truncated"),
        ({"image": file_of(photo(96, 64))}, "image", "the image has 96 x 64 pixels, but 64 x 64 are requested"),
        ({"image": file_of(photo(60, 60)), "width": None, "height": None}, "image", "60 is not served here"),
        ({"masks": [{"image": file_of(photo(96, 64))}]}, "masks.0.image", "the mask has 96 x 64 pixels"),
        ({"masks": [MASK, {"image": "x"}]}, "masks.1.image", "the text is not base64"),
        ({"masks": [MASK, MASK | {"strength": 0.01}]}, "masks.1.strength", "leaves no step"),
        ({"strength": 0.01}, "strength", "leaves no step"),
        ({"composite": True}, "composite", "needs `masks`"),
    ],
)
def test_refuses_before_any_work(client: httpx.Client, fields: dict[str, Any], field: str, message: str) -> None:
    for stream in (False, True):
        answer = post(client, **EDIT | {"image": file_of(photo()), "stream": stream} | fields)
        body = answer.json()
        assert (answer.status_code, body["kind"], body["field"]) == (400, "refused", field)
        assert message in body["error"] and len(body["error"]) < 500


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"masks": []}, "masks"),
        ({"masks": 9 * [MASK]}, "masks"),
        ({"masks": [MASK | {"feather": -1}]}, "masks.0.feather"),
        ({"masks": [MASK | {"blur": 1}]}, "masks.0.blur"),
        ({"image": 5}, "image"),
        ({"upscale": 4}, "upscale"),
        ({"resize": "fill"}, "resize"),
    ],
)
def test_refuses_invalid_fields(client: httpx.Client, fields: dict[str, Any], message: str) -> None:
    answer = post(client, prompt=PROMPT, **{"image": file_of(photo())} | fields)
    assert answer.status_code == 400 and f"`{message}`" in answer.json()["error"]
    assert len(answer.text) < 4000
