"""Triton kernels for the two transforms of `winograd`, fused with the operations before and after a convolution.

Like `kernels`, they are for GPUs only and become part of the compiled engine.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor, library

# As measured on an H200.
_TILES, _TILES_WARPS = 4, 4  # tiles and warps of one program
_TILES_CHANNELS = 128  # of one program if it divides them; otherwise half as many, with twice the tiles


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _winograd_places(  # type: ignore[no-untyped-def]
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    # The program's tiles, whether each exists, the program's channels, and each tile's batch entry and first pixel of
    # its 2x2.
    down: tl.constexpr = (HEIGHT + 1) // 2
    across: tl.constexpr = (WIDTH + 1) // 2
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    return tile, tile < TILES, channel, tile // (down * across), tile // across % down * 2, tile % across * 2


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _normed_silu(  # type: ignore[no-untyped-def]
    hidden, scale, shift, row, y, x, known, channel,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    # One pixel of each tile. The border belongs to the convolution's input: it is zero, not normalized.
    inside = (known & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH))[:, None]
    at = ((row * HEIGHT + y) * WIDTH + x)[:, None] * CHANNELS + channel[None, :]
    normed = tl.load(hidden + at, inside, 0.0).to(tl.float32) * scale + shift
    return tl.where(inside, normed / (1.0 + tl.exp2(normed * -1.4426950408889634)), 0.0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _winograd_column(  # type: ignore[no-untyped-def]
    hidden, scale, shift, row, top, x, known, channel,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    # A column of B^T pixels.
    first = _normed_silu(hidden, scale, shift, row, top, x, known, channel, HEIGHT, WIDTH, CHANNELS)
    second = _normed_silu(hidden, scale, shift, row, top + 1, x, known, channel, HEIGHT, WIDTH, CHANNELS)
    third = _normed_silu(hidden, scale, shift, row, top + 2, x, known, channel, HEIGHT, WIDTH, CHANNELS)
    fourth = _normed_silu(hidden, scale, shift, row, top + 3, x, known, channel, HEIGHT, WIDTH, CHANNELS)
    return first - third, second + third, third - second, second - fourth


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _winograd_tiles_kernel(  # type: ignore[no-untyped-def]
    hidden, mean, deviation, weight, bias, out,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr,
    BLOCK: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    place: tl.constexpr = TILES * CHANNELS
    tile, known, channel, row, y, x = _winograd_places(HEIGHT, WIDTH, TILES, BLOCK, SLICE)
    top, left = y - 1, x - 1  # of the 4x4 pixels
    group = row[:, None] * GROUPS + (channel // (CHANNELS // GROUPS))[None, :]
    scale = tl.load(weight + channel).to(tl.float32)[None, :] / tl.load(deviation + group, known[:, None], 1.0)
    shift = tl.load(bias + channel).to(tl.float32)[None, :] - tl.load(mean + group, known[:, None], 0.0) * scale
    first = _winograd_column(hidden, scale, shift, row, top, left, known, channel, HEIGHT, WIDTH, CHANNELS)
    second = _winograd_column(hidden, scale, shift, row, top, left + 1, known, channel, HEIGHT, WIDTH, CHANNELS)
    third = _winograd_column(hidden, scale, shift, row, top, left + 2, known, channel, HEIGHT, WIDTH, CHANNELS)
    fourth = _winograd_column(hidden, scale, shift, row, top, left + 3, known, channel, HEIGHT, WIDTH, CHANNELS)
    for i in tl.static_range(4):
        at = out + 4 * i * place + tile[:, None] * CHANNELS + channel[None, :]
        tl.store(at, (first[i] - third[i]).to(out.dtype.element_ty), known[:, None])
        tl.store(at + place, (second[i] + third[i]).to(out.dtype.element_ty), known[:, None])
        tl.store(at + 2 * place, (third[i] - second[i]).to(out.dtype.element_ty), known[:, None])
        tl.store(at + 3 * place, (second[i] - fourth[i]).to(out.dtype.element_ty), known[:, None])


@library.triton_op("preheat::winograd_tiles", mutates_args={})
def winograd_tiles(hidden: Tensor, mean: Tensor, deviation: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """silu(group norm of hidden) in tiles, in the basis of `winograd`: B^T pixels B.

    hidden: [batch, height, width, channels], contiguous; mean and deviation: [batch, groups], fp32, contiguous; weight
    and bias of the norm: [channels]. channels is a multiple of 64. Returns [16, batch * tiles, channels], with
    ceil(height / 2) * ceil(width / 2) tiles.
    """
    rows, height, width, channels = hidden.shape
    count = rows * ((height + 1) // 2) * ((width + 1) // 2)
    out = hidden.new_empty(16, count, channels)
    block, part = _winograd_block(channels)
    library.wrap_triton(_winograd_tiles_kernel)[(-(-count // block), channels // part)](
        hidden, mean, deviation, weight, bias, out, HEIGHT=height, WIDTH=width, CHANNELS=channels,
        GROUPS=mean.shape[1], TILES=count, BLOCK=block, SLICE=part, num_warps=_TILES_WARPS,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _winograd_row(at, known, PLACE: tl.constexpr):  # type: ignore[no-untyped-def]
    # A row of products A: the left pixels' terms and the right pixels'.
    first = tl.load(at, known[:, None], 0.0).to(tl.float32)
    second = tl.load(at + PLACE, known[:, None], 0.0).to(tl.float32)
    third = tl.load(at + 2 * PLACE, known[:, None], 0.0).to(tl.float32)
    fourth = tl.load(at + 3 * PLACE, known[:, None], 0.0).to(tl.float32)
    return first + second + third, second - third - fourth


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _winograd_pixels_kernel(  # type: ignore[no-untyped-def]
    products, bias, more, residual, out, more_stride,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, TILES: tl.constexpr, MORE: tl.constexpr,
    RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    place: tl.constexpr = TILES * CHANNELS
    tile, known, channel, row, top, left = _winograd_places(HEIGHT, WIDTH, TILES, BLOCK, SLICE)
    added = tl.load(bias + channel).to(tl.float32)[None, :]
    if MORE:
        added += tl.load(more + row[:, None] * more_stride + channel[None, :], known[:, None], 0.0).to(tl.float32)
    at = products + tile[:, None] * CHANNELS + channel[None, :]
    first, second = _winograd_row(at, known, place), _winograd_row(at + 4 * place, known, place)
    third, fourth = _winograd_row(at + 8 * place, known, place), _winograd_row(at + 12 * place, known, place)
    for i in tl.static_range(4):
        y, x = top + i // 2, left + i % 2
        if i // 2 == 0:
            pixel = first[i % 2] + second[i % 2] + third[i % 2] + added
        else:
            pixel = second[i % 2] - third[i % 2] - fourth[i % 2] + added
        inside = (known & (y < HEIGHT) & (x < WIDTH))[:, None]
        to = ((row * HEIGHT + y) * WIDTH + x)[:, None] * CHANNELS + channel[None, :]
        if RESIDUAL:
            pixel += tl.load(residual + to, inside, 0.0).to(tl.float32)
        tl.store(out + to, pixel.to(out.dtype.element_ty), inside)


@library.triton_op("preheat::winograd_pixels", mutates_args={})
def winograd_pixels(
    products: Tensor, bias: Tensor, height: int, width: int, more: Tensor | None, residual: Tensor | None
) -> Tensor:
    """The convolution from its products in the basis of `winograd`: A^T products A + bias + more + residual.

    products: [16, batch * tiles, channels], contiguous, with the tiles of `winograd_tiles`; bias: [channels]; more:
    [batch, channels], contiguous in channels; residual: [batch, height, width, channels], contiguous. channels is a
    multiple of 64. Returns [batch, height, width, channels].
    """
    count, channels = products.shape[1:]
    rows = count // (((height + 1) // 2) * ((width + 1) // 2))
    out = products.new_empty(rows, height, width, channels)
    block, part = _winograd_block(channels)
    library.wrap_triton(_winograd_pixels_kernel)[(-(-count // block), channels // part)](
        products, bias, bias if more is None else more, bias if residual is None else residual, out,
        0 if more is None else more.stride(0),
        HEIGHT=height, WIDTH=width, CHANNELS=channels, TILES=count, MORE=more is not None,
        RESIDUAL=residual is not None, BLOCK=block, SLICE=part, num_warps=_TILES_WARPS,
    )  # fmt: skip
    return out


def _winograd_block(channels: int) -> tuple[int, int]:
    """Return the tiles and channels of one program."""
    if channels % _TILES_CHANNELS == 0:
        return _TILES, _TILES_CHANNELS
    return 2 * _TILES, _TILES_CHANNELS // 2
