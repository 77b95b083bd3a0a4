"""Find the edges of a picture: the Canny filter, with OpenCV's arithmetic.

The result equals `cv2.Canny(rgb, low, high)` of OpenCV 4: a Sobel kernel of 3 x 3, the L1 norm of the gradient, and in
each pixel the channel with the largest norm. Source: opencv, modules/imgproc/src/canny.cpp; Canny, "A Computational
Approach to Edge Detection", 1986.
"""

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]

LOW_THRESHOLD, HIGH_THRESHOLD = 100, 200  # of the norm; those of diffusers' examples
_TANGENT_22 = 13573  # tan(22.5 degrees) * 2^15
_SHIFT = 15


def canny(rgb: Pixels, low: int = LOW_THRESHOLD, high: int = HIGH_THRESHOLD) -> Pixels:
    """Return white edges on black, uint8 [height, width, 3], of a picture, uint8 [height, width, 3].

    A pixel is an edge if the norm of its gradient is a maximum across the edge and exceeds `high`, or exceeds `low` and
    is connected with such a pixel.
    """
    x, y, norm = _gradient(rgb)
    thin = _is_maximum(x, y, norm) & (norm > low)
    edges = _connected(thin, thin & (norm > high))
    return np.repeat(np.where(edges, np.uint8(255), np.uint8(0))[:, :, None], 3, axis=2)


def _gradient(rgb: Pixels) -> tuple[Ints, Ints, Ints]:
    """Return the derivatives along x and y, and their norm, of the channel with the largest norm: [height, width]."""
    padded = np.pad(rgb, ((1, 1), (1, 1), (0, 0)), mode="edge").astype(np.int32)
    along_y = padded[:-2] + 2 * padded[1:-1] + padded[2:]  # smoothed
    along_x = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    x, y = along_y[:, 2:] - along_y[:, :-2], along_x[2:] - along_x[:-2]
    norm = np.abs(x) + np.abs(y)
    largest = norm.argmax(axis=2)[:, :, None]  # the first one of equal norms
    return tuple(np.take_along_axis(values, largest, axis=2)[:, :, 0] for values in (x, y, norm))  # type: ignore[return-value]


def _is_maximum(x: Ints, y: Ints, norm: Ints) -> npt.NDArray[np.bool_]:
    """Return where the norm is a maximum among the two neighbours in the direction of the gradient.

    The direction is rounded to a multiple of 45 degrees, in integers.
    """
    around = np.pad(norm, 1)
    height, width = norm.shape

    def neighbour(down: int, right: int) -> Ints:
        return around[1 + down : 1 + down + height, 1 + right : 1 + right + width]

    steepness = np.abs(y).astype(np.int64) << _SHIFT
    tangent_22 = np.abs(x).astype(np.int64) * _TANGENT_22
    tangent_67 = tangent_22 + (np.abs(x).astype(np.int64) << (_SHIFT + 1))
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
    positions = np.flatnonzero(candidates)
    if not len(positions):
        return candidates
    index = np.full((height + 1, width + 2), -1)
    index[:-1, 1:-1][candidates] = np.arange(len(positions))
    row, column = positions // width, positions % width + 1
    pairs = []
    for down, right in ((0, 1), (1, -1), (1, 0), (1, 1)):
        other = index[row + down, column + right]
        own = np.flatnonzero(other >= 0)
        pairs.append(np.stack([own, other[own]]))
    first, second = np.concatenate(pairs, axis=1)
    label = np.arange(len(positions))
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
