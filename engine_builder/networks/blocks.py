"""Building blocks that the UNet and the VAE decoder share, written so that they compile to fast kernels."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_PIXELS = 64  # of one partial statistic; every side of a latent is a multiple of 8
_LARGE, _PIXELS_LARGE = 2**16, 256


def group_norm(norm: Any, hidden: Tensor) -> Tensor:
    """`norm(hidden)` of [rows, channels, height, width], in the form that is fast on `hidden`'s device."""
    out: Tensor = channels_last_group_norm(norm, hidden) if hidden.is_cuda else norm(hidden)
    return out


def channels_last_group_norm(norm: Any, hidden: Tensor) -> Tensor:
    """Group norm of a channels_last tensor whose height and width are multiples of 8.

    Mean and variance are taken in two stages: over runs of pixels of each channel, which reads memory in order, then
    over the runs and the channels of a group (Chan, Golub and LeVeque, "Algorithms for computing the sample variance",
    1983). In one stage the compiler reads a few channels at a time across the whole picture, at a twentieth of the
    memory's speed.
    """
    rows, channels, height, width = hidden.shape
    pixels = height * width
    run = _PIXELS_LARGE if pixels >= _LARGE else _PIXELS
    groups = norm.num_groups
    last = hidden.permute(0, 2, 3, 1)
    parts = last.reshape(rows, pixels // run, run, channels).float()
    means = parts.mean(2)  # [rows, runs, channels]
    spreads = (parts - means[:, :, None]).square().mean(2)
    grouped = means.reshape(rows, -1, groups, channels // groups)
    mean = grouped.mean((1, 3))  # [rows, groups]
    between = (grouped - mean[:, None, :, None]).square()
    variance = (spreads.reshape(grouped.shape) + between).mean((1, 3))
    scale, shift = _scale_and_shift(norm, mean, variance)
    normed: Tensor = last.float() * scale[:, None, None] + shift[:, None, None]
    return normed.to(hidden.dtype).permute(0, 3, 1, 2)


def _scale_and_shift(norm: Any, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Of each channel, [rows, channels], from mean and variance of each group, [rows, groups].

    Spread from groups to channels as sums over all groups, of which one is not zero: the compiler keeps what it sums,
    and would work anything else out again for each pixel.
    """
    channels, groups = norm.weight.shape[0], mean.shape[1]
    group = torch.arange(groups, device=mean.device)
    others = group != (torch.arange(channels, device=mean.device) // (channels // groups))[:, None]
    scales = (variance + norm.eps).rsqrt()[:, None] * norm.weight.float()[:, None]  # [rows, channels, groups]
    shifts = norm.bias.float()[:, None] - mean[:, None] * scales
    return scales.masked_fill(others, 0).sum(2), shifts.masked_fill(others, 0).sum(2)


def resnet(block: Any, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
    """A ResNet block. `bias` [rows, channels out]: what the embedded time adds between its convolutions."""
    inner = block.conv1(F.silu(group_norm(block.norm1, hidden)))
    if bias is not None:
        inner = inner + bias[:, :, None, None]
    inner = block.conv2(F.silu(group_norm(block.norm2, inner)))
    out: Tensor = (hidden if block.conv_shortcut is None else block.conv_shortcut(hidden)) + inner
    return out


def upsample(upsampler: Any, hidden: Tensor) -> Tensor:
    """Twice the height and width by nearest neighbours, then a 3x3 convolution."""
    if hidden.is_meta:  # an ONNX graph, whose runtimes have kernels for these two
        out: Tensor = upsampler.conv(F.interpolate(hidden, scale_factor=2.0, mode="nearest"))
        return out
    return upsample_in_phases(upsampler.conv, hidden)


def upsample_in_phases(conv: Any, hidden: Tensor) -> Tensor:
    """`conv` of twice the picture, [rows, channels, height, width] -> [rows, channels out, 2 height, 2 width].

    Of the nine pixels that a 3x3 kernel reads after the upsampling only 2x2 differ; which of its weights meet in one is
    decided by the parity of the pixel's row and column, its phase. So one 2x2 convolution of the picture as it was
    gives the channels of all four phases, in 16 products where there were 36 (Aitken et al., "Checkerboard artifact
    free sub-pixel convolution", 2017).
    """
    rows, _, height, width = hidden.shape
    phases = F.conv2d(hidden, phase_weights(conv.weight), padding=1)  # [rows, 4 out, height + 1, width + 1]
    last = phases.permute(0, 2, 3, 1).reshape(rows, height + 1, width + 1, 2, 2, -1)
    # The phase of odd rows starts one row further down, that of odd columns one column to the right: views, which the
    # compiler reads through.
    windows = last.unfold(1, 2, 1).unfold(2, 2, 1)  # [rows, height, width, a, b, out, a, b]
    pixels = windows.diagonal(0, 3, 6).diagonal(0, 3, 5)  # [rows, height, width, out, a, b]
    joined = pixels.permute(0, 1, 4, 2, 5, 3).reshape(rows, 2 * height, 2 * width, -1)
    out: Tensor = joined + conv.bias
    return out.permute(0, 3, 1, 2)


def phase_weights(weight: Tensor) -> Tensor:
    """Weights of a convolution [out, in, 3, 3] -> those of `upsample_in_phases`, [4 out, in, 2, 2], channels_last.

    Of an even row's kernel the second and third row meet in one row of pixels, of an odd row's the first and second;
    columns alike. Added in fp32 and rounded once.
    """
    kernel = weight.permute(0, 2, 3, 1).to(torch.promote_types(weight.dtype, torch.float32))  # [out, 3, 3, in]
    places = torch.arange(2, device=weight.device)
    middle = (places[:, None] != places).to(kernel.dtype)  # [phase, tap]: where the kernel's middle is added
    kernel = kernel[:, ::2] + middle.reshape(2, 1, 2, 1, 1) * kernel[:, 1:2]  # [a, out, 2, 3, in]
    kernel = kernel[..., ::2, :] + middle.reshape(2, 1, 1, 1, 2, 1) * kernel[..., 1:2, :]  # [b, a, out, 2, 2, in]
    return kernel.transpose(0, 1).flatten(0, 2).to(weight.dtype).permute(0, 3, 1, 2)


def attend(queries: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """Attention. Queries [rows, n, channels], keys and values [rows, m, channels] -> [rows, n, channels]."""

    def split(tensor: Tensor) -> Tensor:
        return tensor.reshape(*tensor.shape[:2], heads, -1).transpose(1, 2)

    mixed: Tensor = F.scaled_dot_product_attention(split(queries), split(keys), split(values))
    return mixed.transpose(1, 2).flatten(2)


def attend_to_text(queries: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """`attend` to the few tokens of a text, in the form that is fast on the tensors' device."""
    halves = queries.dtype in (torch.float16, torch.bfloat16)
    if queries.is_cuda and halves and queries.shape[-1] == 64 * heads and keys.shape[1] <= 128:
        from engine_builder.networks import kernels

        mixed: Tensor = kernels.attend_to_text(queries, keys, values, heads)
        return mixed
    return attend(queries, keys, values, heads)
