"""The metadata of images: what the files state, and that it makes the image again."""

import base64
import hashlib
import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from model.images.encode import encode
from model.images.metadata import MAX_JPEG_BYTES, read_text
from preheat.local_server.server import Server
from tests.support.images import file_of, largest_difference, open_image, pixels
from tests.support.predictions import SMALL, http_client, post, predict

FORMATS = ("png", "jpeg", "webp")
SCRIPT = "</script><script>alert(1)</script> é \U0001f525"


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with http_client(server) as client:
        yield client


@pytest.mark.parametrize("format", FORMATS)
def test_request_of_the_metadata_makes_the_image_again(format: str, client: httpx.Client, release: str) -> None:
    request: dict[str, Any] = SMALL | {"output_format": format, "prompt": f"a red circle {SCRIPT}", "metadata": True}
    made = predict(client, **request, num_images=2)
    stated = json.loads(read_text(open_image(made["images"][1]["data"])))
    assert stated["release"] == release
    assert stated["request"]["seed"] == made["images"][1]["seed"] and stated["request"]["num_images"] == 1
    assert stated["request"]["prompt"] == request["prompt"] and stated["request"]["scheduler"] == "Euler"
    alone = predict(client, **stated["request"], metadata=True)
    if format == "png":  # in a batch the sums of an image are rounded differently
        assert largest_difference(pixels(alone["data"]), pixels(made["images"][1]["data"])) <= 1
    of_alone = json.loads(read_text(open_image(alone["data"])))
    again = predict(client, **of_alone["request"])
    assert of_alone == stated and np.array_equal(pixels(again["data"]), pixels(alone["data"]))


@pytest.mark.parametrize("format", FORMATS)
def test_files_state_nothing_by_default(format: str, client: httpx.Client) -> None:
    image = open_image(predict(client, **SMALL | {"output_format": format})["data"])
    assert read_text(image) == "" and not image.getexif() and not getattr(image, "text", {})


def test_input_images_are_digests(client: httpx.Client) -> None:
    image = file_of(np.full((64, 64, 3), 90, np.uint8))
    mask = file_of(np.full((64, 64), 255, np.uint8))
    masks = [{"image": f"data:image/png;base64,{mask}", "prompt": "a blue line"}]
    made = predict(client, **SMALL, image=image, masks=masks, metadata=True)
    text = read_text(open_image(made["data"]))
    stated = json.loads(text)["request"]
    digests = [digest_of(image), digest_of(mask)]
    assert [stated["image"], stated["masks"][0]["image"]] == digests
    assert stated["masks"][0]["prompt"] == "a blue line" and image not in text and mask not in text


def digest_of(data: str) -> str:
    return f"sha256:{hashlib.sha256(base64.b64decode(data)).hexdigest()}"


def test_refuses_metadata_that_no_jpeg_holds(client: httpx.Client) -> None:
    image = file_of(np.full((64, 64, 3), 90, np.uint8))
    masks = 3 * [{"image": file_of(np.full((64, 64), 255, np.uint8)), "prompt": "é" * 4000}]
    request: dict[str, Any] = SMALL | {"image": image, "masks": masks, "metadata": True}
    refused = post(client, **request | {"output_format": "jpeg"})
    assert refused.status_code == 400 and refused.json()["field"] == "metadata"
    assert "Set `output_format` png or webp" in refused.json()["error"]
    made = predict(client, **request | {"output_format": "png"})
    assert len(read_text(open_image(made["data"]))) > MAX_JPEG_BYTES


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("side", [64, 1024], ids=["whole", "strips"])
def test_text_does_not_change_the_pixels(format: Any, side: int) -> None:
    levels = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    text = "x" * MAX_JPEG_BYTES
    with_text, without = (Image.open(io.BytesIO(encode(levels, format, 90, t))) for t in (text, ""))
    assert np.array_equal(np.asarray(with_text), np.asarray(without)) and read_text(with_text) == text
