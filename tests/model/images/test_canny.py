"""The Canny filter equals OpenCV's in every pixel."""

import cv2
import numpy as np
import pytest
from PIL import Image

from model.images.canny import canny

THRESHOLDS = ((100, 200), (20, 60), (0, 400))


def noise(height: int, width: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)


def smooth(height: int, width: int) -> np.ndarray:  # type: ignore[type-arg]
    small = Image.fromarray(noise(height // 8, width // 8))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


PICTURES = {
    "noise": noise(61, 47),
    "smooth": smooth(240, 320),
    "blocks": noise(8, 8).repeat(16, axis=0).repeat(16, axis=1),
    "black": np.zeros((32, 32, 3), np.uint8),
    "one pixel": noise(1, 1),
    "one row": noise(1, 50),
    "one column": noise(50, 1),
    "one channel": noise(64, 64) * np.array([0, 1, 0], np.uint8),
}


@pytest.mark.parametrize("name", PICTURES)
def test_equals_opencv(name: str) -> None:
    for low, high in THRESHOLDS:
        edges = canny(PICTURES[name], low, high)
        expected = cv2.Canny(PICTURES[name], low, high)
        assert edges.shape == PICTURES[name].shape and edges.dtype == np.uint8
        assert np.array_equal(edges, np.repeat(expected[:, :, None], 3, axis=2)), (low, high)
    assert name != "smooth" or edges.any()


def test_a_line_is_connected_over_its_whole_length() -> None:
    """A faint line around a picture, in a spiral, which has one bright pixel at its inner end."""
    levels = np.zeros((257, 257), np.uint8)
    inset = 0
    while 257 - 2 * inset > 24:
        low, high = inset, 256 - inset
        levels[low, low:high] = levels[low:high, high] = levels[high, low : high + 1] = 40
        levels[low + 12 : high, low] = 40
        levels[low + 12, low : low + 13] = 40
        inset += 12
    levels[inset : inset + 4, inset : inset + 4] = 255
    picture = np.repeat(levels[:, :, None], 3, axis=2)
    assert np.array_equal(canny(picture)[:, :, 0], cv2.Canny(picture, 100, 200))
