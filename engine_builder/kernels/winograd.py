"""3x3 convolutions by Winograd's minimal filtering: 16 products for four pixels instead of 36.

Each tile of 2x2 pixels is computed from the 4x4 pixels around it, in a basis where convolution is an elementwise
product: F(2x2, 3x3) of Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016. For each of the 16
elements of that basis one matrix maps all tiles' input channels to their output channels. Weights are stored in that
basis.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from model.weights.transforms import restore_winograd, winograd_weight

# As measured on an H200. With 320 channels on both sides, moving tiles takes as much time as the products save.
_MIN_WIDER_SIDE, _MIN_NARROWER_SIDE = 640, 320  # channels
_CHANNEL_BLOCK = 64  # the least number of channels that a kernel works on at once


class WinogradConv(nn.Module):
    """A 3x3 convolution with a border of one pixel, with the weights that `winograd_kernels` reads.

    weight: [16, channels out, channels in]; bias: [channels out]. A call runs PyTorch's own convolution, and the
    kernels are validated against it.
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        assert conv.bias is not None
        self.weight = nn.Parameter(winograd_weight(conv.weight), requires_grad=False)
        self.bias = nn.Parameter(conv.bias.detach(), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Convolve [batch, channels in, height, width] -> [batch, channels out, height, width]."""
        return F.conv2d(hidden, restore_winograd(self.weight), self.bias, padding=1)


def replace_wide_convs(block: Any) -> None:
    """Replace the wide convolutions of a ResNet block by `WinogradConv`."""
    for name in ("conv1", "conv2"):
        conv = getattr(block, name)
        sides = conv.in_channels, conv.out_channels
        wide = max(sides) >= _MIN_WIDER_SIDE and min(sides) >= _MIN_NARROWER_SIDE
        if wide and not any(side % _CHANNEL_BLOCK for side in sides):
            setattr(block, name, WinogradConv(conv))
