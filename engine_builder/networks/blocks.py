"""Building blocks of the UNet and the VAE decoder, written so that they compile to fast kernels."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_builder.kernels.fp8_conv import QuantizedConv
from engine_builder.kernels.fp8_linear import QuantizedLinear
from engine_builder.kernels.int8_linear import Int8Linear
from engine_builder.kernels.kernel_form import has_half_kernels, has_kernels, is_plain
from engine_builder.kernels.low_rank_linear import LowRankLinear
from engine_builder.kernels.winograd import WinogradConv
from engine_builder.networks.bands import (
    band_count,
    convolve,
    edge_rows,
    group_norm_of_band,
    image_statistics,
    neighbour_rows,
    tokens_of_image,
)
from engine_builder.networks.onnx_form import is_for_onnx
from model.weights.transforms import phase_weights

# Group norm, as measured on an H200.
_MAX_RUN_PIXELS = 256  # pixels that one partial statistic covers
_MAX_RUN_PIXELS_LARGE, _LARGE_ELEMENTS = 1024, 100_000_000  # the same, for tensors of at least so many elements
_MIN_PARTIALS = 8448  # with fewer partial statistics the compiler splits each of them, in an extra kernel
_SMALL_ELEMENTS = 4_000_000  # up to this size `_affine_via_store` is faster
# Where the Triton kernels are faster, as measured on an H200.
_MAX_SELF_ATTENTION_TOKENS = 1024  # tokens of a batch; above it cuDNN's attention is faster
_MIN_GEGLU_TOKENS, _MIN_GEGLU_TOKENS_WIDE = 3696, 924  # tokens of a batch; the latter for 1,280 channels or more


def group_norm(norm: Any, hidden: Tensor) -> Tensor:
    """Return `norm(hidden)` of [batch, channels, height, width], in the form that is fast on `hidden`'s device."""
    if has_kernels(hidden):
        return channels_last_group_norm(norm, hidden)
    return group_norm_of_band(norm, hidden) if band_count() > 1 else cast(Tensor, norm(hidden))


def channels_last_group_norm(norm: Any, hidden: Tensor) -> Tensor:
    """Group norm of a channels_last tensor, with mean and variance taken in two stages.

    The first stage reduces runs of pixels of each channel, so it reads memory once and in order. The second combines
    the runs and channels of a group. In a single stage the compiler reads a few channels at a time across the whole
    image, at a twentieth of the memory bandwidth.

    Sources: Welford, "Note on a method for calculating corrected sums of squares and products", 1962. Chan, Golub and
    LeVeque, "Algorithms for computing the sample variance", 1983.
    """
    mean, variance = image_statistics(*_statistics(norm, hidden))
    affine = _affine_via_store if hidden.numel() <= _SMALL_ELEMENTS else _affine_via_sum
    scale, shift = affine(norm, mean, variance)
    normed: Tensor = hidden.permute(0, 2, 3, 1).float() * scale[:, None, None] + shift[:, None, None]
    return normed.to(hidden.dtype).permute(0, 3, 1, 2)


