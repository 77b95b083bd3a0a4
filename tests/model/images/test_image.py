"""Pixels are those of diffusers' image processor, and files are read back with Pillow."""

import base64
import io
import itertools
import os
import sys
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from model.images.encode import ImageFormat, broken_image, encode, encode_base64, to_levels
from model.images.jpeg_strips import encode_in_strips
from model.images.pixels import Pixels

RESTART_INTERVAL = b"\xff\xdd"  # the marker of a JPEG that was encoded in strips


def make_pixels(height: int = 48, width: int = 80) -> Pixels:
    """Return a smooth image whose sides and channels all differ, with a sharp red square in it."""
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([40 + 2 * x, 200 - 3 * y, 90 + x + y // 2], axis=-1).clip(0, 255).astype(np.uint8)
    pixels[10:20, 30:40] = (255, 0, 0)
    return pixels


def read_image(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def encode_whole(pixels: Pixels, quality: int = 95) -> bytes:
    """Return an image as a JPEG that is not encoded in strips."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality, subsampling="4:2:0")
    return file.getvalue()


@given(
    height=st.integers(1, 200), width=st.integers(1, 200), strips=st.integers(1, 12), quality=st.integers(1, 100),
    seed=st.integers(0, 2**16),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_jpeg_in_strips_has_the_pixels_of_a_whole_one(
    height: int, width: int, strips: int, quality: int, seed: int
) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    whole = encode_whole(pixels, quality)
    joined = encode_in_strips(pixels, lambda part: encode_whole(part, quality), strips, min_strip_pixels=1)
    np.testing.assert_array_equal(np.asarray(read_image(joined)), np.asarray(read_image(whole)))
    scan = joined[joined.rindex(b"\xff\xda") :]  # the tables before it may hold a marker's bytes by chance
    restarts = sum(scan.count(bytes([0xFF, 0xD0 + number])) for number in range(8))
    blocks = -(-height // 16)
    assert restarts == -(-blocks // -(-blocks // min(strips, blocks))) - 1


@pytest.mark.parametrize(
    "size", [(8_240, 4_080), pytest.param((6_144, 6_144), marks=pytest.mark.full)], ids=["interval-65535", "square"]
)
def test_few_strips_of_a_large_jpeg_stay_in_16_bits(size: tuple[int, int]) -> None:
    """Two strips of equal height would have more blocks than a restart interval can."""
    height, width = size
    y, x = np.ogrid[:height, :width]
    pixels = np.stack([np.broadcast_to(levels // 64 % 256, size) for levels in (x, y, x + y)], -1).astype(np.uint8)
    file = encode_in_strips(pixels, encode_whole, max_strips=2)
    at = file.index(RESTART_INTERVAL)
    interval = int.from_bytes(file[at + 4 : at + 6])
    assert interval == 65_535 // (width // 16) * (width // 16)
    np.testing.assert_array_equal(np.asarray(read_image(file)), np.asarray(read_image(encode_whole(pixels))))


def test_only_large_images_are_encoded_in_strips() -> None:
    assert RESTART_INTERVAL not in encode_in_strips(make_pixels(256, 256), encode_whole, max_strips=4)
    several_cores = len(os.sched_getaffinity(0)) > 1
    assert (RESTART_INTERVAL in encode(make_pixels(512, 512), "jpeg", 95)) is several_cores


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_pixels_are_those_of_diffusers(dtype: torch.dtype) -> None:
    # Every level, the midpoints between levels where rounding decides, and values past both ends.
    sweep = torch.linspace(-1.5, 1.5, 3 * 64 * 96).reshape(1, 3, 64, 96)
    midpoints = ((torch.arange(3 * 64 * 96) % 511) / 255 - 1).reshape(1, 3, 64, 96)
    noise = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    decoded = torch.cat([sweep, midpoints, noise]).to(dtype)

    images = VaeImageProcessor().postprocess(decoded, output_type="pil")
    expected = np.stack([np.asarray(image) for image in images])

    levels, finite = to_levels(decoded)
    assert (levels.dtype, levels.shape) == (torch.uint8, (4, 64, 96, 3))
    assert levels.is_contiguous() and finite.tolist() == [True] * 4
    np.testing.assert_array_equal(levels.numpy(), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_nan_or_infinite_value_breaks_an_image(value: float) -> None:
    decoded = torch.zeros(3, 3, 8, 8)
    decoded[1, 2, 7, 7] = value
    assert to_levels(decoded)[1].tolist() == [True, False, True]
    assert "image 1 of 3 (counted from 0) has NaN or infinite values" in str(broken_image([1], 3))


def test_png_keeps_every_pixel() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (37, 53, 3), dtype=np.uint8)
    image = read_image(encode(pixels, "png", 95))
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (53, 37))
    np.testing.assert_array_equal(np.asarray(image), pixels)
    assert encode(pixels, "png", 1) == encode(pixels, "png", 100)


@pytest.mark.parametrize("format", ["jpeg", "webp"])
def test_lossy_formats_resemble_the_image_and_obey_quality(format: ImageFormat) -> None:
    pixels = make_pixels()
    files = [encode(pixels, format, quality) for quality in (5, 50, 95)]
    assert all(small < large for small, large in itertools.pairwise(map(len, files)))
    image = read_image(files[-1])
    assert (image.format, image.mode, image.size) == (format.upper(), "RGB", (80, 48))
    below_the_square = np.s_[24:, :]  # the square's sharp edges bleed into their neighbours
    error = np.asarray(image).astype(int)[below_the_square] - pixels[below_the_square]
    assert np.abs(error).mean() < 2


def test_jpeg_is_baseline_with_colour_at_half_resolution() -> None:
    image = read_image(encode(make_pixels(), "jpeg", 95))
    assert "progressive" not in image.info
    assert image.layer[0][1:3] == (2, 2)  # type: ignore[attr-defined]


def test_encodes_jpeg_without_the_interpreter_lock() -> None:
    """Pillow's `encode_to_file` releases the lock. Its `encode`, for files without a descriptor, does not."""
    calls: set[str] = set()

    def record(frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__.startswith("encode"):
            calls.add(function.__name__)

    pixels = make_pixels()
    sys.setprofile(record)
    try:
        encode(pixels, "jpeg", 90)
    finally:
        sys.setprofile(None)
    assert calls == {"encode_to_file"}


def test_base64_is_the_file_on_one_line() -> None:
    data = base64.b64decode(encode_base64(make_pixels(), "jpeg", 90), validate=True)
    assert data == encode(make_pixels(), "jpeg", 90)
