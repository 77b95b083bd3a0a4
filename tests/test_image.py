"""Pixels against diffusers' own image processor, and files read back by Pillow."""

import base64
import io
import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from model.images import jpeg_strips as jpeg
from model.images.encode import ImageFormat, Pixels, broken_image, encode, encode_base64, to_levels

MAGIC = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff", "webp": b"RIFF"}


def picture(height: int = 48, width: int = 80) -> Pixels:
    """A smooth picture whose sides and channels all differ, with a sharp red square in it."""
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([40 + 2 * x, 200 - 3 * y, 90 + x + y // 2], axis=-1).clip(0, 255).astype(np.uint8)
    pixels[10:20, 30:40] = (255, 0, 0)
    return pixels


@pytest.mark.parametrize("format", MAGIC)
def test_pillow_writes_to_a_file_descriptor(format: ImageFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all else it keeps the interpreter to itself as long as it writes, and the server's threads wait."""
    written: list[int] = []
    save = Image.Image.save

    def noting(image: Image.Image, file: Any, **options: Any) -> None:
        written.append(file.fileno())
        save(image, file, **options)

    monkeypatch.setattr(Image.Image, "save", noting)
    assert encode(picture(), format, 90).startswith(MAGIC[format])
    assert len(written) == 1


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


@given(
    height=st.integers(1, 200), width=st.integers(1, 200), strips=st.integers(1, 12), quality=st.integers(1, 100),
    seed=st.integers(0, 2**16),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_a_jpeg_in_strips_is_the_picture_encoded_whole(
    height: int, width: int, strips: int, quality: int, seed: int
) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)

    def whole(part: Pixels) -> bytes:
        file = io.BytesIO()
        Image.fromarray(part).save(file, "JPEG", quality=quality, subsampling="4:2:0")
        return file.getvalue()

    with mock.patch.multiple(jpeg, _MAX_STRIPS=strips, _MIN_STRIP_PIXELS=1):
        cut = jpeg.encode_in_strips(pixels, whole)
    np.testing.assert_array_equal(np.asarray(opened(cut)), np.asarray(opened(whole(pixels))))
    scan = cut[cut.rindex(b"\xff\xda") :]  # where a marker's bytes mean nothing else, as they may in the tables before
    restarts = sum(scan.count(bytes([0xFF, 0xD0 + number])) for number in range(8))
    blocks = -(-height // 16)
    assert restarts == -(-blocks // -(-blocks // min(strips, blocks))) - 1


def test_only_large_pictures_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jpeg, "_MAX_STRIPS", 4)
    assert b"\xff\xdd" not in encode(picture(256, 256), "jpeg", 95)
    large = encode(picture(512, 512), "jpeg", 95)
    assert large.count(b"\xff\xdd") == 1 and opened(large).size == (512, 512)


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


def test_the_decoders_output_is_left_as_it_was() -> None:
    decoded = torch.full((1, 3, 8, 8), 2.0)
    to_levels(decoded)
    assert bool((decoded == 2.0).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_no_number_breaks_the_picture(value: float) -> None:
    decoded = torch.zeros(3, 3, 8, 8)
    decoded[1, 2, 7, 7] = value
    assert to_levels(decoded)[1].tolist() == [True, False, True]
    decoded[2, 0, 0, 0] = value
    assert to_levels(decoded)[1].tolist() == [True, False, False]


def test_broken_pictures_are_named() -> None:
    assert "image 1 of 3 (counted from 0) has NaN or infinite values" in str(broken_image([1], 3))
    assert str(broken_image([1, 2], 3)).startswith("image 1, 2 of 3 ")


def test_png_keeps_every_pixel() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (37, 53, 3), dtype=np.uint8)
    image = opened(encode(pixels, "png", 95))
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (53, 37))
    np.testing.assert_array_equal(np.asarray(image), pixels)
    assert encode(pixels, "png", 1) == encode(pixels, "png", 100)


@pytest.mark.parametrize("format", ["jpeg", "webp"])
def test_lossy_formats_keep_the_picture_and_obey_quality(format: ImageFormat) -> None:
    pixels = picture()
    files = [encode(pixels, format, quality) for quality in (5, 50, 95)]
    assert all(small < large for small, large in itertools.pairwise(map(len, files)))
    image = opened(files[-1])
    assert (image.format, image.mode, image.size) == (format.upper(), "RGB", (80, 48))
    far_from_the_edges = np.s_[24:, :]  # of the red square, whose colours bleed
    error = np.asarray(image).astype(int)[far_from_the_edges] - pixels[far_from_the_edges]
    assert np.abs(error).mean() < 2


def test_jpeg_is_baseline_with_colour_at_half_resolution() -> None:
    image = opened(encode(picture(), "jpeg", 95))
    assert "progressive" not in image.info
    _, horizontal, vertical, _ = image.layer[0]  # type: ignore[attr-defined]
    assert (horizontal, vertical) == (2, 2)


@pytest.mark.parametrize("format", MAGIC)
def test_base64_is_the_file_on_one_line(format: ImageFormat) -> None:
    text = encode_base64(picture(), format, 90)
    data = base64.b64decode(text, validate=True)
    assert data == encode(picture(), format, 90)
    assert data.startswith(MAGIC[format])
