"""Distances between tensors and between pictures, as pure functions. Nothing here knows networks or engines."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from model.errors import PreheatError
from model.images.distance import psnr as picture_psnr
from model.images.pixels import Pixels

# Wang, Simoncelli and Bovik, "Multi-scale structural similarity for image quality assessment", Asilomar 2003.
SCALE_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)  # from the picture's own resolution to a sixteenth
WINDOW, SIGMA = 11, 1.5  # pixels, of the Gaussian window
_C1, _C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2


class NotComparable(PreheatError):
    """Two models, tensors or pictures cannot be compared: other shapes, NaN, or a layer that one of them lacks."""

    remedy = "Compare two precisions of one model, on requests that both can generate."


def decibels(signal: float, error: float) -> float:
    """Return 10 log10(signal / error) of two energies. Infinity without an error, -infinity without a signal."""
    if not error:
        return math.inf
    return 10 * math.log10(signal / error) if signal else -math.inf


def energies(reference: torch.Tensor, found: torch.Tensor) -> tuple[float, float]:
    """Return sum(reference^2) and sum((found - reference)^2), computed in float64.

    The tensors have one shape, any float dtype and one device. Raises NotComparable for other shapes, for an empty
    tensor, and for NaN or infinity in either tensor.
    """
    if reference.shape != found.shape or not reference.numel():
        shapes = f"{list(reference.shape)} and {list(found.shape)}"
        raise NotComparable(f"Tensors of the shapes {shapes} cannot be compared.")
    dtype = torch.float64 if torch.float64 in (reference.dtype, found.dtype) else torch.float32
    exact, other = reference.to(dtype), found.to(dtype)
    norms = [torch.linalg.vector_norm(values, dtype=torch.float64) for values in (exact, other - exact)]
    signal, error = (norm**2 for norm in torch.stack(norms).tolist())
    if not math.isfinite(signal + error):
        raise NotComparable("A tensor holds NaN or infinity.", "Compare in a precision in which the model is finite.")
    return signal, error


def sqnr(reference: torch.Tensor, found: torch.Tensor) -> float:
    """Return the ratio of the signal to the quantization's noise in dB.

    10 log10(sum(reference^2) / sum((found - reference)^2)); infinity if both are equal. Higher is better, and 6 dB are
    half the error. Shapes, dtypes and errors are those of `energies`.
    """
    return decibels(*energies(reference, found))


def psnr(reference: Pixels, found: Pixels) -> float:
    """Return the peak signal-to-noise ratio of two pictures in dB: 10 log10(255^2 / mean squared difference).

    Both: uint8 [height, width, 3]. Infinity if they are equal. Raises NotComparable for other shapes.
    """
    _check_pictures(reference, found)
    return picture_psnr(reference, found)


def perceptual_distance(reference: Pixels, found: Pixels) -> float:
    """Return 1 - MS-SSIM of two pictures: 0 for equal pictures, at most 1. Both arguments may be swapped.

    Both: uint8 [height, width, 3], at least 11 pixels on each side. MS-SSIM is that of Wang, Simoncelli and Bovik
    (Asilomar 2003, equation 7): contrast and structure at each of up to five scales, luminance at the last one, with a
    Gaussian window of 11 pixels. As in TensorFlow's `ssim_multiscale`, it is the mean of the three colour channels, and
    a negative similarity counts as 0. Pictures below 176 pixels have fewer scales (all windows must fit into the last
    one), whose weights are divided by their sum. Raises NotComparable for other shapes.
    """
    _check_pictures(reference, found)
    shorter = min(reference.shape[:2])
    if shorter < WINDOW:
        raise NotComparable(f"A picture of {shorter} pixels is smaller than the window of {WINDOW} pixels.")
    weights = np.array(SCALE_WEIGHTS[: scale_count(shorter)])
    weights /= weights.sum()
    pair = torch.stack([_planes(reference), _planes(found)])  # [2, 3, height, width]
    similarity = torch.ones(3, dtype=torch.float64)
    for scale, weight in enumerate(weights):
        if scale:
            pair = F.avg_pool2d(pair, 2)
        is_last = scale == len(weights) - 1
        similarity *= _similarity(pair[0], pair[1], with_luminance=is_last).clamp(min=0) ** float(weight)
    return 1 - float(similarity.mean())


def scale_count(shorter_side: int) -> int:
    """Return the scales of a picture, 1 to 5: at each, the shorter side in pixels holds the window."""
    return min(len(SCALE_WEIGHTS), (shorter_side // WINDOW).bit_length())


def _similarity(first: torch.Tensor, second: torch.Tensor, with_luminance: bool) -> torch.Tensor:
    """Return the mean similarity of each channel, float64 [3]: contrast and structure, and the luminance if asked for.

    Both: float64 [3, height, width], 0 to 255.
    """
    mean_1, mean_2 = _blur(first), _blur(second)
    variances = _blur(first * first) - mean_1 * mean_1 + _blur(second * second) - mean_2 * mean_2
    covariance = _blur(first * second) - mean_1 * mean_2
    similarity = (2 * covariance + _C2) / (variances + _C2)
    if with_luminance:
        similarity *= (2 * mean_1 * mean_2 + _C1) / (mean_1 * mean_1 + mean_2 * mean_2 + _C1)
    return similarity.mean(dim=(1, 2))


def _blur(planes: torch.Tensor) -> torch.Tensor:
    """Return the Gaussian mean around each pixel whose window is inside: [3, height - 10, width - 10]."""
    offsets = torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2
    window = torch.exp(-(offsets**2) / (2 * SIGMA**2))
    window /= window.sum()
    rows = F.conv2d(planes[:, None], window.reshape(1, 1, -1, 1))
    return F.conv2d(rows, window.reshape(1, 1, 1, -1))[:, 0]


def _planes(pixels: NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(pixels.astype(np.float64)).permute(2, 0, 1)


def _check_pictures(reference: Pixels, found: Pixels) -> None:
    for pixels in (reference, found):
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            raise NotComparable(f"A picture is {pixels.dtype} {list(pixels.shape)}, not uint8 [height, width, 3].")
    if reference.shape != found.shape:
        shapes = [f"{pixels.shape[1]}x{pixels.shape[0]}" for pixels in (reference, found)]
        raise NotComparable(f"Pictures of {shapes[0]} and {shapes[1]} pixels cannot be compared.")
