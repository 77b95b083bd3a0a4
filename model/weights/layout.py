"""Weight layouts: "plain" as PyTorch stores tensors, or "channels_last" for the weights of convolutions.

A GPU's convolutions read their weights channels last. Weights stored that way need no conversion. Weights stored plain
would be converted at each call, 5 GB of them.
"""

from typing import Literal

import torch

Layout = Literal["plain", "channels_last"]
LAYOUTS: dict[str, Layout] = {"cpu": "plain", "cuda": "channels_last"}  # by device


def to_stored(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the contiguous tensor to write; for channels_last [out, in, height, width] -> [out, height, width, in]."""
    stored = tensor.permute(0, 2, 3, 1) if layout == "channels_last" and tensor.ndim == 4 else tensor
    return stored.contiguous()


def from_stored(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a view of a stored tensor in the shape and strides that engines of this layout expect."""
    return tensor.permute(0, 3, 1, 2) if layout == "channels_last" and tensor.ndim == 4 else tensor
