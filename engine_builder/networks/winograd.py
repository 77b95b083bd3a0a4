"""3x3 convolutions by Winograd's minimal filtering: 16 products for four pixels where there were 36.

Each tile of 2x2 pixels is worked out from the 4x4 pixels around it, in a basis in which the convolution is a product of
numbers: F(2x2, 3x3) of Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016. For each of that
basis' 16 places one matrix takes all tiles' channels in to their channels out. Weights are stored in that basis.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# As measured on an H200: from 320 channels to 320, moving tiles takes as long as what is saved.
_CHANNELS, _FEWEST = 640, 320
_BLOCK = 64  # channels a kernel takes at once, at least


class WinogradConv(nn.Module):
    """A 3x3 convolution with a border of one pixel, in the form that `winograd_kernels` works with.

    weight: [16, channels out, channels in]; bias: [channels out]. Called, it is PyTorch's own convolution, which tiles
    are held against.
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        assert conv.bias is not None
        self.weight = nn.Parameter(transformed(conv.weight), requires_grad=False)
        self.bias = nn.Parameter(conv.bias.detach(), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, channels in, height, width] -> [rows, channels out, height, width]."""
        return F.conv2d(hidden, direct(self.weight), self.bias, padding=1)


def transform_wide(block: Any) -> None:
    """The convolutions of a ResNet block become `WinogradConv` where they are wide enough."""
    for name in ("conv1", "conv2"):
        conv = getattr(block, name)
        sides = conv.in_channels, conv.out_channels
        if max(sides) >= _CHANNELS and min(sides) >= _FEWEST and not any(side % _BLOCK for side in sides):
            setattr(block, name, WinogradConv(conv))


def transformed(weight: Tensor) -> Tensor:
    """A convolution's weight [out, in, 3, 3] -> G weight G^T, [16, out, in], in fp32 or what is wider, rounded once."""
    exact = torch.promote_types(weight.dtype, torch.float32)
    axis = torch.tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], dtype=exact, device=weight.device)
    places = torch.kron(axis, axis) @ weight.to(exact).flatten(2).flatten(0, 1).T
    return places.to(weight.dtype).reshape(-1, *weight.shape[:2])


def direct(weight: Tensor) -> Tensor:
    """`transformed` undone: [16, out, in] -> [out, in, 3, 3], but for what was rounded on the way."""
    exact = torch.promote_types(weight.dtype, torch.float32)
    axis = torch.tensor([[1, 0, 0, 0], [0, 1, -1, 0], [0, 0, 0, 1]], dtype=exact, device=weight.device)
    taps = torch.kron(axis, axis) @ weight.to(exact).flatten(1)
    return taps.T.to(weight.dtype).reshape(*weight.shape[1:], 3, 3)
