"""Blend generated pixels with those of the input image, and enlarge them. Pure functions on uint8 pixels."""

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter

from model.images.pixels import Pixels

Bits = npt.NDArray[np.bool_]

RING_WIDTH = 32  # pixels
MIN_RING_PIXELS = 64
_MAX_CONTRAST_CHANGE = 2.0


def feather(mask: Pixels, radius: float) -> Pixels:
    """Blur a mask by a Gaussian of standard deviation `radius` in pixels, as diffusers' `VaeImageProcessor.blur`.

    Pillow approximates the Gaussian by three box filters. 0 returns the mask unchanged.
    """
    return mask if radius == 0 else np.asarray(Image.fromarray(mask).filter(ImageFilter.GaussianBlur(radius)))


def union(masks: list[Pixels]) -> Pixels:
    """Return the maximum of several masks."""
    largest: Pixels = np.maximum.reduce(masks)
    return largest


def composite(generated: Pixels, original: Pixels, mask: Pixels) -> Pixels:
    """Return round(original + (generated - original) * mask / 255).

    Where `mask` is 0 the result is exactly `original`, where it is 255 exactly `generated`.
    """
    return np.asarray(Image.composite(Image.fromarray(generated), Image.fromarray(original), Image.fromarray(mask)))


def color_match(generated: Pixels, original: Pixels, mask: Pixels) -> Pixels:
    """Shift the colours of `generated` so that it matches `original` around the mask.

    The ring is every pixel with mask 0 that is at most 32 pixels (in x and y) from one with mask above 0. Both images
    show the same content there. With mean m and standard deviation s of a channel in the ring, each value v becomes

        (v - m_generated) * s_original / s_generated + m_original

    This is the transfer of Reinhard et al., "Color Transfer between Images" (2001), in RGB. The ratio of the deviations
    is limited to 1/2 to 2, and is 1 where `generated` has a deviation below 1. A ring of fewer than 64 pixels changes
    nothing.
    """
    ring = dilate(mask > 0, RING_WIDTH) & (mask == 0)
    if np.count_nonzero(ring) < MIN_RING_PIXELS:
        return generated
    have, want = generated[ring].astype(np.float64), original[ring].astype(np.float64)  # [pixels, 3]
    deviation = have.std(axis=0)
    flat = deviation < 1
    ratio = np.where(flat, 1, want.std(axis=0) / np.where(flat, 1, deviation))
    scale = np.clip(ratio, 1 / _MAX_CONTRAST_CHANGE, _MAX_CONTRAST_CHANGE)
    # Each of 256 levels of a channel has one result: a table is far faster than arithmetic on every pixel.
    table = (np.arange(256)[:, None] - have.mean(axis=0)) * scale + want.mean(axis=0)  # [256, 3]
    levels = np.clip(np.rint(table), 0, 255).astype(np.uint8)
    return np.stack([levels[generated[..., channel], channel] for channel in range(3)], axis=-1)


def upscale(pixels: Pixels, factor: int) -> Pixels:
    """Return `pixels` enlarged by a Lanczos filter, uint8 [factor * height, factor * width, 3]. 1 changes nothing."""
    if factor == 1:
        return pixels
    height, width = pixels.shape[:2]
    size = (width * factor, height * factor)
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


def dilate(bits: Bits, distance: int) -> Bits:
    """Return true for each pixel whose square neighbourhood of that `distance` has a true one."""
    for axis in (0, 1):
        # A window has a true value if the running count rises within it.
        margins = [(0, 0), (0, 0)]
        margins[axis] = (distance + 1, distance)
        counts = np.cumsum(np.pad(bits, margins), axis=axis, dtype=np.int32)
        after, before = np.split(counts, [2 * distance + 1], axis=axis)[1], counts
        length = after.shape[axis]
        bits = after > before.take(range(length), axis=axis)
    return bits
