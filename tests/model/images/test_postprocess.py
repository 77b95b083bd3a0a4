"""Blending generated pixels with the input's, on small images whose result is known."""

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from model.images.encode import encode
from model.images.pixels import Pixels
from model.images.postprocess import color_match, composite, dilate, feather, upscale
from model.pipeline.params import GenerationParams, Mask
from model.scheduling.output_workers import finish
from tests.support.images import largest_difference
from tests.support.linear_networks import PLAIN

SIZE = 96


def noise(seed: int, low: int = 0, high: int = 256) -> Pixels:
    return np.random.default_rng(seed).integers(low, high, (SIZE, SIZE, 3), np.uint8)


def square(begin: int = 36, end: int = 60) -> Pixels:
    mask = np.zeros((SIZE, SIZE), np.uint8)
    mask[begin:end, begin:end] = 255
    return mask


@pytest.mark.parametrize("radius", [1, 4, 7.5])
def test_blurs_a_mask_as_diffusers(radius: float) -> None:
    blurred = feather(square(), radius)
    np.testing.assert_array_equal(blurred, np.asarray(VaeImageProcessor.blur(Image.fromarray(square()), radius)))
    assert blurred[48, 48] >= 200 and blurred[0, 0] == 0 and 100 < blurred[48, 36] < 200


def test_blends_by_the_mask() -> None:
    levels = np.arange(256, dtype=np.uint8)[None].repeat(2, axis=0)
    generated, original = np.full((2, 256, 3), 200, np.uint8), np.full((2, 256, 3), 40, np.uint8)
    image = composite(generated, original, levels)
    expected = np.rint(40 + 160 * levels.astype(float) / 255)
    np.testing.assert_array_equal(image[..., 0], expected)


def test_undoes_a_shift_of_the_colours() -> None:
    """The generated image is the input with other contrast and brightness in each channel."""
    original = noise(0, 60, 200)
    shifted = np.clip(np.rint((original - 128.0) * (0.8, 1.0, 1.2) + (120, 140, 128)), 0, 255).astype(np.uint8)
    assert largest_difference(shifted, original) > 20
    assert largest_difference(color_match(shifted, original, square()), original) <= 1


def test_matches_the_ring_and_not_the_whole_image() -> None:
    """Pixels far from the mask, and those under it, do not count."""
    mask = square(44, 52)
    original = noise(0, 100, 140)
    generated = original + 30
    ring = dilate(mask > 0, 32) & (mask == 0)
    assert 0.1 < ring.mean() < 0.9
    generated[~ring] = 7
    matched = color_match(generated.astype(np.uint8), original, mask)
    assert largest_difference(matched[ring], original[ring]) <= 1


def test_limits_the_change_of_contrast() -> None:
    original, generated = noise(0, 0, 256), noise(0, 126, 131)
    matched = color_match(generated, original, square())
    assert np.ptp(matched[..., 0]) <= 2 * np.ptp(generated[..., 0]) + 1


def test_changes_nothing_without_surroundings() -> None:
    for level in (0, 255):
        mask = np.full((SIZE, SIZE), level, np.uint8)
        np.testing.assert_array_equal(color_match(noise(0), noise(1), mask), noise(0))


def params(**changes: Any) -> GenerationParams:
    masks = tuple(Mask(square(*sides), "a", None, 1.0) for sides in ((10, 20), (50, 60)))
    return replace(PLAIN, width=SIZE, height=SIZE, image=noise(1, 100, 140), masks=masks, **changes)


def test_finishes_nothing_by_default() -> None:
    generated = noise(0)
    assert finish(generated, PLAIN) is generated
    assert finish(generated, params()) is generated


def test_composites_all_masks() -> None:
    """And keeps the others' pixels in a PNG."""
    generated, asked = noise(0), params(composite=True)
    mask = np.maximum(square(10, 20), square(50, 60))
    image = np.asarray(Image.open(io.BytesIO(encode(finish(generated, asked), "png", 95))))
    np.testing.assert_array_equal(image[mask == 0], asked.image[mask == 0])  # type: ignore[index]
    np.testing.assert_array_equal(image[mask == 255], generated[mask == 255])


def test_matches_colours_before_it_composites_and_enlarges() -> None:
    asked = params(composite=True, color_match=True, upscale=2)
    assert asked.image is not None
    image = finish(asked.image + 20, asked)
    assert image.shape == (2 * SIZE, 2 * SIZE, 3)
    assert largest_difference(image, upscale(asked.image, 2)) <= 2
    assert largest_difference(finish(asked.image + 20, params(composite=True, upscale=2)), image) > 15


def test_doubles_the_size_by_lanczos() -> None:
    pixels = noise(0)[:40]
    image = upscale(pixels, 2)
    expected = Image.fromarray(pixels).resize((2 * SIZE, 80), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(image, np.asarray(expected))
    assert upscale(pixels, 1) is pixels
