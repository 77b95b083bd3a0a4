"""Input images in the requested size, compared with diffusers' `VaeImageProcessor.resize`."""

import numpy as np
import pytest
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from model.errors import RequestRefused
from model.images.fit import Pixels, Resize, check_fit, fit
from tests.support.images import largest_difference

# The requested size is wider, narrower, larger, smaller; sides are odd. Width, height.
SIZES = [((64, 48), (48, 48)), ((48, 64), (64, 40)), ((37, 53), (96, 64)), ((301, 200), (64, 64)), ((64, 64), (64, 32))]
MODES: dict[Resize, str] = {"stretch": "default", "crop": "crop", "pad": "fill"}


def noise(size: tuple[int, int], channels: tuple[int, ...] = (3,)) -> Pixels:
    return np.random.default_rng(0).integers(0, 256, (size[1], size[0], *channels), np.uint8)


def smooth(size: tuple[int, int]) -> Pixels:
    y, x = np.mgrid[: size[1], : size[0]]
    return np.stack([80 + x / 3, 200 - y / 4, (x + y) / 5], axis=-1).astype(np.uint8)


def resized_by_diffusers(pixels: Pixels, size: tuple[int, int], resize: Resize) -> Pixels:
    return np.asarray(VaeImageProcessor().resize(Image.fromarray(pixels), size[1], size[0], MODES[resize]))


@pytest.mark.parametrize(("image_size", "size"), SIZES, ids=str)
def test_stretches_as_diffusers(image_size: tuple[int, int], size: tuple[int, int]) -> None:
    pixels = noise(image_size)
    np.testing.assert_array_equal(fit(pixels, size, "stretch"), resized_by_diffusers(pixels, size, "stretch"))


@pytest.mark.parametrize(("image_size", "size"), SIZES, ids=str)
def test_crops_as_diffusers(image_size: tuple[int, int], size: tuple[int, int]) -> None:
    """Pillow chooses the order of its two passes by the size, and rounds between them."""
    pixels = smooth(image_size)
    fitted = fit(pixels, size, "crop")
    assert fitted.shape == (size[1], size[0], 3)
    assert largest_difference(fitted, resized_by_diffusers(pixels, size, "crop")) <= 1


@pytest.mark.parametrize(("image_size", "inner"), [((64, 48), (64, 48, 0, 8)), ((31, 64), (31, 64, 17, 0))], ids=str)
def test_pads_with_the_outermost_pixels(image_size: tuple[int, int], inner: tuple[int, int, int, int]) -> None:
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
def test_resizes_masks_with_their_image(resize: Resize, image_size: tuple[int, int], size: tuple[int, int]) -> None:
    mask = noise(image_size, ())
    image = np.repeat(mask[..., None], 3, axis=-1)
    np.testing.assert_array_equal(fit(mask, size, resize), fit(image, size, resize)[..., 0])


@pytest.mark.parametrize("resize", ["stretch", "crop", "pad"])
@pytest.mark.parametrize("image_size", [(1, 16_000), (16_000, 1), (1, 1)], ids=str)
def test_resizes_extreme_shapes(resize: Resize, image_size: tuple[int, int]) -> None:
    assert fit(noise(image_size), (64, 48), resize).shape == (48, 64, 3)


def test_same_size_changes_nothing() -> None:
    pixels = noise((64, 48))
    for resize in ("refuse", "stretch", "crop", "pad"):
        check_fit((64, 48), (64, 48), resize)
        assert fit(pixels, (64, 48), resize) is pixels


def test_refuses_another_size_by_default() -> None:
    with pytest.raises(RequestRefused, match="the image has 64 x 48 pixels, but 64 x 64 are requested") as refused:
        check_fit((64, 48), (64, 64), "refuse")
    assert refused.value.field == "image"
    for resize in ("stretch", "crop", "pad"):
        check_fit((64, 48), (64, 64), resize)
