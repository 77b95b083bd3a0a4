"""Convolutions in FP8 (E4M3): inputs have one scale, and weights one for each output channel.

On a GPU a Triton kernel computes the products of E4M3 numbers and sums them in fp32, on Hopper GPUs with the fewer bits
that their tensor cores keep. On a CPU the same numbers are convolved in fp32.
"""

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_builder.kernels.kernel_form import has_kernels
from engine_builder.kernels.rounding import rounds_inputs
from engine_builder.kernels.winograd import WinogradConv
from engine_builder.networks.onnx_form import is_for_onnx
from model.weights.fp8 import E4M3_MAX, quantize
from model.weights.transforms import restore_winograd

# Part of the key of every engine with a convolution in FP8. Raise it when the code of such a network changes.
CONV_VERSION = 3
MULTIPLE = 16  # of input and output channels
_SMALLEST_MAXIMUM = 1e-20  # of an output channel whose weights are zero


class QuantizedConv(nn.Module):
    """[batch, in, height, width] -> [batch, out, height, width] of the convolution's type.

    Takes that type, or E4M3 that is divided by `input_scale`. weight: E4M3 [out, in, kernel, kernel]. weight_scale:
    float32 [out]. input_scale: float32 scalar. A quantized number times its scale is the number that it stands for.
    bias: [out]. stride, padding: pixels, of both directions.
    """

    weight_scale: Tensor
    input_scale: Tensor

    def __init__(
        self, weight: Tensor, weight_scale: Tensor, input_scale: Tensor, bias: Tensor, stride: int, padding: int
    ) -> None:
        super().__init__()
        self.stride, self.padding, self.dtype = stride, padding, bias.dtype
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("input_scale", input_scale)
        self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, inputs: Tensor, entry_bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Convolve, and add `entry_bias` [batch, out] at every pixel and `residual` of the result's shape."""
        if is_for_onnx():
            from engine_builder.networks.onnx_operations import quantized_conv

            out: Tensor = quantized_conv(
                inputs, self.weight, self.input_scale, self.weight_scale, self.bias, self.stride, self.padding
            )
        elif has_kernels(inputs):
            return self._run_kernel(self.quantize_inputs(inputs), entry_bias, residual)
        else:
            rounded = self.quantize_inputs(inputs).float() if rounds_inputs() else inputs.float() / self.input_scale
            sums = F.conv2d(rounded, self.weight.float(), stride=self.stride, padding=self.padding)
            scaled = sums * (self.input_scale * self.weight_scale)[:, None, None]
            out = (scaled + self.bias.float()[:, None, None]).to(self.dtype)
        if entry_bias is not None:
            out = out + entry_bias[:, :, None, None]
        return out if residual is None else out + residual

    def _run_kernel(self, numbers: Tensor, entry_bias: Tensor | None, residual: Tensor | None) -> Tensor:
        from engine_builder.kernels.fp8_conv_kernels import fp8_conv

        # Nothing is copied if inputs and weights are channels_last.
        pixels, weight = (tensor.permute(0, 2, 3, 1).contiguous() for tensor in (numbers, self.weight))
        added = None if residual is None else residual.permute(0, 2, 3, 1).contiguous()
        out: Tensor = fp8_conv(
            pixels, weight, self.input_scale, self.weight_scale, self.bias, entry_bias, added, self.stride,
            self.padding, self.dtype,
        )  # fmt: skip
        return out.permute(0, 3, 1, 2)

    def upsample(self, inputs: Tensor) -> Tensor:
        """Return [batch, out / 4, 2 height, 2 width] on a GPU. This convolution is the `phases` of an upsampler."""
        from engine_builder.kernels.fp8_conv_kernels import fp8_upsample

        pixels, weight = (
            tensor.permute(0, 2, 3, 1).contiguous() for tensor in (self.quantize_inputs(inputs), self.weight)
        )
        out: Tensor = fp8_upsample(pixels, weight, self.input_scale, self.weight_scale, self.bias, self.dtype)
        return out.permute(0, 3, 1, 2)

    def quantize_inputs(self, inputs: Tensor) -> Tensor:
        """Return inputs as E4M3. Those that are E4M3 are returned as they are."""
        return inputs if inputs.dtype == torch.float8_e4m3fn else quantize(inputs, self.input_scale)


def quantize_conv(conv: nn.Conv2d | WinogradConv, input_clip: float) -> QuantizedConv:
    """Return a convolution in FP8. `input_clip`: the absolute input that is mapped to the largest number of E4M3."""
    weight = conv_weight(conv)
    assert conv.bias is not None
    weight_scale = weight.abs().amax((1, 2, 3)).float().clamp(min=_SMALLEST_MAXIMUM) / E4M3_MAX
    stride, padding = (1, 1) if isinstance(conv, WinogradConv) else (conv.stride[0], int(conv.padding[0]))
    return QuantizedConv(
        quantize(weight, weight_scale[:, None, None, None]),
        weight_scale,
        torch.tensor(input_clip / E4M3_MAX, dtype=torch.float32, device=weight.device),
        conv.bias.detach(),
        stride,
        padding,
    )


def conv_weight(conv: nn.Conv2d | WinogradConv) -> Tensor:
    """Return the weight of a convolution, [out, in, kernel, kernel]. That of Winograd's basis is restored."""
    weight = conv.weight.detach()
    if isinstance(conv, WinogradConv):
        return restore_winograd(weight).contiguous(memory_format=torch.channels_last)
    return weight


def can_quantize_conv(module: nn.Module) -> bool:
    """True for a convolution that suits the kernel, and whose weights are present and not all zero."""
    return suits_kernel(module) and bool(module.weight.any())


def suits_kernel(module: nn.Module) -> TypeGuard[nn.Conv2d | WinogradConv]:
    """True for a convolution of several pixels whose channels are multiples of 16, and that has weights and a bias."""
    if not isinstance(module, nn.Conv2d | WinogradConv) or module.weight is None or module.bias is None:
        return False
    if isinstance(module, nn.Conv2d):
        if isinstance(module.padding, str) or any(
            first != second for first, second in (module.kernel_size, module.stride, module.padding)
        ):
            return False
        if module.kernel_size[0] == 1 or module.padding_mode != "zeros":
            return False
        if set(module.dilation) != {1} or module.groups != 1:
            return False
    return not any(channels % MULTIPLE for channels in conv_channels(module))


def conv_channels(conv: nn.Conv2d | WinogradConv) -> tuple[int, int]:
    """Return the numbers of input and output channels."""
    out_channels, in_channels = conv.weight.shape[1:] if conv.weight.ndim == 3 else conv.weight.shape[:2]
    return int(in_channels), int(out_channels)


def has_quantized_convs(module: nn.Module) -> bool:
    """True if a network has a convolution in FP8."""
    return any(isinstance(child, QuantizedConv) for child in module.modules())
