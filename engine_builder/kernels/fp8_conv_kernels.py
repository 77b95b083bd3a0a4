"""A Triton kernel of FP8 convolutions. Imported only once a network is on a GPU; see `attention_kernels`.

The convolution is a product of matrices whose left factor is never written: each row is a pixel of the result, and each
column a channel of one tap of the kernel (implicit GEMM; Chetlur et al., "cuDNN: efficient primitives for deep
learning", 2014). Programs read the pixels under a tap directly, and zeros beyond the border.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor, library

from engine_builder.kernels.fp8_conv_tiles import Tiles, choose_tiles


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _fp8_conv_kernel(  # type: ignore[no-untyped-def]
    x, weight, input_scale, weight_scale, bias, entry_bias, residual, out, pixels, entry_bias_stride,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, PHASES: tl.constexpr,
    TILE_PIXELS: tl.constexpr, TILE_CHANNELS: tl.constexpr, TILE_DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Tiles of a group of pixels run one after the other, so that they find the same weights in the cache.
    pixel_tiles = tl.cdiv(pixels, TILE_PIXELS)
    phase_channels: tl.constexpr = CHANNELS // PHASES
    phase_tiles: tl.constexpr = (phase_channels + TILE_CHANNELS - 1) // TILE_CHANNELS  # a tile has one phase
    tiles_in_group = GROUP * PHASES * phase_tiles
    first = tl.program_id(0) // tiles_in_group * GROUP
    group_size = tl.minimum(pixel_tiles - first, GROUP)
    pixel_tile = first + tl.program_id(0) % tiles_in_group % group_size
    channel_tile = tl.program_id(0) % tiles_in_group // group_size
    pixel = pixel_tile * TILE_PIXELS + tl.arange(0, TILE_PIXELS)
    phase = channel_tile // phase_tiles
    out_channel = channel_tile % phase_tiles * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    channel = phase * phase_channels + out_channel
    exists, is_channel = pixel < pixels, out_channel < phase_channels
    entry = pixel // (OUT_HEIGHT * OUT_WIDTH)
    top = pixel // OUT_WIDTH % OUT_HEIGHT * STRIDE - PADDING
    left = pixel % OUT_WIDTH * STRIDE - PADDING
    parts: tl.constexpr = (DEPTH + TILE_DEPTH - 1) // TILE_DEPTH  # of the input channels
    total = tl.zeros((TILE_PIXELS, TILE_CHANNELS), tl.float32)
    # One loop over taps and parts, so that the loads of the next tap begin during the products of this one.
    for part in range(0, KERNEL * KERNEL * parts):
        tap = part // parts
        k = part % parts * TILE_DEPTH + tl.arange(0, TILE_DEPTH)
        y, x_position = top + tap // KERNEL, left + tap % KERNEL
        inside = exists & (y >= 0) & (y < HEIGHT) & (x_position >= 0) & (x_position < WIDTH)
        x_mask, weight_mask = inside[:, None], is_channel[None, :]
        if DEPTH % TILE_DEPTH != 0:
            x_mask, weight_mask = x_mask & (k < DEPTH)[None, :], weight_mask & (k < DEPTH)[:, None]
        x_offsets = ((entry * HEIGHT + y) * WIDTH + x_position)[:, None] * DEPTH + k[None, :]
        weight_offsets = (channel * (KERNEL * KERNEL) + tap)[None, :] * DEPTH + k[:, None]
        a = tl.load(x + x_offsets, mask=x_mask, other=0.0)
        total = tl.dot(a, tl.load(weight + weight_offsets, mask=weight_mask, other=0.0), total)
    scale = tl.load(input_scale) * tl.load(weight_scale + channel, mask=is_channel, other=0.0)
    result = total * scale[None, :] + tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    if PHASES == 4:
        # Each phase has its own rows and columns of an image that is twice as high and wide.
        y, x_position = pixel // OUT_WIDTH % OUT_HEIGHT - phase // 2, pixel % OUT_WIDTH - phase % 2
        exists = exists & (y >= 0) & (y < HEIGHT) & (x_position >= 0) & (x_position < WIDTH)
        pixel = ((entry * HEIGHT + y) * 2 + phase // 2) * (2 * WIDTH) + 2 * x_position + phase % 2
    inside = exists[:, None] & is_channel[None, :]
    if entry_bias is not None:
        at = entry_bias + entry[:, None] * entry_bias_stride + channel[None, :]
        result += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    offsets = pixel[:, None] * phase_channels + out_channel[None, :]
    if residual is not None:
        result += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=inside)


@library.triton_op("preheat::fp8_conv", mutates_args={})
def fp8_conv(
    x: Tensor, weight: Tensor, input_scale: Tensor, weight_scale: Tensor, bias: Tensor, entry_bias: Tensor | None,
    residual: Tensor | None, stride: int, padding: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return conv(x * input_scale, weight * weight_scale) + bias + entry_bias + residual, in `dtype`.

    x: E4M3 [batch, height, width, in], contiguous; fewer than 2^31 elements, as the result. weight: E4M3 [out, kernel,
    kernel, in], contiguous. input_scale: float32 scalar. weight_scale: float32 [out]. bias: [out]. entry_bias: [batch,
    out], contiguous in channels, or None. residual: of the result's shape, contiguous, or None. padding: pixels of
    zeros on each side. Returns [batch, (height + 2 padding - kernel) / stride + 1, the same of width, out].
    """
    return run_fp8_conv(x, weight, input_scale, weight_scale, bias, entry_bias, residual, stride, padding, dtype)