def _statistics(norm: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each group, [batch, groups], fp32."""
    batch, channels, height, width = hidden.shape
    pixels = height * width
    elements = hidden.numel()
    large = elements >= _LARGE_ELEMENTS
    longest = _MAX_RUN_PIXELS_LARGE if large else min(_MAX_RUN_PIXELS, max(1, elements // _MIN_PARTIALS))
    # The run must divide the pixels: 832x1216 has 26x38 latents at the UNet's lowest level.
    run = max(length for length in range(1, longest + 1) if pixels % length == 0)
    groups = norm.num_groups
    parts = hidden.permute(0, 2, 3, 1).reshape(batch, pixels // run, run, channels).float()
    variances, means = torch.var_mean(parts, 2, correction=0)  # [batch, runs, channels]
    grouped = means.reshape(batch, -1, groups, channels // groups)
    mean = grouped.mean((1, 3))  # [batch, groups]
    between = (grouped - mean[:, None, :, None]).square()
    return mean, (variances.reshape(grouped.shape) + between).mean((1, 3))


def _affine_via_sum(norm: Any, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and shift of each channel, [batch, channels], from statistics of each group, [batch, groups].

    A channel's value is written as a sum over all groups with one non-zero term, because the compiler stores the
    results of sums. It would compute any other expression again for each pixel.
    """
    channels, groups = norm.weight.shape[0], mean.shape[1]
    group = torch.arange(groups, device=mean.device)
    others = group != (torch.arange(channels, device=mean.device) // (channels // groups))[:, None]
    scales = (variance + norm.eps).rsqrt()[:, None] * norm.weight.float()[:, None]  # [batch, channels, groups]
    shifts = norm.bias.float()[:, None] - mean[:, None] * scales
    return scales.masked_fill(others, 0).sum(2), shifts.masked_fill(others, 0).sum(2)


def _affine_via_store(norm: Any, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `_affine_via_sum` returns, without an extra kernel.

    The statistics' kernel stores mean and deviation, and the rest is computed again for each pixel. On small tensors
    that is faster than a kernel launch.
    """
    batch, groups = mean.shape
    channels = norm.weight.shape[0]

    def per_channel(tensor: Tensor) -> Tensor:
        # A strided view makes the compiler store the tensor.
        by_group = tensor.as_strided(tensor.shape, tensor.stride())
        return by_group[:, :, None].expand(batch, groups, channels // groups).reshape(batch, channels)

    scale = per_channel((variance + norm.eps).rsqrt()) * norm.weight.float()
    return scale, norm.bias.float() - per_channel(mean) * scale


def resnet(block: Any, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
    """Run a ResNet block: [batch, channels in, height, width] -> [batch, channels out, height, width].

    `bias` [batch, channels out] is the time embedding's projection, added between the convolutions. Its batch may be a
    multiple of `hidden`'s, which is then repeated.
    """
    batch = hidden.shape[0] if bias is None else bias.shape[0]
    if isinstance(block.conv2, QuantizedConv):
        # Before the first convolution: a repetition after it is fused with the addition of the bias, and torch 2.11
        # stores the sum with channels first, in which the kernel of the next norm reads other numbers.
        hidden = repeat_batch(hidden, batch)
    shortcut = hidden if block.conv_shortcut is None else block.conv_shortcut(hidden)
    inner = norm_silu_conv(block.norm1, block.conv1, hidden, bias=bias)
    return norm_silu_conv(block.norm2, block.conv2, inner, residual=repeat_batch(shortcut, batch))


def norm_silu_conv(
    norm: Any,
    conv: Any,
    hidden: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return conv(silu(norm(hidden))), plus `bias` [batch, channels] at every pixel, plus `residual` of its shape."""
    if isinstance(conv, WinogradConv) and not is_plain():
        return _winograd_conv(norm, conv, hidden, bias, residual)
    if isinstance(conv, QuantizedConv) and bias is not None:
        hidden = repeat_batch(hidden, bias.shape[0])
    if isinstance(conv, QuantizedConv) and has_half_kernels(hidden):
        # Faster than the compiler's kernel for all layers that were measured, on an H100.
        activated = _norm_silu_e4m3(norm, conv, hidden)
    else:
        activated = F.silu(group_norm(norm, hidden))  # the compiler fuses the quantization with it
    if isinstance(conv, QuantizedConv):
        return cast(Tensor, conv(activated, bias, residual))  # The kernel adds the rest to its sums.
    out = convolve(conv, activated)
    if bias is not None:
        out = repeat_batch(out, bias.shape[0]) + bias[:, :, None, None]
    return out if residual is None else residual + out


def _norm_silu_e4m3(norm: Any, conv: QuantizedConv, hidden: Tensor) -> Tensor:
    """Return silu(norm(hidden)) as the E4M3 numbers that `conv` takes, [batch, channels, height, width]."""
    from engine_builder.kernels.fp8_norm_kernels import norm_silu_e4m3

    mean, variance = image_statistics(*_statistics(norm, hidden))
    deviation = (variance + norm.eps).sqrt()
    pixels = hidden.permute(0, 2, 3, 1).contiguous()
    numbers: Tensor = norm_silu_e4m3(pixels, mean, deviation, norm.weight, norm.bias, conv.input_scale)
    return numbers.permute(0, 3, 1, 2)


def _winograd_conv(
    norm: Any, conv: WinogradConv, hidden: Tensor, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    """Return what `norm_silu_conv` returns, on a GPU. Norm, SiLU and sums are fused into Winograd's transforms."""
    from engine_builder.kernels import winograd_kernels as kernels

    if bias is not None:
        hidden = repeat_batch(hidden, bias.shape[0])
    mean, variance = image_statistics(*_statistics(norm, hidden))
    height, width = hidden.shape[2:]
    deviation = (variance + norm.eps).sqrt()
    rows = None
    if band_count() > 1:
        scale, shift = _affine_via_store(norm, mean, variance)
        activated = F.silu(edge_rows(hidden).float() * scale[:, None] + shift[:, None])
        rows = neighbour_rows(activated.to(hidden.dtype))
    pixels = hidden.permute(0, 2, 3, 1).contiguous()
    tiles = kernels.winograd_tiles(pixels, mean, deviation, norm.weight, norm.bias, rows)
    products = torch.bmm(tiles, conv.weight.transpose(1, 2))
    added = None if residual is None else residual.permute(0, 2, 3, 1).contiguous()
    out: Tensor = kernels.winograd_pixels(products, conv.bias, height, width, bias, added)
    return out.permute(0, 3, 1, 2)


def repeat_batch(hidden: Tensor, batch: int) -> Tensor:
    """Repeat `hidden` along its batch dimension up to `batch` entries, a multiple of its own."""
    entries = hidden.shape[0]
    return hidden if entries == batch else torch.cat([hidden] * (batch // entries))


def subpixel_upsample(upsampler: Any) -> None:
    """Replace an upsampler's 3x3 `conv` by `phases`, which `upsample` applies before it upsamples.

    After nearest-neighbour upsampling, a 3x3 kernel reads 2x2 different pixels. The parity of a pixel's row and column,
    its phase, decides which weights apply to the same one. So one 2x2 convolution computes the channels of all four
    phases, in 16 products instead of 36. Source: Aitken et al., "Checkerboard artifact free sub-pixel convolution",
    2017.
    """
    conv = upsampler.conv
    phases = nn.Conv2d(conv.in_channels, 4 * conv.out_channels, 2, padding=1, device="meta")
    phases.weight = nn.Parameter(phase_weights(conv.weight), requires_grad=False)
    phases.bias = nn.Parameter(conv.bias.repeat(4), requires_grad=False)
    upsampler.phases, upsampler.conv = phases, None


def upsample(upsampler: Any, hidden: Tensor) -> Tensor:
    """Double height and width by nearest neighbours and convolve with a 3x3 kernel; see `subpixel_upsample`."""
    if is_for_onnx():
        from engine_builder.networks.onnx_operations import interleave_phases

        upsampled: Tensor = interleave_phases(upsampler.phases(hidden))
        return upsampled
    if isinstance(upsampler.phases, QuantizedConv) and has_kernels(hidden):
        return upsampler.phases.upsample(hidden)  # The kernel stores each phase at its pixels.
    batch, _, height, width = hidden.shape
    phases = (
        convolve(upsampler.phases, hidden).permute(0, 2, 3, 1).chunk(4, dim=-1)
    )  # each [batch, height + 1, width + 1, out]
    # The phase of odd rows starts one row further down, that of odd columns one column to the right.
    windows = [phase[:, i // 2 : height + i // 2, i % 2 : width + i % 2] for i, phase in enumerate(phases)]
    even, odd = torch.stack(windows[:2], 3), torch.stack(windows[2:], 3)  # [batch, height, width, 2, out]
    out = torch.stack([even, odd], 2).reshape(batch, 2 * height, 2 * width, -1)
    return out.permute(0, 3, 1, 2)


def tokens_to_pixels(tokens: Tensor, hidden: Tensor) -> Tensor:
    """Return `tokens` [batch, height * width, channels] in the shape of `hidden`, [batch, channels, height, width]."""
    if is_for_onnx():
        from engine_builder.networks.onnx_operations import reshape_like

        pixels: Tensor = reshape_like(tokens, hidden.permute(0, 2, 3, 1))
        return pixels.permute(0, 3, 1, 2)
    batch, channels, height, width = hidden.shape
    return tokens.reshape(batch, height, width, channels).permute(0, 3, 1, 2)


def concat_linears(linears: Sequence[nn.Linear]) -> nn.Linear:
    """Return one Linear with the concatenated outputs of several that take the same input. One product is faster."""
    weights: list[Tensor] = [linear.weight for linear in linears]
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    width = sum(linear.out_features for linear in linears)
    fused = nn.Linear(linears[0].in_features, width, bias=bool(biases), device="meta")
    fused.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
    if biases:
        fused.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return fused


def attend(queries: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """Return attention [batch, n, channels] of queries [batch, n, channels] to keys, values [batch, m, channels]."""

    def split(tensor: Tensor) -> Tensor:
        return tensor.reshape(*tensor.shape[:2], heads, -1).transpose(1, 2)

    mixed: Tensor = F.scaled_dot_product_attention(split(queries), split(keys), split(values))
    return mixed.transpose(1, 2).flatten(2)


def input_scale(layer: Any) -> Tensor | None:
    """Return the scale by which a quantized linear divides its inputs, or None for any other layer."""
    return layer.input_scale if isinstance(layer, QuantizedLinear) else None


def self_attention(fused: Tensor, heads: int, out_scale: Tensor | None = None) -> Tensor:
    """Return self-attention [batch, n, channels]. `fused`: queries, keys and values, [batch, n, 3 * channels].

    `out_scale`: the result may be returned as E4M3, divided by this scale.
    """
    batch, tokens, width = fused.shape
    if band_count() > 1:
        keys, values = tokens_of_image(fused[..., width // 3 :]).chunk(2, dim=-1)
        return attend(fused[..., : width // 3], keys, values, heads)
    if has_half_kernels(fused) and width == 3 * 64 * heads and tokens % 128 == 0:
        if batch * tokens <= _MAX_SELF_ATTENTION_TOKENS:
            from engine_builder.kernels import attention_kernels as kernels

            mixed: Tensor = kernels.attend_to_itself(fused, heads, out_scale)
            return mixed
    queries, keys, values = fused.chunk(3, dim=-1)
    return attend(queries, keys, values, heads)


class ImageContext(NamedTuple):
    """Keys and values of a cross-attention from reference images, and the bias of their tokens.

    keys, values: [batch, adapters * tokens, width]. bias: float32 [batch, adapters, tokens].
    """

    keys: Tensor
    values: Tensor
    bias: Tensor


def cross_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
    out_scale: Tensor | None = None,
    image: ImageContext | None = None,
) -> Tensor:
    """Return what `attend` returns, for the few tokens of a text, in the form that is fast on the tensors' device.

    `out_scale`: the result may be returned as E4M3, divided by this scale. `image`: attention to its tokens is added.
    """
    if has_half_kernels(queries) and queries.shape[-1] == 64 * heads and keys.shape[1] <= 128:
        from engine_builder.kernels import attention_kernels as kernels

        if image is None or image.bias.shape[2] <= kernels.MAX_IMAGE_TOKENS:
            mixed: Tensor = kernels.attend_to_text(queries, keys, values, heads, out_scale, *(image or ()))
            return mixed
        to_text: Tensor = kernels.attend_to_text(queries, keys, values, heads, None)
    else:
        to_text = attend(queries, keys, values, heads)
    return to_text if image is None else to_text + image_attention(queries, *image, heads)


def image_attention(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, heads: int) -> Tensor:
    """Return the sum of the attentions to the tokens of each IP-Adapter, [batch, n, channels].

    queries: [batch, n, channels]. keys, values: [batch, adapters * tokens, channels]. bias: float32 [batch, adapters,
    tokens], added to the scores. Each adapter has a softmax of its own, so its weights are those of a single adapter,
    and one product with all values adds the adapters up.
    """

    def split(tensor: Tensor) -> Tensor:
        return tensor.reshape(*tensor.shape[:2], heads, -1).transpose(1, 2)

    scaled = split(queries) * (queries.shape[-1] // heads) ** -0.5
    scores = (scaled @ split(keys).transpose(2, 3)).float()  # [batch, heads, n, adapters * tokens]
    by_adapter = scores.unflatten(3, bias.shape[1:]) + bias[:, None, None]
    weights = by_adapter.softmax(-1).flatten(3).to(values.dtype)
    mixed: Tensor = weights @ split(values)
    return mixed.transpose(1, 2).flatten(2)


def feed_forward(widening: Any, narrowing: Any, tokens: Tensor) -> Tensor:
    """Return narrowing(values * gelu(gates)), [batch, n, inner]. Values and gates alternate in `widening(tokens)`."""
    out: Tensor = narrowing(geglu(widening, tokens, input_scale(narrowing)))
    return out


def geglu(projection: Any, tokens: Tensor, out_scale: Tensor | None = None) -> Tensor:
    """Return values * gelu(gates), [batch, n, width]. They alternate in `projection(tokens)`, [batch, n, 2 * width].

    `out_scale`: the result may be returned as E4M3, divided by this scale.
    """
    batch, count, inner = tokens.shape
    width = projection.out_features // 2
    if has_half_kernels(tokens) and width % 128 == 0 and inner % 64 == 0:
        # On an H200 the kernel is faster from a batch of one at about a million pixels on. Smaller products leave
        # multiprocessors without a tile, and cuBLAS splits them better.
        is_large = batch * count >= (_MIN_GEGLU_TOKENS_WIDE if inner >= 1280 else _MIN_GEGLU_TOKENS) and inner >= 640
        if isinstance(projection, LowRankLinear):
            is_large = projection.has_kernel(tokens)
        if isinstance(projection, Int8Linear):
            is_large = False  # the kernel does not multiply integers
        # Compute capability 12.x is left out: it has 99 KiB of shared memory per program, and the kernel needs more.
        if is_large and torch.cuda.get_device_capability(tokens.device)[0] in (9, 10):
            from engine_builder.kernels import attention_kernels as kernels

            if isinstance(projection, LowRankLinear):
                change = projection.narrow(tokens), projection.up()
                gated = kernels.geglu(tokens, projection.weight, projection.bias, None, out_scale, *change)
                return cast(Tensor, gated)
            if not isinstance(projection, QuantizedLinear):
                return cast(Tensor, kernels.geglu(tokens, projection.weight, projection.bias, None, out_scale))
            scale = projection.input_scale * projection.weight_scale
            quantized = projection.quantize_inputs(tokens)
            return cast(Tensor, kernels.geglu(quantized, projection.weight, projection.bias, scale, out_scale))
    pairs = projection(tokens).unflatten(-1, (-1, 2))
    values, gates = pairs.split(1, -1) if is_for_onnx() else pairs.unbind(-1)
    product: Tensor = values * F.gelu(gates)
    return product.flatten(2) if is_for_onnx() else product
