"""SDXL's VAE encoder and decoder, each as one network, with the arithmetic of diffusers' `AutoencoderKL`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_builder.networks.blocks import (
    attend,
    group_norm,
    resnet,
    subpixel_upsample,
    tokens_to_pixels,
    upsample,
)
from engine_builder.networks.onnx_form import is_for_onnx

_MAX_SCORES = 2**29  # of the attention on a GPU: one product up to about 1200x1200 pixels


class VaeEncoderNetwork(nn.Module):
    """Pixels in [-1, 1], [batch, 3, height, width] -> moments [batch, 2 * channels, height/8, width/8].

    The moments are the mean of the latents' normal distribution and then the logarithm of its variance.
    """

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.encoder: Any = vae.encoder
        self.quant_conv: nn.Module = getattr(vae, "quant_conv", None) or nn.Identity()

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        encoder = self.encoder
        hidden = encoder.conv_in(pixels)
        for down in encoder.down_blocks:
            for block in down.resnets:
                hidden = resnet(block, hidden)
            for downsampler in down.downsamplers or ():
                hidden = downsampler.conv(F.pad(hidden, (0, 1, 0, 1)))
        hidden = _middle(encoder.mid_block, hidden)
        return (self.quant_conv(encoder.conv_out(F.silu(group_norm(encoder.conv_norm_out, hidden)))),)


class VaeDecoderNetwork(nn.Module):
    """Latents, divided by the scaling factor, [batch, channels, height/8, width/8] -> pixels [batch, 3, height, width].

    Pixels are nominally in [-1, 1].
    """

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.decoder: Any = vae.decoder
        self.post_quant_conv: nn.Module = getattr(vae, "post_quant_conv", None) or nn.Identity()
        for block in self.decoder.up_blocks:
            for upsampler in block.upsamplers or ():
                subpixel_upsample(upsampler)

    def forward(self, latents: Tensor) -> tuple[Tensor, ...]:
        decoder = self.decoder
        hidden = _middle(decoder.mid_block, decoder.conv_in(self.post_quant_conv(latents)))
        for up in decoder.up_blocks:
            for block in up.resnets:
                hidden = resnet(block, hidden)
            for upsampler in up.upsamplers or ():
                hidden = upsample(upsampler, hidden)
        return (decoder.conv_out(F.silu(group_norm(decoder.conv_norm_out, hidden))),)


def _middle(middle: Any, hidden: Tensor) -> Tensor:
    """Run the middle block, on [batch, channels, height/8, width/8]."""
    hidden = resnet(middle.resnets[0], hidden)
    for attention, block in zip(middle.attentions, middle.resnets[1:], strict=True):
        hidden = resnet(block, _attention(attention, hidden))
    return hidden


def splits_scores(batch: int, tokens: int) -> bool:
    """True if `wide_attention` computes attention between so many tokens in pieces."""
    return batch * tokens**2 > _MAX_SCORES


def wide_attention(queries: Tensor, keys: Tensor, values: Tensor, max_scores: int = _MAX_SCORES) -> Tensor:
    """Return attention [batch, n, channels] in one head, by plain products, for equally many queries and keys.

    At most `max_scores` scores are in memory at a time: those of as many queries as fit. At 2048x2048 all scores in
    fp16 would take 8.6 GB.
    """
    batch, count, channels = queries.shape
    transposed = keys.transpose(1, 2)
    pieces = (queries * channels**-0.5).split(max(1, max_scores // (batch * count)), 1)
    mixed = [(piece @ transposed).softmax(-1) @ values for piece in pieces]
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed, 1)


def _attention(attention: Any, hidden: Tensor) -> Tensor:
    """Add attention between all pixels of a latent, in one head as wide as the channels (512).

    On a GPU no fused attention is fast for so wide a head. Two plain products with a softmax between them are faster.
    """
    batch, channels, height, width = hidden.shape
    tokens = group_norm(attention.group_norm, hidden).permute(0, 2, 3, 1).reshape(batch, height * width, channels)
    queries, keys, values = attention.to_q(tokens), attention.to_k(tokens), attention.to_v(tokens)
    if is_for_onnx():
        mixed = attend(queries, keys, values, heads=1)
    elif hidden.device.type == "cuda":
        mixed = wide_attention(queries, keys, values)
    else:
        mixed = F.scaled_dot_product_attention(queries[:, None], keys[:, None], values[:, None])[:, 0]
    return tokens_to_pixels(attention.to_out[0](mixed), hidden) + hidden
