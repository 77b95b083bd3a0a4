"""Prepare pixels for CLIP's image encoder, as transformers' CLIPImageProcessorPil does."""

from functools import lru_cache

import torch

from model.cuda.streams import to_device

# transformers' OPENAI_CLIP_MEAN and OPENAI_CLIP_STD
MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)
_UNIT = 2**22  # Pillow's weights are multiples of 1 / _UNIT
_PART = 2**22  # levels that are scaled at once: 32 MiB in float64


def clip_input(levels: torch.Tensor, side: int) -> torch.Tensor:
    """Return float32 [images, 3, side, side] from pixels, uint8 [images, height, width, 3], on their device.

    The shorter side is scaled to `side` by Pillow's bicubic filter, the middle is cut out, and each channel is
    normalized by CLIP's mean and deviation. The levels are equal to Pillow's: its weights are integers, and sums of
    their products with levels are exact in float64.
    """
    height, width = levels.shape[1:3]
    shorter = min(height, width)
    scaled_height, scaled_width = side * height // shorter, side * width // shorter
    rows, columns = (
        to_device(_weights(size, scaled, side), levels.device)
        for size, scaled in ((height, scaled_height), (width, scaled_width))
    )
    pixels = levels.permute(0, 3, 1, 2)
    # Pillow's order of the two passes, each of which is rounded to levels
    if height - scaled_height > max(0, 2 * (width - scaled_width)):
        pixels = _scale_lines(_scale_lines(pixels.mT, rows).mT, columns)
    else:
        pixels = _scale_lines(_scale_lines(pixels, columns).mT, rows).mT
    return normalize(pixels.float())


def normalize(levels: torch.Tensor) -> torch.Tensor:
    """Normalize float32 [images, 3, side, side] from 0 to 255 by the mean and deviation of CLIP's training images."""
    mean, deviation = (to_device(torch.tensor(values), levels.device)[:, None, None] for values in (MEAN, DEVIATION))
    return (levels / 255 - mean) / deviation


def _scale_lines(levels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return uint8 [images, 3, lines, side] from [images, 3, lines, size] and weights, float64 [side, size].

    Parts of the lines are scaled one after the other, so that little memory is needed in float64.
    """
    images, channels, _, size = levels.shape
    parts = torch.split(levels, max(1, _PART // (images * channels * size)), dim=2)
    sums = (part.double() @ weights.T for part in parts)
    return torch.cat([one.div_(_UNIT).add_(0.5).floor_().clamp_(0, 255).byte() for one in sums], dim=2)


@lru_cache(maxsize=16)
def _weights(size: int, scaled: int, side: int) -> torch.Tensor:
    """Return the weights of the middle `side` of `scaled` outputs, in multiples of 1 / _UNIT.

    They are float64 [side, size], on the host: those on a device would belong to the stream that made them.
    The filter is `precompute_coeffs` of Pillow's Resample.c, with bicubic convolution (a = -0.5).
    """
    scale = size / scaled
    stretch = max(1.0, scale)
    first = (scaled - side) // 2
    centers = ((torch.arange(first, first + side, dtype=torch.float64) + 0.5) * scale)[:, None]
    positions = torch.arange(size, dtype=torch.float64)
    x = ((positions - centers + 0.5) / stretch).abs()
    near, far = (1.5 * x - 2.5) * x * x + 1, (((x - 5) * x + 8) * x - 4) * -0.5
    weights = torch.where(x < 1, near, far)
    begin, end = ((centers + reach + 0.5).floor() for reach in (-2 * stretch, 2 * stretch))
    weights *= (x < 2) & (positions >= begin) & (positions < end)
    weights = weights / weights.sum(dim=1, keepdim=True) * _UNIT
    return (weights + torch.copysign(torch.tensor(0.5), weights)).trunc()