@library.triton_op("preheat::fp8_upsample", mutates_args={})
def fp8_upsample(
    x: Tensor, weight: Tensor, input_scale: Tensor, weight_scale: Tensor, bias: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return what `fp8_conv` returns for the phases of `blocks.subpixel_upsample`, stored as an image.

    weight: E4M3 [4 out, 2, 2, in]. weight_scale: float32 [4 out]. bias: [4 out]. Others are those of `fp8_conv`.
    Returns [batch, 2 height, 2 width, out].
    """
    return run_fp8_conv(x, weight, input_scale, weight_scale, bias, None, None, 1, 1, dtype, phases=4)


def run_fp8_conv(
    x: Tensor, weight: Tensor, input_scale: Tensor, weight_scale: Tensor, bias: Tensor, entry_bias: Tensor | None,
    residual: Tensor | None, stride: int, padding: int, dtype: torch.dtype, tiles: Tiles | None = None, phases: int = 1,
) -> Tensor:  # fmt: skip
    """Run `fp8_conv`, or `fp8_upsample` if `phases` is 4, with given tiles. None: those of `choose_tiles`."""
    batch, height, width, depth = x.shape
    channels, kernel = weight.shape[:2]
    out_height, out_width = ((size + 2 * padding - kernel) // stride + 1 for size in (height, width))
    sizes = (out_height, out_width) if phases == 1 else (2 * height, 2 * width)
    out = torch.empty(batch, *sizes, channels // phases, dtype=dtype, device=x.device)
    assert max(x.numel(), out.numel()) < 2**31
    pixels = batch * out_height * out_width
    if tiles is None:
        capability = torch.cuda.get_device_capability(x.device)
        tiles = choose_tiles(phases * pixels, depth, channels // phases, capability)
    programs = -(-pixels // tiles.pixels) * phases * -(-channels // phases // tiles.channels)
    library.wrap_triton(_fp8_conv_kernel)[(programs,)](
        x, weight, input_scale, weight_scale, bias, entry_bias, residual, out, pixels,
        0 if entry_bias is None else entry_bias.stride(0),
        HEIGHT=height, WIDTH=width, DEPTH=depth, OUT_HEIGHT=out_height, OUT_WIDTH=out_width, CHANNELS=channels,
        KERNEL=kernel, STRIDE=stride, PADDING=padding, PHASES=phases, TILE_PIXELS=tiles.pixels,
        TILE_CHANNELS=tiles.channels, TILE_DEPTH=tiles.depth, GROUP=tiles.group, num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
    return out
