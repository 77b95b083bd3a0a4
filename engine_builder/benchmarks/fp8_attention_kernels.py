"""Triton kernels of self-attention in FP8 (E4M3), of heads that are 64 wide. No engine has them.

Tensor cores of Hopper GPUs read both factors of an FP8 product along its inner dimension. That of the second product is
the keys, so values are stored transposed.
"""

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor, library
from triton.tools.tensor_descriptor import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    TensorDescriptor,
)

WIDTH = 64  # of a head
_QUANTIZE_TOKENS, _QUANTIZE_WARPS = 128, 4


@dataclass(frozen=True)
class AttentionTiles:
    """How the work is divided: queries of a program, keys that it reads at once.

    uses_tma: the tensor memory accelerator loads tiles, and not the threads.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    uses_tma: bool

    def __str__(self) -> str:
        return f"{self.queries}x{self.keys} w{self.warps} s{self.stages}{' tma' if self.uses_tma else ''}"


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _fp8_attention_kernel(  # type: ignore[no-untyped-def]
    queries, keys, values, scales, out, heads,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, USES_TMA: tl.constexpr,
):  # fmt: skip
    # One pass over the keys with a running maximum (Dao et al., "FlashAttention", 2022). Exponentials have base two.
    # E4M3 keeps the most bits of probabilities that are scaled to its range, up to 448 = 2^8.807. Their sum has the
    # same factor.
    program, pair = tl.program_id(0), tl.program_id(1)  # a pair of batch entry and head
    token, k = program * QUERIES + tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    key = tl.arange(0, KEYS)
    if USES_TMA:
        q = queries.load([pair * TOKENS + program * QUERIES, 0])
    else:
        q = tl.load(queries + (pair * TOKENS + token)[:, None] * WIDTH + k[None, :])
    scale = tl.load(scales) * tl.load(scales + 1) * (1.4426950408889634 / WIDTH**0.5)
    maximum = tl.full((QUERIES,), -float("inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, WIDTH), tl.float32)
    for start in range(0, TOKENS, KEYS):
        if USES_TMA:
            key_tile = keys.load([pair * TOKENS + start, 0])
            value_tile = values.load([pair * WIDTH, start])
        else:
            key_tile = tl.load(keys + (pair * TOKENS + start + key)[:, None] * WIDTH + k[None, :])
            value_tile = tl.load(values + (pair * WIDTH + k)[:, None] * TOKENS + start + key[None, :])
        scores = tl.dot(q, key_tile.T)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
        rescale = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(scores * scale - (new_maximum - 8.807354922057604)[:, None])
        total = total * rescale + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(value_tile.dtype), value_tile.T, mixed * rescale[:, None])
        maximum = new_maximum
    mixed *= (tl.load(scales + 2) / total)[:, None]
    entry, head = pair // heads, pair % heads
    at = out + (entry * TOKENS + token)[:, None] * (heads * WIDTH) + head * WIDTH + k[None, :]
    tl.store(at, mixed.to(out.dtype.element_ty))


def fp8_attention(
    queries: Tensor, keys: Tensor, values: Tensor, scales: Tensor, dtype: torch.dtype, tiles: AttentionTiles
) -> Tensor:
    """Return softmax(q k / 8) v, [batch, tokens, heads * 64], in `dtype`.

    queries, keys: E4M3 [batch, heads, tokens, 64]. values: E4M3 [batch, heads, 64, tokens]. All are contiguous. scales:
    float32 [3], by which queries, keys and values were divided. Tokens are a multiple of both sides of a tile. Fewer
    than 2^31 elements. Sums are in fp32, on Hopper GPUs with the fewer bits that their tensor cores keep.
    """
    batch, heads, tokens, _ = queries.shape
    assert not tokens % tiles.queries and not tokens % tiles.keys and queries.numel() < 2**31
    out = torch.empty(batch, tokens, heads * WIDTH, dtype=dtype, device=queries.device)
    pairs = batch * heads
    sources: tuple[object, ...] = (queries, keys, values)
    if tiles.uses_tma:
        sources = (
            TensorDescriptor.from_tensor(queries.view(pairs * tokens, WIDTH), [tiles.queries, WIDTH]),
            TensorDescriptor.from_tensor(keys.view(pairs * tokens, WIDTH), [tiles.keys, WIDTH]),
            TensorDescriptor.from_tensor(values.view(pairs * WIDTH, tokens), [WIDTH, tiles.keys]),
        )
    library.wrap_triton(_fp8_attention_kernel)[(tokens // tiles.queries, pairs)](
        *sources, scales, out, heads, TOKENS=tokens, WIDTH=WIDTH, QUERIES=tiles.queries, KEYS=tiles.keys,
        USES_TMA=tiles.uses_tma, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _quantize_kernel(  # type: ignore[no-untyped-def]
    fused, scales, queries, keys, values, heads,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    entry, head = pair // heads, pair % heads
    token, k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    source = fused + (entry * TOKENS + token)[:, None] * (3 * heads * WIDTH) + head * WIDTH + k[None, :]
    rows = (pair * TOKENS + token)[:, None] * WIDTH + k[None, :]
    columns = (pair * WIDTH + k)[:, None] * TOKENS + token[None, :]
    for part in tl.static_range(3):
        scaled = tl.load(source + part * heads * WIDTH).to(tl.float32) * (1.0 / tl.load(scales + part))
        numbers = tl.clamp(scaled, -448.0, 448.0).to(queries.dtype.element_ty)
        if part == 0:
            tl.store(queries + rows, numbers)
        elif part == 1:
            tl.store(keys + rows, numbers)
        else:
            tl.store(values + columns, numbers.T)


def quantize_for_attention(fused: Tensor, scales: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values as `fp8_attention` takes them.

    fused: [batch, tokens, 3 * heads * 64], contiguous. Tokens are a multiple of 128.
    """
    batch, tokens, _ = fused.shape
    assert not tokens % _QUANTIZE_TOKENS and fused.numel() < 2**31
    shapes = (batch, heads, tokens, WIDTH), (batch, heads, tokens, WIDTH), (batch, heads, WIDTH, tokens)
    queries, keys, values = (torch.empty(shape, dtype=torch.float8_e4m3fn, device=fused.device) for shape in shapes)
    library.wrap_triton(_quantize_kernel)[(tokens // _QUANTIZE_TOKENS, batch * heads)](
        fused, scales, queries, keys, values, heads, TOKENS=tokens, WIDTH=WIDTH, BLOCK=_QUANTIZE_TOKENS,
        num_warps=_QUANTIZE_WARPS,
    )  # fmt: skip
    return queries, keys, values
