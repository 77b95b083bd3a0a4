"""Rounding to FP8 (E4M3)."""

import torch

E4M3_MAX = 448.0


def quantize(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return values / scale as E4M3. Numbers beyond its largest are clipped."""
    scaled = values.float() * scale.reciprocal()
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
