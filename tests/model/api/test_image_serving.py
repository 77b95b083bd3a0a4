"""Requests with images over HTTP: post-processing, and what is refused before any work."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from preheat.local_server.server import Server
from tests.support.images import Pixels, file_of, open_image, pixels
from tests.support.predictions import PREDICT_PATH, SMALL, TIMEOUT_SECONDS, post, predict
from tests.support.repository import REPOSITORY

SIZE = 64
EDIT = SMALL | {"num_inference_steps": 4, "strength": 0.9, "seed": 5}


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


def test_enlarges_images_of_every_kind(client: httpx.Client) -> None:
    for fields in ({}, {"image": file_of(photo())}):
        body = predict(client, **EDIT | fields | ({} if fields else {"strength": None}), upscale=2)
        [image] = body["images"]
        assert (image["width"], image["height"]) == (2 * SIZE, 2 * SIZE) == open_image(image["data"]).size


def test_size_is_that_of_the_image(client: httpx.Client) -> None:
    request = EDIT | {"image": file_of(photo(96, 64)), "width": None, "height": None}
    [image] = predict(client, **request)["images"]
    assert (image["width"], image["height"]) == (96, 64)


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
    code = code.replace(".venv/bin/preheat generate", f"{sys.executable} -m preheat generate "
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


MASK = {"image": file_of(square(0, 32))}


def test_refuses_before_any_work(client: httpx.Client) -> None:
    """tests/model/api/test_image_request.py and tests/model/images/test_inputs.py have more."""
    for fields, field, message in (
        ({"image": "AAAA"}, "image", "is not PNG, JPEG or WebP"),
        ({"image": "http://127.0.0.1/cat.png"}, "image", "other URLs are not fetched"),
        ({"image": file_of(photo())[:4000]}, "image", "truncated"),
        ({"image": file_of(photo(60, 60)), "width": None, "height": None}, "image", "60 is not served here"),
        ({"masks": [MASK, MASK | {"strength": 0.01}]}, "masks.1.strength", "leaves no step"),
        ({"composite": True}, "composite", "needs `masks`"),
    ):
        for stream in (False, True):
            answer = post(client, **EDIT | {"image": file_of(photo()), "stream": stream} | fields)
            body = answer.json()
            assert (answer.status_code, body["kind"], body["field"]) == (400, "refused", field)
            assert message in body["error"] and len(body["error"]) < 500
