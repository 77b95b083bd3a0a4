"""ONNX forms of PyTorch's operators where the exporter's own are not those that TensorRT fuses.

Opset 23 has one operator for each of them. Opset 17 has not, so there they are composed: attention as two products with
a softmax between them, group norm as an instance norm of the groups, and GELU with the error function. TensorRT 8.6
recognizes these forms.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset18, opset23

from engine_builder.backends.onnx.opsets import OPSET
from engine_builder.networks import onnx_operations

_FUSED_HEAD_SIZES = range(16, 257, 8)  # of TensorRT's fused kernels, which are for half precision only
_EXPORTERS_OLDEST = 18  # the oldest that the exporter writes


def exporter_opset(opset: int) -> int:
    """Return the opset to request from the exporter for a graph in `opset`. `lower` makes up for the difference."""
    return max(opset, _EXPORTERS_OLDEST)


def translations(opset: int) -> dict[Any, Callable[..., Any]]:
    """Return the exporter's `custom_translation_table` for an opset."""
    aten, preheat = torch.ops.aten, getattr(torch.ops, onnx_operations.NAMESPACE)
    own: dict[Any, Callable[..., Any]] = {
        preheat.interleave_phases.default: _interleave_phases,
        preheat.reshape_like.default: _reshape_like,
    }
    if opset == OPSET:
        return own | {aten.scaled_dot_product_attention.default: _attention}
    return own | {
        aten.scaled_dot_product_attention.default: _composed_attention,
        aten.group_norm.default: _composed_group_norm,
        aten.gelu.default: _composed_gelu,
    }


def _interleave_phases(phases: Any) -> Any:
    out, end = phases.shape[1] // 4, np.iinfo(np.int64).max
    axes = _integers(1, 2, 3)
    windows = [
        opset18.Slice(phases, _integers(i * out, i // 2, i % 2), _integers((i + 1) * out, *ends), axes)
        for i, ends in enumerate(((-1, -1), (-1, end), (end, -1), (end, end)))
    ]
    return opset18.DepthToSpace(opset18.Concat(*windows, axis=1), blocksize=2, mode="DCR")


def _reshape_like(tensor: Any, other: Any) -> Any:
    return opset18.Reshape(tensor, opset18.Shape(other))


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Attention as one node where TensorRT has a kernel for it; its parser refuses to compose such a node.

    With an explicit scale the parser does not compute it from the head size.
    """
    assert attn_mask is None and dropout_p == 0.0 and not enable_gqa
    size = query.shape[-1]
    if query.dtype != ir.DataType.FLOAT16 or size not in _FUSED_HEAD_SIZES:
        return _composed_attention(query, key, value, is_causal=is_causal, scale=scale)
    scale = size**-0.5 if scale is None else scale
    return opset23.Attention(query, key, value, scale=scale, is_causal=int(is_causal))[0]


def _composed_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """softmax(scale * query @ key.T + mask) @ value, of [batch, heads, tokens, head size].

    TensorRT asks for the scale before the first product. There it also keeps the product in fp16's range.
    """
    assert attn_mask is None and dropout_p == 0.0 and not enable_gqa
    scaled = opset18.Mul(query, _constant(query.shape[-1] ** -0.5 if scale is None else scale, query.dtype))
    scores = opset18.MatMul(scaled, opset18.Transpose(key, perm=[0, 1, 3, 2]))
    if is_causal:
        mask = np.triu(np.full((query.shape[2], key.shape[2]), -np.inf), 1)
        scores = opset18.Add(scores, _constant(mask, query.dtype))
    return opset18.MatMul(opset18.Softmax(scores, axis=-1), value)


def _composed_group_norm(
    hidden: Any, num_groups: int, weight: Any, bias: Any, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Any:
    """Normalize each group of [batch, channels, height, width] as an instance, then scale and shift each channel.

    Batch and width keep their places in both reshapes, so that their shapes are constants.
    """
    groups = opset18.Reshape(hidden, _integers(0, num_groups, -1, 0))
    normed = opset18.InstanceNormalization(
        groups, _constant(np.ones(num_groups), hidden.dtype), _constant(np.zeros(num_groups), hidden.dtype), epsilon=eps
    )
    channels = opset18.Reshape(normed, _integers(0, hidden.shape[1], -1, 0))
    axes = _integers(1, 2)
    scaled = opset18.Mul(channels, opset18.Unsqueeze(weight, axes))
    return opset18.Add(scaled, opset18.Unsqueeze(bias, axes))


def _composed_gelu(hidden: Any, approximate: str = "none") -> Any:
    """hidden * (1 + erf(hidden / sqrt(2))) / 2."""
    assert approximate == "none"
    erf = opset18.Erf(opset18.Div(hidden, _constant(math.sqrt(2), hidden.dtype)))
    return opset18.Mul(opset18.Mul(hidden, opset18.Add(erf, _constant(1, hidden.dtype))), _constant(0.5, hidden.dtype))


def _integers(*values: int) -> Any:
    return _constant(values, ir.DataType.INT64)


def _constant(value: Any, dtype: ir.DataType) -> Any:
    tensor: Any = ir.tensor(np.asarray(value, dtype.numpy()))  # onnxscript's stubs name another class
    return opset18.Constant(value=tensor)
