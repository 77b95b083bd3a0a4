"""Triton kernels for what the compiler cannot fuse by itself. For GPUs only: imported where a network lies on one.

They become part of the compiled engine; a server needs neither this module nor Triton.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from torch.library import triton_op, wrap_triton


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _erf(x):  # type: ignore[no-untyped-def]
    """Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: at most 1.5e-7 off, a third of the work of
    the exact one."""
    t = 1.0 / (1.0 + 0.3275911 * tl.abs(x))
    p = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    e = 1.0 - p * tl.exp(-x * x)
    return tl.where(x < 0, -e, e)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _geglu_kernel(  # type: ignore[no-untyped-def]
    hidden, weight, bias, out, rows, columns, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Tiles in groups of GROUP rows of tiles, so that neighbours in time share what they read.
    tile = tl.program_id(0)
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    group = tile // (GROUP * across)
    height = min(down - group * GROUP, GROUP)
    y = group * GROUP + (tile % (GROUP * across)) % height
    x = (tile % (GROUP * across)) // height
    row = y * ROWS + tl.arange(0, ROWS)
    column = x * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, WIDTH)
    hidden += (row % rows)[:, None] * width + k[None, :]
    weight += column[None, :] * width + k[:, None]
    gate_weight = weight + columns * width
    widened = tl.zeros((ROWS, COLUMNS), tl.float32)
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(0, width, WIDTH):
        tokens = tl.load(hidden)
        widened = tl.dot(tokens, tl.load(weight), widened)
        gate = tl.dot(tokens, tl.load(gate_weight), gate)
        hidden += WIDTH
        weight += WIDTH
        gate_weight += WIDTH
    widened += tl.load(bias + column)[None, :].to(tl.float32)
    gate += tl.load(bias + columns + column)[None, :].to(tl.float32)
    gated = widened * (0.5 * gate * (1.0 + _erf(gate * 0.7071067811865476)))
    place = out + row[:, None] * columns + column[None, :]
    tl.store(place, gated.to(out.dtype.element_ty), mask=(row < rows)[:, None])


_TILE = {"ROWS": 128, "COLUMNS": 128, "WIDTH": 64, "GROUP": 8}


@triton_op("preheat::geglu", mutates_args={})
def geglu(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GEGLU in one product: widened * gelu(gate) of [widened, gate] = hidden @ weight.T + bias.

    hidden: [..., width], contiguous; weight: [2 * columns, width]; bias: [2 * columns]; width a multiple of 64 and
    columns of 128. Returns [..., columns]. (Shazeer, "GLU Variants Improve Transformer", 2020.)
    """
    width, columns = hidden.shape[-1], weight.shape[0] // 2
    rows = hidden.numel() // width
    out = hidden.new_empty([*hidden.shape[:-1], columns])
    tiles = -(-rows // _TILE["ROWS"]) * (columns // _TILE["COLUMNS"])
    wrap_triton(_geglu_kernel)[(tiles,)](
        hidden, weight, bias, out, rows, columns, width, **_TILE, num_warps=8, num_stages=3
    )
    return out


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _attend_kernel(  # type: ignore[no-untyped-def]
    queries, keys, values, out, tokens, texts, text_stride, channels, heads, scale,
    TOKENS: tl.constexpr, TEXTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    # All keys fit beside each other: one product, one softmax, one product, and nothing to carry along.
    row, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    text, k = tl.arange(0, TEXTS), tl.arange(0, WIDTH)
    place = (row * tokens + token[:, None]) * channels + head * WIDTH + k[None, :]
    told = (row * texts + text) * text_stride + head * WIDTH
    q = tl.load(queries + place, mask=(token < tokens)[:, None], other=0.0)
    key = tl.load(keys + told[None, :] + k[:, None], mask=(text < texts)[None, :], other=0.0)
    value = tl.load(values + told[:, None] + k[None, :], mask=(text < texts)[:, None], other=0.0)
    scores = tl.where((text < texts)[None, :], tl.dot(q, key) * scale, -float("inf"))
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    mixed = tl.dot(weights.to(value.dtype), value) / tl.sum(weights, 1)[:, None]
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=(token < tokens)[:, None])


@triton_op("preheat::attend_to_text", mutates_args={})
def attend_to_text(queries: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """Cross-attention to a text of at most 128 tokens: softmax(q k / sqrt(width)) v for each of `heads`.

    queries: [rows, tokens, heads * 64], contiguous; keys and values: [rows, texts, heads * 64] with any stride of
    their rows and tokens as long as one follows from the other. Returns [rows, tokens, heads * 64].
    """
    rows, tokens, channels = queries.shape
    texts = keys.shape[1]
    out = torch.empty_like(queries)
    block = 128
    wrap_triton(_attend_kernel)[(-(-tokens // block), rows * heads)](
        queries, keys, values, out, tokens, texts, keys.stride(1), channels, heads, (channels // heads) ** -0.5,
        TOKENS=block, TEXTS=128, WIDTH=64, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out
