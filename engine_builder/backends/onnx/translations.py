"""ONNX forms of PyTorch's operators, where the exporter's own are not those that TensorRT turns into fast kernels.

The forms were chosen by the kernels in plans of TensorRT-RTX; docs/log/builds.md has the counts. All of them have
constant shapes. Group norm and GELU are one node each in the default opset. Opset 17 lacks both nodes. There they are
composed of operators that TensorRT recognizes.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from onnxscript import opset21 as op21

from engine_builder.backends.onnx.opsets import OLD_OPSET
from engine_builder.networks import onnx_operations

_EXPORTERS_OLDEST = 18  # the oldest opset that the exporter writes


def exporter_opset(opset: int) -> int:
    """Return the opset to request from the exporter for a graph in `opset`, see `rewrites.lower`."""
    return max(opset, _EXPORTERS_OLDEST)


def translations(opset: int) -> dict[Any, Callable[..., Any]]:
    """Return the exporter's `custom_translation_table` for an opset."""
    aten, own = torch.ops.aten, getattr(torch.ops, onnx_operations.NAMESPACE)
    table: dict[Any, Callable[..., Any]] = {
        aten.scaled_dot_product_attention.default: _attention,
        aten.unbind.int: _unbind,
        own.interleave_phases.default: _interleave_phases,
        own.reshape_like.default: _reshape_like,
        own.quantized_linear.default: _quantized_linear,
        own.quantized_conv.default: _quantized_conv,
    }
    if opset == OLD_OPSET:
        table |= {aten.group_norm.default: _group_norm, aten.gelu.default: _gelu}
    return table


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """softmax(scale * query @ key.T + mask) @ value, of [batch, heads, tokens, head size].

    TensorRT-RTX fuses this into one kernel for the UNet's heads of 64. It asks for the scale before the first product,
    which also keeps the product in fp16's range. ONNX's Attention node gives the same kernel, but its neighbours are
    fused less, and it fails for fp32 and for the VAE's head of 512.
    """
    assert attn_mask is None and dropout_p == 0.0 and not enable_gqa
    scaled = op.Mul(query, _constant(query.shape[-1] ** -0.5 if scale is None else scale, query.dtype))
    scores = op.MatMul(scaled, op.Transpose(key, perm=[0, 1, 3, 2]))
    if is_causal:
        mask = np.triu(np.full((query.shape[2], key.shape[2]), -np.inf), 1)
        scores = op.Add(scores, _constant(mask, query.dtype))
    return op.MatMul(op.Softmax(scores, axis=-1), value)


def _unbind(tensor: Any, dim: int = 0) -> list[Any]:
    return [op.Gather(tensor, _constant(index, ir.DataType.INT64), axis=dim) for index in range(tensor.shape[dim])]


def _interleave_phases(phases: Any) -> Any:
    """Interleave rows, then columns, each time as the last but one dimension, so that the others keep their places.

    The result is a transposed [batch, 2 * height, 2 * width, out]. After DepthToSpace, TensorRT does not recognize the
    group norm that follows.
    """
    out, end = phases.shape[1] // 4, np.iinfo(np.int64).max
    axes = _integers(1, 2, 3)
    windows = [
        op.Slice(phases, _integers(i * out, i // 2, i % 2), _integers((i + 1) * out, *ends), axes)
        for i, ends in enumerate(((-1, -1), (-1, end), (end, -1), (end, end)))
    ]
    columns = op.Transpose(op.Concat(*windows, axis=1), perm=[0, 3, 2, 1])  # [batch, width, height, 2 * 2 * out]
    columns = op.Reshape(columns, _integers(0, 0, -1, 2 * out))  # [batch, width, 2 * height, 2 * out]
    rows = op.Transpose(columns, perm=[0, 2, 1, 3])
    return op.Transpose(op.Reshape(rows, _integers(0, 0, -1, out)), perm=[0, 3, 1, 2])


def _reshape_like(tensor: Any, other: Any) -> Any:
    return op.Reshape(tensor, op.Shape(other))


def _quantized_linear(inputs: Any, weight: Any, input_scale: Any, weight_scale: Any, bias: Any = None) -> Any:
    """Quantize and dequantize both factors, and multiply in fp32: [..., in] -> [..., out].

    TensorRT-RTX makes of this a product of 8-bit numbers, without the casts. Scales in fp16 would round small ones.
    """
    e4m3 = ir.DataType.FLOAT8E4M3FN
    quantized = op21.QuantizeLinear(op21.Cast(inputs, to=ir.DataType.FLOAT), input_scale, output_dtype=e4m3)
    rounded = op21.DequantizeLinear(quantized, input_scale)
    product = op21.MatMul(rounded, op21.Transpose(op21.DequantizeLinear(weight, weight_scale), perm=[1, 0]))
    if bias is not None:
        product = op21.Add(product, op21.Cast(bias, to=ir.DataType.FLOAT))
    return op21.Cast(product, to=inputs.dtype)


def _quantized_conv(
    inputs: Any, weight: Any, input_scale: Any, weight_scale: Any, bias: Any, stride: int, padding: int
) -> Any:
    """Quantize and dequantize both factors, and convolve in fp32: [batch, in, height, width]."""
    e4m3 = ir.DataType.FLOAT8E4M3FN
    quantized = op21.QuantizeLinear(op21.Cast(inputs, to=ir.DataType.FLOAT), input_scale, output_dtype=e4m3)
    rounded = op21.DequantizeLinear(quantized, input_scale)
    factor, added = op21.DequantizeLinear(weight, weight_scale, axis=0), op21.Cast(bias, to=ir.DataType.FLOAT)
    result = op21.Conv(rounded, factor, added, strides=[stride] * 2, pads=[padding] * 4)
    return op21.Cast(result, to=inputs.dtype)


def _group_norm(
    hidden: Any, num_groups: int, weight: Any, bias: Any, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Any:
    """Normalize each group of [batch, channels, height, width] as an instance, then scale and shift each channel.

    Batch and width keep their places in both reshapes, so that their shapes are constants.
    """
    groups = op.Reshape(hidden, _integers(0, num_groups, -1, 0))
    ones, zeros = (_constant(np.full(num_groups, value), hidden.dtype) for value in (1, 0))
    normed = op.InstanceNormalization(groups, ones, zeros, epsilon=eps)
    channels = op.Reshape(normed, _integers(0, hidden.shape[1], -1, 0))
    axes = _integers(1, 2)
    return op.Add(op.Mul(channels, op.Unsqueeze(weight, axes)), op.Unsqueeze(bias, axes))


def _gelu(hidden: Any, approximate: str = "none") -> Any:
    """hidden * (1 + erf(hidden / sqrt(2))) / 2."""
    assert approximate == "none"
    erf = op.Erf(op.Div(hidden, _constant(math.sqrt(2), hidden.dtype)))
    return op.Mul(op.Mul(hidden, op.Add(erf, _constant(1, hidden.dtype))), _constant(0.5, hidden.dtype))


def _integers(*values: int) -> Any:
    return _constant(values, ir.DataType.INT64)


def _constant(value: Any, dtype: ir.DataType) -> Any:
    tensor: Any = ir.tensor(np.asarray(value, dtype.numpy()))  # onnxscript's stubs name another class
    return op.Constant(value=tensor)
