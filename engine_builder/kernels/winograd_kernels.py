"""Triton kernels for the two transforms of `winograd`, fused with the operations before and after a convolution.

They are for GPUs only and become part of the compiled engine, like those of `kernels`.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor, library

# As measured on an H200.
_TILES, _TILES_WARPS = 4, 4  # tiles and warps of one program
_TILES_CHANNELS = 128  # of one program, if it divides the channels; otherwise half as many, with twice the tiles


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _winograd_tile_positions(  # type: ignore[no-untyped-def]
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    # Returns the program's tiles, the mask of existing ones, the program's channels, and each tile's batch entry. Then
    # the y and x of each tile's first pixel.
    down: tl.constexpr = (HEIGHT + 1) // 2
    across: tl.constexpr = (WIDTH + 1) // 2
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    return tile, tile < TILES, channel, tile // (down * across), tile // across % down * 2, tile % across * 2


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _normed_silu(  # type: ignore[no-untyped-def]
    hidden, rows, scale, shift, entry, y, x, exists, channel,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    # Returns silu(norm) of one pixel of each tile. The convolution pads after the norm, so its border is zero. The rows
    # above and below come from `rows`, unless ENTRIES, the batch of `rows`, is 0.
    inside = (exists & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH))[:, None]
    offsets = ((entry * HEIGHT + y) * WIDTH + x)[:, None] * CHANNELS + channel[None, :]
    normed = tl.load(hidden + offsets, inside, 0.0).to(tl.float32) * scale + shift
    activated = tl.where(inside, normed / (1.0 + tl.exp2(normed * -1.4426950408889634)), 0.0)
    if ENTRIES:
        outside = (exists & ((y == -1) | (y == HEIGHT)) & (x >= 0) & (x < WIDTH))[:, None]
        row = tl.where(y < 0, entry, ENTRIES + entry)
        offsets = (row * WIDTH + x)[:, None] * CHANNELS + channel[None, :]
        activated += tl.load(rows + offsets, outside, 0.0).to(tl.float32)
    return activated


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _winograd_column(  # type: ignore[no-untyped-def]
    hidden, rows, scale, shift, entry, top, x, exists, channel,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    # Returns a column of B^T pixels.
    first = _normed_silu(hidden, rows, scale, shift, entry, top, x, exists, channel, HEIGHT, WIDTH, CHANNELS, ENTRIES)
    second = _normed_silu(
        hidden, rows, scale, shift, entry, top + 1, x, exists, channel, HEIGHT, WIDTH, CHANNELS, ENTRIES
    )
    third = _normed_silu(
        hidden, rows, scale, shift, entry, top + 2, x, exists, channel, HEIGHT, WIDTH, CHANNELS, ENTRIES
    )
    fourth = _normed_silu(
        hidden, rows, scale, shift, entry, top + 3, x, exists, channel, HEIGHT, WIDTH, CHANNELS, ENTRIES
    )
    return first - third, second + third, third - second, second - fourth


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _winograd_tiles_kernel(  # type: ignore[no-untyped-def]
    hidden, mean, deviation, weight, bias, rows, out,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr,
    ENTRIES: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    plane: tl.constexpr = TILES * CHANNELS
    tile, exists, channel, entry, y, x = _winograd_tile_positions(HEIGHT, WIDTH, TILES, BLOCK, SLICE)
    top, left = y - 1, x - 1  # of the 4x4 pixels
    group = entry[:, None] * GROUPS + (channel // (CHANNELS // GROUPS))[None, :]
    scale = tl.load(weight + channel).to(tl.float32)[None, :] / tl.load(deviation + group, exists[:, None], 1.0)
    shift = tl.load(bias + channel).to(tl.float32)[None, :] - tl.load(mean + group, exists[:, None], 0.0) * scale
    first = _winograd_column(
        hidden, rows, scale, shift, entry, top, left, exists, channel, HEIGHT, WIDTH, CHANNELS, ENTRIES
    )
    second = _winograd_column(
        hidden, rows, scale, shift, entry, top, left + 1, exists, channel, HEIGHT, WIDTH, CHANNELS, ENTRIES
    )
    third = _winograd_column(
        hidden, rows, scale, shift, entry, top, left + 2, exists, channel, HEIGHT, WIDTH, CHANNELS, ENTRIES
    )
    fourth = _winograd_column(
        hidden, rows, scale, shift, entry, top, left + 3, exists, channel, HEIGHT, WIDTH, CHANNELS, ENTRIES
    )
    for i in tl.static_range(4):
        row = out + 4 * i * plane + tile[:, None] * CHANNELS + channel[None, :]
        tl.store(row, (first[i] - third[i]).to(out.dtype.element_ty), exists[:, None])
        tl.store(row + plane, (second[i] + third[i]).to(out.dtype.element_ty), exists[:, None])
        tl.store(row + 2 * plane, (third[i] - second[i]).to(out.dtype.element_ty), exists[:, None])
        tl.store(row + 3 * plane, (second[i] - fourth[i]).to(out.dtype.element_ty), exists[:, None])


@library.triton_op("preheat::winograd_tiles", mutates_args={})
def winograd_tiles(
    hidden: Tensor, mean: Tensor, deviation: Tensor, weight: Tensor, bias: Tensor, rows: Tensor | None
) -> Tensor:
    """Return silu(group norm of hidden) in tiles, in the basis of `winograd`: B^T pixels B.

    hidden: [batch, height, width, channels], contiguous; mean and deviation: [batch, groups], fp32, contiguous; weight
    and bias of the norm: [channels]. rows: the results of the norm and SiLU above and below `hidden`, [2, batch, width,
    channels], contiguous; None: zeros. channels is a multiple of 64. Returns [16, batch * tiles, channels], with
    ceil(height / 2) * ceil(width / 2) tiles.
    """
    batch, height, width, channels = hidden.shape
    tiles = batch * ((height + 1) // 2) * ((width + 1) // 2)
    out = hidden.new_empty(16, tiles, channels)
    block, slice_channels = _winograd_block(channels)
    library.wrap_triton(_winograd_tiles_kernel)[(-(-tiles // block), channels // slice_channels)](
        hidden, mean, deviation, weight, bias, hidden if rows is None else rows, out, HEIGHT=height, WIDTH=width,
        CHANNELS=channels, GROUPS=mean.shape[1], TILES=tiles, ENTRIES=0 if rows is None else batch, BLOCK=block,
        SLICE=slice_channels, num_warps=_TILES_WARPS,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _winograd_row(products, exists, PLANE: tl.constexpr):  # type: ignore[no-untyped-def]
    # Returns a row of products A: the terms of the left pixels and of the right pixels.
    first = tl.load(products, exists[:, None], 0.0).to(tl.float32)
    second = tl.load(products + PLANE, exists[:, None], 0.0).to(tl.float32)
    third = tl.load(products + 2 * PLANE, exists[:, None], 0.0).to(tl.float32)
    fourth = tl.load(products + 3 * PLANE, exists[:, None], 0.0).to(tl.float32)
    return first + second + third, second - third - fourth


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _winograd_pixels_kernel(  # type: ignore[no-untyped-def]
    products, bias, time_bias, residual, out, time_stride,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, TILES: tl.constexpr, TIME_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    plane: tl.constexpr = TILES * CHANNELS
    tile, exists, channel, entry, top, left = _winograd_tile_positions(HEIGHT, WIDTH, TILES, BLOCK, SLICE)
    added = tl.load(bias + channel).to(tl.float32)[None, :]
    if TIME_BIAS:
        at = time_bias + entry[:, None] * time_stride + channel[None, :]
        added += tl.load(at, exists[:, None], 0.0).to(tl.float32)
    corner = products + tile[:, None] * CHANNELS + channel[None, :]
    first, second = _winograd_row(corner, exists, plane), _winograd_row(corner + 4 * plane, exists, plane)
    third, fourth = _winograd_row(corner + 8 * plane, exists, plane), _winograd_row(corner + 12 * plane, exists, plane)
    for i in tl.static_range(4):
        y, x = top + i // 2, left + i % 2
        if i // 2 == 0:
            pixel = first[i % 2] + second[i % 2] + third[i % 2] + added
        else:
            pixel = second[i % 2] - third[i % 2] - fourth[i % 2] + added
        inside = (exists & (y < HEIGHT) & (x < WIDTH))[:, None]
        offsets = ((entry * HEIGHT + y) * WIDTH + x)[:, None] * CHANNELS + channel[None, :]
        if RESIDUAL:
            pixel += tl.load(residual + offsets, inside, 0.0).to(tl.float32)
        tl.store(out + offsets, pixel.to(out.dtype.element_ty), inside)


@library.triton_op("preheat::winograd_pixels", mutates_args={})
def winograd_pixels(
    products: Tensor, bias: Tensor, height: int, width: int, time_bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    """Return the convolution, from its products in the basis of `winograd`: A^T products A + bias.

    time_bias and residual are added unless they are None. products: [16, batch * tiles, channels], contiguous, with the
    tiles of `winograd_tiles`; bias: [channels]; time_bias: [batch, channels], contiguous in channels; residual and the
    result: [batch, height, width, channels], contiguous. channels is a multiple of 64.
    """
    tiles, channels = products.shape[1:]
    batch = tiles // (((height + 1) // 2) * ((width + 1) // 2))
    out = products.new_empty(batch, height, width, channels)
    block, slice_channels = _winograd_block(channels)
    library.wrap_triton(_winograd_pixels_kernel)[(-(-tiles // block), channels // slice_channels)](
        products, bias, bias if time_bias is None else time_bias, bias if residual is None else residual, out,
        0 if time_bias is None else time_bias.stride(0),
        HEIGHT=height, WIDTH=width, CHANNELS=channels, TILES=tiles, TIME_BIAS=time_bias is not None,
        RESIDUAL=residual is not None, BLOCK=block, SLICE=slice_channels, num_warps=_TILES_WARPS,
    )  # fmt: skip
    return out


def _winograd_block(channels: int) -> tuple[int, int]:
    """Return the tiles and channels of one program."""
    if channels % _TILES_CHANNELS == 0:
        return _TILES, _TILES_CHANNELS
    return 2 * _TILES, _TILES_CHANNELS // 2
