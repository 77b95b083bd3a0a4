"""Operations that ONNX has and PyTorch lacks, for networks that are traced for an ONNX graph.

`engine_builder.backends.onnx.translations` has the ONNX operator of each.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, library

from model.weights.fp8 import quantize

NAMESPACE = "preheat"  # of the operators in torch.ops


@library.custom_op(f"{NAMESPACE}::interleave_phases", mutates_args=())
def interleave_phases(phases: Tensor) -> Tensor:
    """Return [batch, out, 2 * height, 2 * width] of the four phases [batch, 4 * out, height + 1, width + 1].

    This is the second half of `blocks.upsample`.
    """
    even, odd = slice(None, -1), slice(1, None)
    parts = zip(phases.chunk(4, 1), ((even, even), (even, odd), (odd, even), (odd, odd)), strict=True)
    windows = torch.stack([phase[:, :, rows, columns] for phase, (rows, columns) in parts], 2)
    return torch.pixel_shuffle(windows.flatten(1, 2), 2)


@interleave_phases.register_fake
def _(phases: Tensor) -> Tensor:
    batch, channels, height, width = phases.shape
    return phases.new_empty(batch, channels // 4, 2 * (height - 1), 2 * (width - 1))


@library.custom_op(f"{NAMESPACE}::reshape_like", mutates_args=())
def reshape_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return `tensor` in the shape of `other`. In ONNX the shape is one node, however many sizes are dynamic."""
    return tensor.reshape(other.shape).clone()


@reshape_like.register_fake
def _(tensor: Tensor, other: Tensor) -> Tensor:
    return tensor.new_empty(other.shape)


@library.custom_op(f"{NAMESPACE}::quantized_linear", mutates_args=())
def quantized_linear(
    inputs: Tensor, weight: Tensor, input_scale: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Return the product of `engine_builder.kernels.fp8_linear.QuantizedLinear`: [..., in] -> [..., out].

    inputs: [..., in], of the result's type. weight: E4M3 [out, in]. Scales: float32 scalars. bias: [out], or None.
    """
    rounded = quantize(inputs, input_scale).float() * input_scale
    product = rounded @ (weight.float() * weight_scale).t()
    return (product if bias is None else product + bias.float()).to(inputs.dtype)


@quantized_linear.register_fake
def _(inputs: Tensor, weight: Tensor, input_scale: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    return inputs.new_empty(*inputs.shape[:-1], weight.shape[0])


@library.custom_op(f"{NAMESPACE}::quantized_conv", mutates_args=())
def quantized_conv(
    inputs: Tensor, weight: Tensor, input_scale: Tensor, weight_scale: Tensor, bias: Tensor, stride: int, padding: int
) -> Tensor:
    """Return the result of `engine_builder.kernels.fp8_conv.QuantizedConv`: [batch, in, height, width] -> [batch, out,
    height, width].

    inputs: of the result's type. weight: E4M3 [out, in, kernel, kernel]. input_scale: float32 scalar. weight_scale:
    float32 [out]. bias: [out]. stride, padding: pixels.
    """
    rounded = quantize(inputs, input_scale).float() * input_scale
    factor = weight.float() * weight_scale[:, None, None, None]
    return F.conv2d(rounded, factor, bias.float(), stride, padding).to(inputs.dtype)


@quantized_conv.register_fake
def _(
    inputs: Tensor, weight: Tensor, input_scale: Tensor, weight_scale: Tensor, bias: Tensor, stride: int, padding: int
) -> Tensor:
    sizes = ((size + 2 * padding - weight.shape[2]) // stride + 1 for size in inputs.shape[2:])
    return inputs.new_empty(inputs.shape[0], weight.shape[0], *sizes)
