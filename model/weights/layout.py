"""How weights are stored for an engine: as PyTorch makes them ("plain"), or convolutions with channels last.

A GPU's convolutions read their weights channels last. Stored so, they are mapped as they are; stored plain, every call
would turn 5 GB around.
"""

from typing import Literal

import torch

Layout = Literal["plain", "channels_last"]
LAYOUTS: dict[str, Layout] = {"cpu": "plain", "cuda": "channels_last"}  # by device


def to_stored(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The contiguous tensor that is written: [out, in, height, width] of a convolution as [out, height, width, in]."""
    turned = tensor.permute(0, 2, 3, 1) if layout == "channels_last" and tensor.ndim == 4 else tensor
    return turned.contiguous()


def from_stored(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A view of what was written, in the shape and strides that engines of this layout expect."""
    return tensor.permute(0, 3, 1, 2) if layout == "channels_last" and tensor.ndim == 4 else tensor
