"""Building blocks that the UNet and the VAE decoder share, written so that they compile to fast kernels."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_builder.networks.winograd import WinogradConv

# Of group norms, as measured on an H200.
_RUN = 256  # pixels of one partial statistic, at most
_RUN_OF_LARGE, _LARGE = 1024, 100_000_000  # and of a tensor of so many elements
_PARTS = 8448  # partial statistics, of fewer of which the compiler would split each once more, in a kernel of its own
_SMALL = 4_000_000  # elements of a tensor that has one kernel less
_FEW = 1024  # tokens of one row, up to which our own self-attention is faster than cuDNN's
_FEWEST, _FEWEST_WIDE = 3696, 924  # tokens of all rows from which our own GEGLU is faster; the latter of 1,280 channels
_PLAIN = ContextVar("_PLAIN", default=False)


@contextmanager
def plain_operations() -> Iterator[None]:
    """Within, PyTorch's own operations do on a GPU what our kernels do else: what an engine with these is held
    against."""
    before = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(before)


def _has_kernels(tensor: Tensor) -> bool:
    """Whether there are forms of our own for `tensor`'s device."""
    return tensor.is_cuda and not _PLAIN.get()


def group_norm(norm: Any, hidden: Tensor) -> Tensor:
    """`norm(hidden)` of [rows, channels, height, width], in the form that is fast on `hidden`'s device."""
    out: Tensor = channels_last_group_norm(norm, hidden) if _has_kernels(hidden) else norm(hidden)
    return out


def channels_last_group_norm(norm: Any, hidden: Tensor) -> Tensor:
    """Group norm of a channels_last tensor.

    Mean and variance are taken in two stages: over runs of pixels of each channel, which reads memory in order and once
    (Welford, "Note on a method for calculating corrected sums of squares and products", 1962), then over the runs and
    the channels of a group (Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983). In one
    stage the compiler reads a few channels at a time across the whole picture, at a twentieth of the memory's speed.
    """
    mean, variance = _statistics(norm, hidden)
    spread = _spread_stored if hidden.numel() <= _SMALL else _spread_summed
    scale, shift = spread(norm, mean, variance)
    normed: Tensor = hidden.permute(0, 2, 3, 1).float() * scale[:, None, None] + shift[:, None, None]
    return normed.to(hidden.dtype).permute(0, 3, 1, 2)


