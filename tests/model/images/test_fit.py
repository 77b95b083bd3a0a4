"""Input images in the requested size have the pixels of diffusers and transformers."""

from itertools import product

import numpy as np
import pytest
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from transformers import CLIPImageProcessorPil

from model.errors import RequestRefused
from model.images.fit import Resize, Size, check_fit, reference_square
from model.images.fit import fit as fit_image
from model.images.inputs import MAX_INPUT_PIXELS
from model.images.pixels import Pixels
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


@pytest.mark.parametrize("resize", MODES)
def test_resizes_as_diffusers(resize: Resize) -> None:
    """Inside the margins, where it pads. A mask has the levels of an equal image."""
    for image_size, size in SIZES:
        pixels, inside = noise(image_size), np.s_[:, :]
        if resize == "pad":
            scale = min(size[0] / image_size[0], size[1] / image_size[1])
            width, height = (max(1, int(side * scale + 1e-9)) for side in image_size)
            left, top = size[0] // 2 - width // 2, size[1] // 2 - height // 2
            inside = np.s_[top : top + height, left : left + width]
        expected = resized_by_diffusers(pixels, size, resize)
        np.testing.assert_array_equal(fit(pixels, size, resize)[inside], expected[inside], f"{image_size} {size}")
        mask = noise(image_size, ())
        image = np.repeat(mask[..., None], 3, axis=-1)
        np.testing.assert_array_equal(fit(mask, size, resize), fit(image, size, resize)[..., 0])


@pytest.mark.parametrize("image_size", [(9, 700), (700, 9), (64, 8000)], ids=str)
def test_crops_a_narrow_image_without_its_whole(image_size: Size) -> None:
    """The whole would have more pixels than an input may have. The part that remains is within two levels of it."""
    pixels = noise(image_size)
    fitted = fit(pixels, (768, 768), "crop")
    assert max(image_size) / min(image_size) * 768**2 > MAX_INPUT_PIXELS
    assert largest_difference(fitted, resized_by_diffusers(pixels, (768, 768), "crop")) <= 2


@pytest.mark.parametrize(("image_size", "inner"), [((64, 48), (64, 48, 0, 8)), ((31, 64), (31, 64, 17, 0))], ids=str)
def test_pads_with_the_outermost_pixels(image_size: Size, inner: tuple[int, int, int, int]) -> None:
    """diffusers fills the margins with an interpolation of the outermost two lines, and leaves an odd line black."""
    width, height, left, top = inner
    margins = ((top, 64 - top - height), (left, 64 - left - width), (0, 0))
    pixels = noise(image_size)
    np.testing.assert_array_equal(fit(pixels, (64, 64), "pad"), np.pad(pixels, margins, mode="edge"))


@pytest.mark.parametrize("side", [32, 33, 224])
def test_a_reference_image_is_the_square_of_clip(side: int) -> None:
    processor = CLIPImageProcessorPil(size=side, crop_size=side, do_rescale=False, do_normalize=False)
    for image_size in IMAGE_SIZES:
        pixels = noise(image_size)
        [expected] = processor(Image.fromarray(pixels), return_tensors="np")["pixel_values"]
        square = reference_square(Image.fromarray(pixels), side)
        np.testing.assert_array_equal(square, expected.transpose(1, 2, 0), str(image_size))


@pytest.mark.parametrize("resize", MODES)
def test_resizes_extreme_shapes(resize: Resize) -> None:
    for image_size in ((1, 16_000), (16_000, 1), (1, 1)):
        assert fit(noise(image_size), (64, 48), resize).shape == (48, 64, 3)


def test_refuses_another_size_by_default() -> None:
    with pytest.raises(RequestRefused, match="the image has 64 x 48 pixels, but 64 x 64 are requested") as refused:
        check_fit((64, 48), (64, 64), "refuse")
    assert refused.value.field == "image"
    check_fit((64, 48), (64, 48), "refuse")
    pixels = noise((64, 48))
    for resize in MODES:
        check_fit((64, 48), (64, 64), resize)
        np.testing.assert_array_equal(fit(pixels, (64, 48), resize), pixels)
