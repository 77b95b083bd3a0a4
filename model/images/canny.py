"""Find the edges of a picture: the Canny filter, with OpenCV's arithmetic.

The result equals `cv2.Canny(rgb, low, high)` of OpenCV 4: a Sobel kernel of 3 x 3, the L1 norm of the gradient, and in
each pixel the channel with the largest norm. Source: opencv, modules/imgproc/src/canny.cpp; Canny, "A Computational
Approach to Edge Detection", 1986.
"""

import numpy as np
import numpy.typing as npt

from model.images.pixels import Pixels

Ints = npt.NDArray[np.int16]

LOW_THRESHOLD, HIGH_THRESHOLD = 100, 200  # of the norm; those of diffusers' examples
_TANGENT_22 = 13573  # tan(22.5 degrees) * 2^15
_SHIFT = 15
_STRIP_ROWS = 64  # computed at once; of 4096 pixels in a row they take 20 MiB


def canny(rgb: Pixels, low: int = LOW_THRESHOLD, high: int = HIGH_THRESHOLD) -> Pixels:
    """Return white edges on black, uint8 [height, width, 3], of a picture, uint8 [height, width, 3].

    A pixel is an edge if the norm of its gradient is a maximum across the edge and exceeds `high`, or exceeds `low` and
    is connected with such a pixel.
    """
    height = len(rgb)
    thin, strong = np.zeros(rgb.shape[:2], bool), np.zeros(rgb.shape[:2], bool)
    for top in range(0, height, _STRIP_ROWS):
        bottom = min(height, top + _STRIP_ROWS)
        x, y, norm = _gradient(rgb, max(0, top - 1), min(height, bottom + 1))
        # The norm has one row more on each side; beyond the picture it is 0.
        around = np.pad(norm, ((top == 0, bottom == height), (1, 1)))
        rows = slice(top > 0, (top > 0) + bottom - top)
        thin[top:bottom] = _is_maximum(x[rows], y[rows], around) & (norm[rows] > low)
        strong[top:bottom] = thin[top:bottom] & (norm[rows] > high)
    edges = _connected(thin, strong)
    return np.repeat(np.where(edges, np.uint8(255), np.uint8(0))[:, :, None], 3, axis=2)


def _gradient(rgb: Pixels, first: int, last: int) -> tuple[Ints, Ints, Ints]:
    """Return the derivatives along x and y, and their norm, of the channel with the largest norm.

    Each is int16 [last - first, width], of the rows from `first` on and before `last`.
    """
    rows = rgb[max(0, first - 1) : last + 1]
    margins = ((first == 0, last == len(rgb)), (1, 1), (0, 0))
    padded = np.pad(rows, margins, mode="edge").astype(np.int16)
    along_y = padded[:-2] + 2 * padded[1:-1] + padded[2:]  # smoothed
    along_x = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    all_x, all_y = along_y[:, 2:] - along_y[:, :-2], along_x[2:] - along_x[:-2]
    all_norms = np.abs(all_x) + np.abs(all_y)  # at most 2,040
    x, y, norm = all_x[..., 0], all_y[..., 0], all_norms[..., 0]
    for channel in (1, 2):  # of equal norms the first one
        larger = all_norms[..., channel] > norm
        x, y = np.where(larger, all_x[..., channel], x), np.where(larger, all_y[..., channel], y)
        norm = np.maximum(norm, all_norms[..., channel])
    return x, y, norm


def _is_maximum(x: Ints, y: Ints, around: Ints) -> npt.NDArray[np.bool_]:
    """Return where the norm is a maximum among the two neighbours in the direction of the gradient.

    The direction is rounded to a multiple of 45 degrees, in integers. `around`: the norm, with a margin of one pixel.
    """
    height, width = x.shape
    norm = around[1:-1, 1:-1]

    def neighbour(down: int, right: int) -> Ints:
        return around[1 + down : 1 + down + height, 1 + right : 1 + right + width]

    steepness = np.abs(y).astype(np.int32) << _SHIFT
    tangent_22 = np.abs(x).astype(np.int32) * _TANGENT_22
    tangent_67 = tangent_22 + (np.abs(x).astype(np.int32) << (_SHIFT + 1))
    horizontal = (norm > neighbour(0, -1)) & (norm >= neighbour(0, 1))
    vertical = (norm > neighbour(-1, 0)) & (norm >= neighbour(1, 0))
    falling = (norm > neighbour(-1, -1)) & (norm > neighbour(1, 1))
    rising = (norm > neighbour(-1, 1)) & (norm > neighbour(1, -1))
    diagonal = np.where((x ^ y) < 0, rising, falling)
    return np.where(steepness < tangent_22, horizontal, np.where(steepness > tangent_67, vertical, diagonal))


def _connected(candidates: npt.NDArray[np.bool_], seeds: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return the candidates that are connected with a seed through candidates, over edges and corners of pixels.

    Labels every candidate with the smallest index of its component. Each round halves the longest path to that index,
    so the number of rounds grows with the logarithm of the longest line, not with its length.
    """
    height, width = candidates.shape
    positions = np.flatnonzero(candidates).astype(np.int32)
    if not len(positions):
        return candidates
    index = np.full((height + 1, width + 2), -1, np.int32)
    index[:-1, 1:-1][candidates] = np.arange(len(positions), dtype=np.int32)
    row, column = positions // width, positions % width + 1
    pairs = []
    for down, right in ((0, 1), (1, -1), (1, 0), (1, 1)):
        other = index[row + down, column + right]
        own = np.flatnonzero(other >= 0).astype(np.int32)
        pairs.append(np.stack([own, other[own]]))
    first, second = np.concatenate(pairs, axis=1)
    label = np.arange(len(positions), dtype=np.int32)
    while True:
        smaller = np.minimum(label[first], label[second])
        changed = label.copy()
        for ends in (first, second):
            np.minimum.at(changed, label[ends], smaller)
            np.minimum.at(changed, ends, smaller)
        changed = changed[changed]
        if np.array_equal(changed, label):
            break
        label = changed
    marked = np.zeros(len(positions), bool)
    marked[label[np.flatnonzero(seeds[candidates])]] = True
    edges = np.zeros_like(candidates)
    edges[candidates] = marked[label]
    return edges