def _statistics(norm: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each group, [rows, groups], fp32."""
    rows, channels, height, width = hidden.shape
    pixels = height * width
    elements = hidden.numel()
    longest = _RUN_OF_LARGE if elements >= _LARGE else min(_RUN, max(1, elements // _PARTS))
    # Not all sizes are whole runs of that: 832x1216 has 26x38 latents at the UNet's lowest level.
    run = max(length for length in range(1, longest + 1) if pixels % length == 0)
    groups = norm.num_groups
    parts = hidden.permute(0, 2, 3, 1).reshape(rows, pixels // run, run, channels).float()
    spreads, means = torch.var_mean(parts, 2, correction=0)  # [rows, runs, channels]
    grouped = means.reshape(rows, -1, groups, channels // groups)
    mean = grouped.mean((1, 3))  # [rows, groups]
    between = (grouped - mean[:, None, :, None]).square()
    return mean, (spreads.reshape(grouped.shape) + between).mean((1, 3))


def _spread_summed(norm: Any, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and shift of each channel, [rows, channels], from mean and variance of each group, [rows, groups].

    Spread from groups to channels as sums over all groups, of which one is not zero: the compiler keeps what it sums,
    and would work anything else out again for each pixel.
    """
    channels, groups = norm.weight.shape[0], mean.shape[1]
    group = torch.arange(groups, device=mean.device)
    others = group != (torch.arange(channels, device=mean.device) // (channels // groups))[:, None]
    scales = (variance + norm.eps).rsqrt()[:, None] * norm.weight.float()[:, None]  # [rows, channels, groups]
    shifts = norm.bias.float()[:, None] - mean[:, None] * scales
    return scales.masked_fill(others, 0).sum(2), shifts.masked_fill(others, 0).sum(2)


def _spread_stored(norm: Any, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """The same without a kernel of its own: mean and deviation are stored by the one that takes them, and each pixel
    works out the rest. For small tensors, where a kernel takes longer than that."""
    rows, groups = mean.shape
    channels = norm.weight.shape[0]

    def stored(tensor: Tensor) -> Tensor:
        # The compiler stores what a view by strides is taken of.
        by_group = tensor.as_strided(tensor.shape, tensor.stride())
        return by_group[:, :, None].expand(rows, groups, channels // groups).reshape(rows, channels)

    scale = stored((variance + norm.eps).rsqrt()) * norm.weight.float()
    return scale, norm.bias.float() - stored(mean) * scale


def resnet(block: Any, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
    """A ResNet block. `bias` [rows, channels out]: what the embedded time adds between its convolutions. It may have
    more rows than `hidden`: see `repeated`."""
    rows = hidden.shape[0] if bias is None else bias.shape[0]
    straight = hidden if block.conv_shortcut is None else block.conv_shortcut(hidden)
    inner = _convolved(block.norm1, block.conv1, hidden, bias=bias)
    return _convolved(block.norm2, block.conv2, inner, residual=repeated(straight, rows))


def _convolved(
    norm: Any, conv: Any, hidden: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """conv(silu(norm(hidden))), and to it `bias` [rows, channels] for every pixel, or `residual`, as large as it."""
    if isinstance(conv, WinogradConv) and not _PLAIN.get():
        return _by_tiles(norm, conv, hidden, bias, residual)
    out: Tensor = conv(F.silu(group_norm(norm, hidden)))
    if bias is not None:
        out = repeated(out, bias.shape[0]) + bias[:, :, None, None]
    return out if residual is None else residual + out


def _by_tiles(norm: Any, conv: WinogradConv, hidden: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """The same by Winograd's minimal filtering, on a GPU: the norm, SiLU and sums are part of its transforms."""
    from engine_builder.networks import winograd_kernels as kernels

    if bias is not None:
        hidden = repeated(hidden, bias.shape[0])
    mean, variance = _statistics(norm, hidden)
    height, width = hidden.shape[2:]
    deviation = (variance + norm.eps).sqrt()
    tiles = kernels.winograd_tiles(hidden.permute(0, 2, 3, 1).contiguous(), mean, deviation, norm.weight, norm.bias)
    products = torch.bmm(tiles, conv.weight.transpose(1, 2))
    added = None if residual is None else residual.permute(0, 2, 3, 1).contiguous()
    out: Tensor = kernels.winograd_pixels(products, conv.bias, height, width, bias, added)
    return out.permute(0, 3, 1, 2)


def repeated(hidden: Tensor, rows: int) -> Tensor:
    """`hidden`, again and again until it has `rows` rows, a multiple of its own."""
    own = hidden.shape[0]
    return hidden if own == rows else torch.cat([hidden] * (rows // own))


def split_into_phases(upsampler: Any) -> None:
    """`conv`, 3x3, becomes `phases`, which `upsample` applies to the picture as it was.

    Of the nine pixels that a 3x3 kernel reads after an upsampling by nearest neighbours only 2x2 differ; which of its
    weights meet in one is decided by the parity of the pixel's row and column, its phase. So one 2x2 convolution gives
    the channels of all four phases, in 16 products where there were 36 (Aitken et al., "Checkerboard artifact free
    sub-pixel convolution", 2017).
    """
    conv = upsampler.conv
    phases = nn.Conv2d(conv.in_channels, 4 * conv.out_channels, 2, padding=1, device="meta")
    phases.weight = nn.Parameter(phase_weights(conv.weight), requires_grad=False)
    phases.bias = nn.Parameter(conv.bias.repeat(4), requires_grad=False)
    upsampler.phases, upsampler.conv = phases, None


def phase_weights(weight: Tensor) -> Tensor:
    """Weights of a convolution [out, in, 3, 3] -> those of its phases, [4 out, in, 2, 2]: even rows and even columns
    first, then odd columns, then odd rows. Added in fp32 or what is wider, and rounded once.

    In an even row the kernel's second and third row meet in one row of pixels, in an odd one its first and second;
    columns alike.
    """
    kernel = weight.to(torch.promote_types(weight.dtype, torch.float32))
    rows = [torch.stack(pair, 2) for pair in _meeting(*kernel.unbind(2))]
    phases = [torch.stack(pair, 3) for row in rows for pair in _meeting(*row.unbind(3))]
    return torch.cat(phases).to(weight.dtype)


def _meeting(first: Tensor, second: Tensor, third: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Two taps of the even phase, and two of the odd one."""
    return (first, second + third), (first + second, third)


def upsample(upsampler: Any, hidden: Tensor) -> Tensor:
    """Twice the height and width by nearest neighbours, then a 3x3 convolution: see `split_into_phases`."""
    rows, _, height, width = hidden.shape
    phases = upsampler.phases(hidden).permute(0, 2, 3, 1).chunk(4, dim=-1)  # each [rows, height + 1, width + 1, out]
    # The phase of odd rows starts one row further down, that of odd columns one column to the right.
    windows = [phase[:, i // 2 : height + i // 2, i % 2 : width + i % 2] for i, phase in enumerate(phases)]
    even, odd = torch.stack(windows[:2], 3), torch.stack(windows[2:], 3)  # [rows, height, width, 2, out]
    out = torch.stack([even, odd], 2).reshape(rows, 2 * height, 2 * width, -1)
    return out.permute(0, 3, 1, 2)


def beside(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One large product instead of several of the same input: what they give, beside each other."""
    weights: list[Tensor] = [linear.weight for linear in linears]
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    width = sum(linear.out_features for linear in linears)
    fused = nn.Linear(linears[0].in_features, width, bias=bool(biases), device="meta")
    fused.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
    if biases:
        fused.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return fused


def attend(queries: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """Attention. Queries [rows, n, channels], keys and values [rows, m, channels] -> [rows, n, channels]."""

    def split(tensor: Tensor) -> Tensor:
        return tensor.reshape(*tensor.shape[:2], heads, -1).transpose(1, 2)

    mixed: Tensor = F.scaled_dot_product_attention(split(queries), split(keys), split(values))
    return mixed.transpose(1, 2).flatten(2)


def attend_to_itself(fused: Tensor, heads: int) -> Tensor:
    """`attend` of [rows, n, queries, keys and values beside each other], in the form that is fast on its device."""
    halves = fused.dtype in (torch.float16, torch.bfloat16)
    if _has_kernels(fused) and halves and fused.shape[-1] == 3 * 64 * heads and fused.shape[1] % 128 == 0:
        if fused.shape[0] * fused.shape[1] <= _FEW:
            from engine_builder.networks import kernels

            mixed: Tensor = kernels.attend_to_itself(fused, heads)
            return mixed
    queries, keys, values = fused.chunk(3, dim=-1)
    return attend(queries, keys, values, heads)


def attend_to_text(queries: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """`attend` to the few tokens of a text, in the form that is fast on the tensors' device."""
    halves = queries.dtype in (torch.float16, torch.bfloat16)
    if _has_kernels(queries) and halves and queries.shape[-1] == 64 * heads and keys.shape[1] <= 128:
        from engine_builder.networks import kernels

        mixed: Tensor = kernels.attend_to_text(queries, keys, values, heads)
        return mixed
    return attend(queries, keys, values, heads)


def geglu(projection: Any, tokens: Tensor) -> Tensor:
    """values * gelu(gates), which alternate in `projection(tokens)`, in the form that is fast on their device."""
    rows, count, inner = tokens.shape
    width = projection.out_features // 2
    halves = tokens.dtype in (torch.float16, torch.bfloat16)
    if _has_kernels(tokens) and halves and width % 128 == 0 and inner % 64 == 0:
        # Where it was seen to win on an H200: one row of any size of about a million pixels, and more. Smaller products
        # leave multiprocessors without a tile, and cuBLAS splits them better.
        large = rows * count >= (_FEWEST_WIDE if inner >= 1280 else _FEWEST) and inner >= 640
        # Not on 12.x, which gives a program 99 KiB of shared memory: compiled for it the kernel takes 129.
        if large and torch.cuda.get_device_capability(tokens.device)[0] in (9, 10):
            from engine_builder.networks import kernels

            gated: Tensor = kernels.geglu(tokens, projection.weight, projection.bias)
            return gated
    values, gates = projection(tokens).unflatten(-1, (-1, 2)).unbind(-1)
    product: Tensor = values * F.gelu(gates)
    return product
