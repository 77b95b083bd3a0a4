"""Rounding to INT8, symmetrically: -127 to 127."""

import torch

INT8_MAX = 127.0


def quantize(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return values / scale as int8, rounded to even. Numbers beyond the largest are clipped. `scale` is broadcast."""
    scaled = values.float() * scale.reciprocal()
    return scaled.round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
