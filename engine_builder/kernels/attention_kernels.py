"""Triton kernels that are faster than those the compiler generates. Imported only once a network is on a GPU.

They become part of the compiled engine. A server needs neither this module nor Triton.

Kernels take tensors and integers at run time. A fraction must be a tl.constexpr: the compiler passes Python floats as
doubles, and everything computed with a double is computed in fp64.
"""

import math

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor, library


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _scale_to_e4m3(values, scale):  # type: ignore[no-untyped-def]
    # Clipped to the largest numbers of E4M3. NaN stays NaN, so that a broken image is noticed.
    return tl.clamp(values / tl.load(scale), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)


def _empty_like_input(x: Tensor, shape: tuple[int, ...], out_scale: Tensor | None) -> Tensor:
    """Return memory for a result in the type of `x`, or in E4M3 if it is divided by a scale."""
    return torch.empty(shape, dtype=x.dtype if out_scale is None else torch.float8_e4m3fn, device=x.device)


# Cross-attention, as measured on an H200.
_TEXT_BLOCK, _TEXT_WARPS, _TEXT_STAGES = 64, 4, 2
_TEXT_PROGRAMS = 528  # with at least twice as many blocks of tokens, a program runs several


MAX_IMAGE_TOKENS = 64  # of an adapter; a program holds their keys, values and scores in registers


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _attend_kernel(  # type: ignore[no-untyped-def]
    queries, keys, values, image_keys, image_values, image_bias, out_scale, out,
    tokens, text_tokens, text_stride, image_stride, channels, heads,
    SCALE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TAIL: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr, ADAPTERS: tl.constexpr, IMAGE_TOKENS: tl.constexpr, IMAGE_BLOCK: tl.constexpr,
):  # fmt: skip
    # All keys fit into registers at once, so one softmax is enough. Keys and values are loaded once for several blocks
    # of tokens. They are loaded in two parts, of 64 and TAIL text tokens, because 77 is far from a power of two.
    entry, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    k = head * WIDTH + tl.arange(0, WIDTH)
    text, text_2 = tl.arange(0, 64), 64 + tl.arange(0, TAIL)
    start, start_2 = (entry * text_tokens + text) * text_stride, (entry * text_tokens + text_2) * text_stride
    key = tl.load(keys + start[None, :] + k[:, None], mask=(text < text_tokens)[None, :], other=0.0)
    value = tl.load(values + start[:, None] + k[None, :], mask=(text < text_tokens)[:, None], other=0.0)
    key_2 = tl.load(keys + start_2[None, :] + k[:, None], mask=(text_2 < text_tokens)[None, :], other=0.0)
    value_2 = tl.load(values + start_2[:, None] + k[None, :], mask=(text_2 < text_tokens)[:, None], other=0.0)
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        token = (tl.program_id(0) * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        offsets = (entry * tokens + token[:, None]) * channels + k[None, :]
        q = tl.load(queries + offsets, mask=(token < tokens)[:, None], other=0.0)
        scores = tl.where((text < text_tokens)[None, :], tl.dot(q, key) * SCALE, -float("inf"))
        scores_2 = tl.where((text_2 < text_tokens)[None, :], tl.dot(q, key_2) * SCALE, -float("inf"))
        maximum = tl.maximum(tl.max(scores, 1), tl.max(scores_2, 1))[:, None]
        weights, weights_2 = tl.exp2(scores - maximum), tl.exp2(scores_2 - maximum)
        mixed = tl.dot(weights_2.to(value.dtype), value_2, tl.dot(weights.to(value.dtype), value))
        mixed /= (tl.sum(weights, 1) + tl.sum(weights_2, 1))[:, None]
        if image_keys is not None:
            for adapter in tl.static_range(ADAPTERS):  # each has a softmax of its own
                image = tl.arange(0, IMAGE_BLOCK)
                of_adapter = (entry * ADAPTERS + adapter) * IMAGE_TOKENS + image
                start_3, mask_3 = of_adapter * image_stride, image < IMAGE_TOKENS
                key_3 = tl.load(image_keys + start_3[None, :] + k[:, None], mask=mask_3[None, :], other=0.0)
                value_3 = tl.load(image_values + start_3[:, None] + k[None, :], mask=mask_3[:, None], other=0.0)
                bias = tl.load(image_bias + of_adapter, mask=mask_3, other=-float("inf"))
                scores_3 = tl.dot(q, key_3) * SCALE + (bias * 1.4426950408889634)[None, :]  # log2(e)
                weights_3 = tl.exp2(scores_3 - tl.max(scores_3, 1)[:, None])
                mixed += tl.dot(weights_3.to(value.dtype), value_3) / tl.sum(weights_3, 1)[:, None]
        if out_scale is not None:
            mixed = _scale_to_e4m3(mixed, out_scale)
        tl.store(out + offsets, mixed.to(out.dtype.element_ty), mask=(token < tokens)[:, None])


@library.triton_op("preheat::attend_to_text", mutates_args={})
def attend_to_text(
    queries: Tensor, keys: Tensor, values: Tensor, heads: int, out_scale: Tensor | None,
    image_keys: Tensor | None = None, image_values: Tensor | None = None, image_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Cross-attention to a text of at most 128 tokens: softmax(q k / 8) v for each of `heads`, 64 wide each.

    queries: [batch, tokens, heads * 64], contiguous; keys and values: [batch, text_tokens, heads * 64], with any token
    stride and a batch stride of `text_tokens` token strides. Returns [batch, tokens, heads * 64], or the same divided
    by `out_scale` (float32 scalar) as E4M3.

    image_keys, image_values, image_bias: what `blocks.image_attention` takes, in the layout of keys and values. The
    attention to the images is added. The bias is contiguous, and an adapter has at most MAX_IMAGE_TOKENS tokens.
    """
    batch, tokens, channels = queries.shape
    text_tokens = keys.shape[1]
    adapters, image_tokens = (1, 1) if image_bias is None else image_bias.shape[1:]
    out = _empty_like_input(queries, (batch, tokens, channels), out_scale)
    token_blocks = -(-tokens // _TEXT_BLOCK)
    blocks = 1  # of tokens per program, which loads keys and values once for all of them
    while 2 * blocks <= min(token_blocks, 16) and token_blocks // (2 * blocks) * batch * heads >= _TEXT_PROGRAMS:
        blocks *= 2
    library.wrap_triton(_attend_kernel)[(-(-token_blocks // blocks), batch * heads)](
        queries, keys, values, image_keys, image_values, image_bias, out_scale, out,
        tokens, text_tokens, keys.stride(1), 0 if image_keys is None else image_keys.stride(1), channels, heads,
        SCALE=math.log2(math.e) / 8, BLOCK=_TEXT_BLOCK, BLOCKS=blocks, TAIL=16 if text_tokens <= 80 else 64, WIDTH=64,
        STAGES=_TEXT_STAGES, ADAPTERS=adapters, IMAGE_TOKENS=image_tokens,
        IMAGE_BLOCK=max(16, triton.next_power_of_2(image_tokens)), num_warps=_TEXT_WARPS, num_stages=_TEXT_STAGES,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _tanh(x):  # type: ignore[no-untyped-def]
    # The GPU's own tanh: one instruction instead of an exponential and a division. Its error is at most 2^-11
    # (NVIDIA's PTX ISA), half a step of fp16.
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_low_rank(  # type: ignore[no-untyped-def]
    total, narrow, up, up_stride, row, column, TOKENS: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr,
    PART_WIDTH: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_WIDTH: tl.constexpr,
):  # fmt: skip
    # The rows of a tile are of one entry of the batch, and its columns are of one part.
    part = column // PART_WIDTH
    rows, columns = row + tl.arange(0, TILE_ROWS), column % PART_WIDTH + tl.arange(0, TILE_WIDTH)
    of_entry = up + (row // TOKENS).to(tl.int64) * up_stride
    BLOCK: tl.constexpr = 32 if RANK % 32 == 0 else 16
    for first in tl.static_range(0, RANK, BLOCK):  # a large rank at once would take too much shared memory
        rank = part * RANK + first + tl.arange(0, BLOCK)
        narrow_tile = tl.load(narrow + rows[:, None] * (PARTS * RANK) + rank[None, :])
        total = tl.dot(narrow_tile, tl.load(of_entry + rank[:, None] * PART_WIDTH + columns[None, :]), total)
    return total


# The product with GEGLU, as measured on an H200.
_TILE_ROWS, _TILE_WIDTH, _TILE_DEPTH_BYTES = 128, 128, 128
_WARPS, _STAGES, _GROUP = 8, 3, 8


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _geglu_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, scale, out_scale, narrow, up, out, up_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, PROGRAMS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_WIDTH: tl.constexpr, TILE_DEPTH: tl.constexpr, GROUP: tl.constexpr,
    TOKENS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    x_tiles = tl.make_tensor_descriptor(x, [ROWS, INNER], [INNER, 1], [TILE_ROWS, TILE_DEPTH])
    weight_tiles = tl.make_tensor_descriptor(weight, [2 * WIDTH, INNER], [INNER, 1], [2 * TILE_WIDTH, TILE_DEPTH])
    out_tiles = tl.make_tensor_descriptor(out, [ROWS, WIDTH], [WIDTH, 1], [TILE_ROWS, TILE_WIDTH])
    # Elements of a tile beyond the tensors are read as zeros and not written.
    down: tl.constexpr = (ROWS + TILE_ROWS - 1) // TILE_ROWS
    across: tl.constexpr = WIDTH // TILE_WIDTH
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
        # Concurrent programs work on the same GROUP tiles of rows, so weights are read from the cache.
        first = tile // (GROUP * across) * GROUP
        size = tl.minimum(down - first, GROUP)
        row = (first + tile % (GROUP * across) % size) * TILE_ROWS
        column = tile % (GROUP * across) // size * TILE_WIDTH
        # A value and its gate are adjacent in one accumulator, in the same thread, so the split moves no data.
        both = tl.zeros((TILE_ROWS, 2 * TILE_WIDTH), tl.float32)
        for depth in range(0, INNER, TILE_DEPTH):
            both = tl.dot(x_tiles.load([row, depth]), weight_tiles.load([2 * column, depth]).T, both)
        if scale is not None:
            both *= tl.load(scale)
        if narrow is not None:
            both = _add_low_rank(
                both, narrow, up, up_stride, row, 2 * column, TOKENS, RANK, 1, 2 * WIDTH, TILE_ROWS, 2 * TILE_WIDTH
            )
        both += tl.load(bias + 2 * column + tl.arange(0, 2 * TILE_WIDTH))[None, :].to(tl.float32)
        values, gates = tl.split(tl.reshape(both, (TILE_ROWS, TILE_WIDTH, 2)))
        # The normal distribution as a logistic function of an odd polynomial. Apart from tanh's own error the result is
        # within 3e-6 of gelu.
        square = gates * gates
        slope = ((1.11908260e-06 * square - 3.05810267e-05) * square - 1.24861593e-04) * square + 3.64687906e-02
        half = 0.5 * values * gates
        gated = half + half * _tanh(gates * (slope * square + 0.797828101))
        if out_scale is not None:
            gated = _scale_to_e4m3(gated, out_scale)
        out_tiles.store([row, column], gated.to(out.dtype.element_ty))


@library.triton_op("preheat::geglu", mutates_args={})
def geglu(
    x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor | None, out_scale: Tensor | None,
    narrow: Tensor | None = None, up: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return values * gelu(gates), where values and gates alternate in scale * (x weight^T) + bias, in one kernel.

    x: [batch, tokens, inner], contiguous; weight: [2 * width, inner], both in half precision or both E4M3; bias:
    [2 * width] in half precision. width is a multiple of 128, inner of 64. scale: float32 scalar, or None for 1.
    Returns [batch, tokens, width] in the type of bias, or divided by `out_scale` (float32 scalar) as E4M3. For GPUs
    with tensor memory accelerators.

    narrow, up: as in `low_rank_linear`, for one part; their product is added to values and gates.
    """
    batch, tokens, inner = x.shape
    width = weight.shape[0] // 2
    out = _empty_like_input(bias, (batch, tokens, width), out_scale)
    tiles = -(-batch * tokens // _TILE_ROWS) * (width // _TILE_WIDTH)
    programs = min(torch.cuda.get_device_properties(x.device).multi_processor_count, tiles)
    # Triton allocates the descriptors' memory through this function; a compiled engine has its own.
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=x.device))
    library.wrap_triton(_geglu_kernel)[(programs,)](
        x, weight, bias, scale, out_scale, narrow, up, out, 0 if up is None else up.stride(0),
        ROWS=batch * tokens, WIDTH=width, INNER=inner, PROGRAMS=programs,
        TILE_ROWS=_TILE_ROWS, TILE_WIDTH=_TILE_WIDTH, TILE_DEPTH=_TILE_DEPTH_BYTES // x.element_size(), GROUP=_GROUP,
        TOKENS=tokens, RANK=0 if narrow is None else narrow.shape[2], num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _low_rank_linear_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, narrow, up, out, up_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, PROGRAMS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_WIDTH: tl.constexpr, TILE_DEPTH: tl.constexpr, GROUP: tl.constexpr,
    TOKENS: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    x_tiles = tl.make_tensor_descriptor(x, [ROWS, INNER], [INNER, 1], [TILE_ROWS, TILE_DEPTH])
    weight_tiles = tl.make_tensor_descriptor(weight, [WIDTH, INNER], [INNER, 1], [TILE_WIDTH, TILE_DEPTH])
    out_tiles = tl.make_tensor_descriptor(out, [ROWS, WIDTH], [WIDTH, 1], [TILE_ROWS, TILE_WIDTH // 2])
    down: tl.constexpr = ROWS // TILE_ROWS
    across: tl.constexpr = WIDTH // TILE_WIDTH
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
        first = tile // (GROUP * across) * GROUP  # the order of the tiles is that of `_geglu_kernel`
        size = tl.minimum(down - first, GROUP)
        row = (first + tile % (GROUP * across) % size) * TILE_ROWS
        column = tile % (GROUP * across) // size * TILE_WIDTH
        total = tl.zeros((TILE_ROWS, TILE_WIDTH), tl.float32)
        for depth in range(0, INNER, TILE_DEPTH):
            total = tl.dot(x_tiles.load([row, depth]), weight_tiles.load([column, depth]).T, total)
        total = _add_low_rank(
            total, narrow, up, up_stride, row, column, TOKENS, RANK, PARTS, WIDTH // PARTS, TILE_ROWS, TILE_WIDTH
        )
        if bias is not None:
            total += tl.load(bias + column + tl.arange(0, TILE_WIDTH))[None, :].to(tl.float32)
        # In halves, which take less shared memory.
        halves = tl.permute(tl.reshape(total.to(out.dtype.element_ty), (TILE_ROWS, 2, TILE_WIDTH // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        out_tiles.store([row, column], left)
        out_tiles.store([row, column + TILE_WIDTH // 2], right)


@library.triton_op("preheat::low_rank_linear", mutates_args={})
def low_rank_linear(x: Tensor, weight: Tensor, bias: Tensor | None, narrow: Tensor, up: Tensor, parts: int) -> Tensor:
    """Return x weight^T + bias + narrow up, with an `up` for each entry of the batch, in one kernel.

    x: [batch, tokens, inner], contiguous; weight: [width, inner]; bias: [width] or None. The outputs are `parts` equal
    parts, each with its own change: narrow [batch, tokens, parts * rank], contiguous; up [batch, ...], whose entries
    begin with [parts, rank, width / parts]. All are in half precision. tokens and width / parts are multiples of 128,
    inner of 64, rank of 16. Returns [batch, tokens, width]. For GPUs with tensor memory accelerators.
    """
    batch, tokens, inner = x.shape
    width = weight.shape[0]
    out = torch.empty(batch, tokens, width, dtype=x.dtype, device=x.device)
    tile_width = 2 * _TILE_WIDTH if width // parts % (2 * _TILE_WIDTH) == 0 else _TILE_WIDTH
    tiles = batch * tokens // _TILE_ROWS * (width // tile_width)
    programs = min(torch.cuda.get_device_properties(x.device).multi_processor_count, tiles)
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=x.device))
    library.wrap_triton(_low_rank_linear_kernel)[(programs,)](
        x, weight, bias, narrow, up, out, up.stride(0), ROWS=batch * tokens, WIDTH=width, INNER=inner,
        PROGRAMS=programs, TILE_ROWS=_TILE_ROWS, TILE_WIDTH=tile_width,
        TILE_DEPTH=_TILE_DEPTH_BYTES // x.element_size(), GROUP=_GROUP, TOKENS=tokens, RANK=narrow.shape[2] // parts,
        PARTS=parts, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _attend_self_kernel(  # type: ignore[no-untyped-def]
    fused, out_scale, out, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # One pass over the keys with a running maximum (Dao et al., "FlashAttention", 2022). Exponentials have base two.
    heads: tl.constexpr = CHANNELS // WIDTH
    entry, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    token = entry * TOKENS + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key, k = entry * TOKENS + tl.arange(0, KEYS), head * WIDTH + tl.arange(0, WIDTH)
    q = tl.load(fused + token[:, None] * (3 * CHANNELS) + k[None, :])
    keys = fused + CHANNELS + key[None, :] * (3 * CHANNELS) + k[:, None]
    values = fused + 2 * CHANNELS + key[:, None] * (3 * CHANNELS) + k[None, :]
    maximum = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    mixed = tl.zeros((BLOCK, WIDTH), tl.float32)
    for _ in range(0, TOKENS, KEYS):
        scores = tl.dot(q, tl.load(keys))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * SCALE)
        rescale = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(scores * SCALE - new_maximum[:, None])
        total = total * rescale + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(q.dtype), tl.load(values), mixed * rescale[:, None])
        maximum = new_maximum
        keys += KEYS * 3 * CHANNELS
        values += KEYS * 3 * CHANNELS
    mixed /= total[:, None]
    if out_scale is not None:
        mixed = _scale_to_e4m3(mixed, out_scale)
    tl.store(out + token[:, None] * CHANNELS + k[None, :], mixed.to(out.dtype.element_ty))


@library.triton_op("preheat::attend_to_itself", mutates_args={})
def attend_to_itself(fused: Tensor, heads: int, out_scale: Tensor | None) -> Tensor:
    """Self-attention: softmax(q k / 8) v for each of `heads`, 64 wide each.

    fused: concatenated queries, keys and values, [batch, tokens, 3 * heads * 64], contiguous; tokens are a multiple of
    128. Returns [batch, tokens, heads * 64], or the same divided by `out_scale` (float32 scalar) as E4M3.
    """
    batch, tokens, channels = fused.shape[0], fused.shape[1], fused.shape[2] // 3
    out = _empty_like_input(fused, (batch, tokens, channels), out_scale)
    block, keys, warps, stages = 64, 128, 4, 2  # as measured on an H200
    library.wrap_triton(_attend_self_kernel)[(tokens // block, batch * heads)](
        fused, out_scale, out, TOKENS=tokens, CHANNELS=channels, WIDTH=64, SCALE=math.log2(math.e) / 8,
        BLOCK=block, KEYS=keys, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
