"""A Triton kernel of group norm and SiLU before convolutions in FP8. Imported only once a network is on a GPU.

The compiler's own kernel of these operations loads scale and shift again for each number. Here they stay in registers
for many pixels. Statistics of the groups are computed before; see `engine_builder.networks.blocks`.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor, library

# Measured with these numbers on an H100; others were not compared.
_PIXELS = 32  # that a program reads at once
_MAX_SLICE = 128  # channels of a program
# A warp for so many channels: then each thread computes one scale and shift at most. It has 32 numbers of the pixels.
_CHANNELS_OF_WARP = 32
_MAX_BLOCKS = 16  # of pixels that a program reads one after the other
_MIN_PROGRAMS = 4096  # with fewer programs, each reads fewer blocks


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _norm_silu_e4m3_kernel(  # type: ignore[no-untyped-def]
    hidden, mean, deviation, weight, bias, input_scale, out,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    SLICE: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(2)
    channel = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    first = tl.program_id(0) * (BLOCK * BLOCKS)
    end = tl.minimum(first + BLOCK * BLOCKS, PIXELS)
    pixel = first + tl.arange(0, BLOCK)
    offsets = (entry * PIXELS + pixel)[:, None] * CHANNELS + channel[None, :]
    # Each block of pixels is loaded before the work on the one before it, the first before that on scale and shift.
    values = tl.load(hidden + offsets, (pixel < end)[:, None])
    group = entry * GROUPS + channel // (CHANNELS // GROUPS)
    clip_scale = tl.load(input_scale)
    scale = tl.load(weight + channel).to(tl.float32) / tl.load(deviation + group)
    shift = tl.load(bias + channel).to(tl.float32) - tl.load(mean + group) * scale
    # With normed = quotient * input_scale, silu(normed) / input_scale = quotient / (1 + exp(-normed)).
    scale, shift = (scale * (1.0 / clip_scale))[None, :], (shift * (1.0 / clip_scale))[None, :]
    exponent = clip_scale * -1.4426950408889634
    for _ in range(0, BLOCKS):
        quotient = values.to(tl.float32) * scale + shift
        if BLOCKS > 1:
            values = tl.load(hidden + offsets + BLOCK * CHANNELS, (pixel + BLOCK < end)[:, None])
        numbers = quotient / (1.0 + tl.exp2(quotient * exponent))
        # NaN stays NaN, so that a broken image is noticed.
        numbers = tl.clamp(numbers, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out + offsets, numbers.to(out.dtype.element_ty), (pixel < end)[:, None])
        pixel += BLOCK
        offsets += BLOCK * CHANNELS


@library.triton_op("preheat::norm_silu_e4m3", mutates_args={})
def norm_silu_e4m3(
    hidden: Tensor, mean: Tensor, deviation: Tensor, weight: Tensor, bias: Tensor, input_scale: Tensor
) -> Tensor:
    """Return silu(group norm of hidden) / input_scale as E4M3. Numbers beyond its largest are clipped; NaN stays NaN.

    hidden: [batch, height, width, channels], contiguous, fewer than 2^31 elements; mean and deviation: [batch, groups],
    fp32, contiguous; weight and bias of the norm: [channels]; input_scale: fp32 scalar. channels is a multiple of 16.
    Returns the shape of hidden.
    """
    batch, height, width, channels = hidden.shape
    assert channels % 16 == 0 and hidden.numel() < 2**31
    out = torch.empty(hidden.shape, dtype=torch.float8_e4m3fn, device=hidden.device)
    pixels = height * width
    slice_channels = min(_MAX_SLICE, channels & -channels)  # a power of two that divides the channels
    slices, blocks = channels // slice_channels, -(-pixels // _PIXELS)
    in_program = max(1, min(_MAX_BLOCKS, batch * slices * blocks // _MIN_PROGRAMS))
    library.wrap_triton(_norm_silu_e4m3_kernel)[(-(-blocks // in_program), slices, batch)](
        hidden, mean, deviation, weight, bias, input_scale, out, PIXELS=pixels, CHANNELS=channels,
        GROUPS=mean.shape[1], BLOCK=_PIXELS, BLOCKS=in_program, SLICE=slice_channels,
        num_warps=max(1, slice_channels // _CHANNELS_OF_WARP),
    )  # fmt: skip
    return out
