"""Input images in the requested size have the pixels of diffusers and transformers."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from transformers import CLIPImageProcessorPil

from model.errors import RequestRefused
from model.images.fit import Pixels, Resize, Size, check_fit, reference_square
from model.images.fit import fit as fit_image
from model.images.inputs import MAX_INPUT_PIXELS
from tests.support.images import largest_difference

# From 1:3 to 3:1, landscape and portrait, with odd sides. Each is enlarged and reduced. Width, height.
IMAGE_SIZES = [
    (100, 300), (301, 907), (97, 211), (64, 96), (37, 53), (203, 200), (64, 64), (301, 200), (601, 301), (96, 31),
]  # fmt: skip
SIZES = list(product(IMAGE_SIZES, [(64, 64), (192, 192), (96, 64), (64, 96), (64, 192), (384, 128)]))
MODES: dict[Resize, str] = {"stretch": "default", "crop": "crop", "pad": "fill"}


def noise(size: Size, channels: tuple[int, ...] = (3,)) -> Pixels:
    return np.random.default_rng(0).integers(0, 256, (size[1], size[0], *channels), np.uint8)


def fit(pixels: Pixels, size: Size, resize: Resize) -> Pixels:
    return fit_image(Image.fromarray(pixels), size, resize)


def resized_by_diffusers(pixels: Pixels, size: Size, resize: Resize) -> Pixels:
    return np.asarray(VaeImageProcessor().resize(Image.fromarray(pixels), size[1], size[0], MODES[resize]))


@pytest.mark.parametrize(("image_size", "size"), SIZES, ids=str)
def test_stretches_as_diffusers(image_size: Size, size: Size) -> None:
    pixels = noise(image_size)
    np.testing.assert_array_equal(fit(pixels, size, "stretch"), resized_by_diffusers(pixels, size, "stretch"))


@pytest.mark.parametrize(("image_size", "size"), SIZES, ids=str)
def test_crops_as_diffusers(image_size: Size, size: Size) -> None:
    pixels = noise(image_size)
    np.testing.assert_array_equal(fit(pixels, size, "crop"), resized_by_diffusers(pixels, size, "crop"))


@pytest.mark.parametrize("image_size", [(9, 700), (700, 9), (64, 8000)], ids=str)
def test_crops_a_narrow_image_without_its_whole(image_size: Size) -> None:
    """The whole would have more pixels than an input may have. The part that remains is within two levels of it."""
    pixels = noise(image_size)
    fitted = fit(pixels, (768, 768), "crop")
    assert max(image_size) / min(image_size) * 768**2 > MAX_INPUT_PIXELS
    assert largest_difference(fitted, resized_by_diffusers(pixels, (768, 768), "crop")) <= 2


@pytest.mark.parametrize("image_size", [(1, 16_384), (16_384, 1), (100, 16_384)], ids=str)
def test_crops_a_narrow_image_from_the_rows_it_reads(image_size: Size, monkeypatch: pytest.MonkeyPatch) -> None:
    resize, resized = Image.Image.resize, []

    def record(image: Image.Image, *args: Any) -> Image.Image:
        resized.append(resize(image, *args))
        return resized[-1]

    monkeypatch.setattr(Image.Image, "resize", record)
    fit(noise(image_size), (768, 768), "crop")
    assert len(resized) == 2
    assert max(image.width * image.height for image in resized) == 768**2


@pytest.mark.parametrize(("image_size", "size"), SIZES, ids=str)
def test_pads_as_diffusers_inside_the_margins(image_size: Size, size: Size) -> None:
    scale = min(size[0] / image_size[0], size[1] / image_size[1])
    width, height = (max(1, int(side * scale + 1e-9)) for side in image_size)
    left, top = size[0] // 2 - width // 2, size[1] // 2 - height // 2
    inside = np.s_[top : top + height, left : left + width]
    pixels = noise(image_size)
    expected = resized_by_diffusers(pixels, size, "pad")
    np.testing.assert_array_equal(fit(pixels, size, "pad")[inside], expected[inside])


@pytest.mark.parametrize(("image_size", "inner"), [((64, 48), (64, 48, 0, 8)), ((31, 64), (31, 64, 17, 0))], ids=str)
def test_pads_with_the_outermost_pixels(image_size: Size, inner: tuple[int, int, int, int]) -> None:
    """diffusers fills the margins with an interpolation of the outermost two lines, and leaves an odd line black."""
    pixels = noise(image_size)
    fitted = fit(pixels, (64, 64), "pad")
    width, height, left, top = inner
    inside = np.s_[top : top + height, left : left + width]
    np.testing.assert_array_equal(fitted[inside], resized_by_diffusers(pixels, (64, 64), "pad")[inside])
    np.testing.assert_array_equal(fitted[inside], pixels)
    for margin, line in ((fitted[:top], pixels[:1]), (fitted[top + height :], pixels[-1:])):
        np.testing.assert_array_equal(margin, np.broadcast_to(line, margin.shape) if len(margin) else margin)
    for margin, line in ((fitted[:, :left], pixels[:, :1]), (fitted[:, left + width :], pixels[:, -1:])):
        np.testing.assert_array_equal(margin, np.broadcast_to(line, margin.shape) if margin.size else margin)


@pytest.mark.parametrize("resize", ["stretch", "crop", "pad"])
@pytest.mark.parametrize(("image_size", "size"), SIZES, ids=str)
def test_resizes_masks_with_their_image(resize: Resize, image_size: Size, size: Size) -> None:
    mask = noise(image_size, ())
    image = np.repeat(mask[..., None], 3, axis=-1)
    np.testing.assert_array_equal(fit(mask, size, resize), fit(image, size, resize)[..., 0])


@pytest.mark.parametrize("side", [32, 33, 224])
@pytest.mark.parametrize("image_size", IMAGE_SIZES, ids=str)
def test_a_reference_image_is_the_square_of_clip(image_size: Size, side: int) -> None:
    pixels = noise(image_size)
    processor = CLIPImageProcessorPil(size=side, crop_size=side, do_rescale=False, do_normalize=False)
    [expected] = processor(Image.fromarray(pixels), return_tensors="np")["pixel_values"]
    np.testing.assert_array_equal(reference_square(Image.fromarray(pixels), side), expected.transpose(1, 2, 0))


@pytest.mark.parametrize("resize", ["stretch", "crop", "pad"])
@pytest.mark.parametrize("image_size", [(1, 16_000), (16_000, 1), (1, 1)], ids=str)
def test_resizes_extreme_shapes(resize: Resize, image_size: Size) -> None:
    assert fit(noise(image_size), (64, 48), resize).shape == (48, 64, 3)


def test_same_size_changes_nothing() -> None:
    pixels = noise((64, 48))
    for resize in ("refuse", "stretch", "crop", "pad"):
        check_fit((64, 48), (64, 48), resize)
        np.testing.assert_array_equal(fit(pixels, (64, 48), resize), pixels)


def test_refuses_another_size_by_default() -> None:
    with pytest.raises(RequestRefused, match="the image has 64 x 48 pixels, but 64 x 64 are requested") as refused:
        check_fit((64, 48), (64, 64), "refuse")
    assert refused.value.field == "image"
    for resize in ("stretch", "crop", "pad"):
        check_fit((64, 48), (64, 64), resize)
