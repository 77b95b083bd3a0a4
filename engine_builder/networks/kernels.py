"""Triton kernels, where one of our own is faster than what the compiler finds. For GPUs only: imported where a network
lies on one.

They become part of the compiled engine; a server needs neither this module nor Triton.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor, library


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


@library.triton_op("preheat::attend_to_text", mutates_args={})
def attend_to_text(queries: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """Cross-attention to a text of at most 128 tokens: softmax(q k / sqrt(width)) v for each of `heads`.

    queries: [rows, tokens, heads * 64], contiguous; keys and values: [rows, texts, heads * 64] with any stride of
    their rows and tokens as long as one follows from the other. Returns [rows, tokens, heads * 64].
    """
    rows, tokens, channels = queries.shape
    texts = keys.shape[1]
    out = torch.empty_like(queries)
    block = 64 if rows * tokens <= 4096 else 128  # as measured on an H200
    library.wrap_triton(_attend_kernel)[(-(-tokens // block), rows * heads)](
        queries, keys, values, out, tokens, texts, keys.stride(1), channels, heads, (channels // heads) ** -0.5,
        TOKENS=block, TEXTS=128, WIDTH=64, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out
