"""The distance of two pictures."""

import math

import numpy as np

from model.images.pixels import Pixels


def psnr(reference: Pixels, found: Pixels) -> float:
    """Return the peak signal-to-noise ratio of two pictures in dB: 10 log10(255^2 / mean squared difference).

    Both: uint8 [height, width, 3] of one size. Infinity if they are equal.
    """
    difference = np.subtract(found, reference, dtype=np.int32)
    error = float(np.square(difference).mean())
    return 10 * math.log10(255.0**2 / error) if error else math.inf
