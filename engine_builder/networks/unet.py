"""Stable Diffusion's UNet as three networks, which run once per text, once per request and once per step.

`UnetTextNetwork` computes the keys and values of every cross-attention from the text. `UnetTimeNetwork` computes every
ResNet block's bias from the timestep and the sizes. `StepUnet` does the rest. Together they compute what diffusers'
`UNet2DConditionModel` computes, from the same checkpoint. Each keeps only the parameters that it reads.

Activations are [batch, channels, height, width] between blocks and [batch, height * width, channels] inside a
transformer. With channels_last weights both have the same memory layout, and nothing is copied between them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_builder.kernels.kernel_form import is_plain
from engine_builder.kernels.low_rank_linear import add_low_rank_inputs
from engine_builder.kernels.winograd import replace_wide_convs
from engine_builder.networks.bands import convolve, divided, own_rows, whole_image
from engine_builder.networks.blocks import (
    ImageContext,
    concat_linears,
    cross_attention,
    feed_forward,
    group_norm,
    input_scale,
    repeat_batch,
    resnet,
    self_attention,
    subpixel_upsample,
    tokens_to_pixels,
    upsample,
)
from model.engines.features import CONTROL, FEATURES, GUIDED_ZEROS, IMAGE_PROMPT, LORA
from model.store.manifest import BLOB_LIMIT

_MAX_WEIGHTS = BLOB_LIMIT // 5  # of one product; at 4 bytes each (fp32) this leaves space for a blob's header
_TIME_PARAMETERS = ("time_embedding.", "add_embedding.")
_TEXT_AND_TIME_PROJECTIONS = (".time_emb_proj.", ".attn2.to_k.", ".attn2.to_v.")


class UnetTextNetwork(nn.Module):
    """encoder_hidden_states [batch, tokens, width] -> keys_values [batch, tokens, channels of all keys and values].

    keys_values has the keys and then the values of each cross-attention, in the order of `transformer_blocks`. They are
    computed in few large products.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        attentions = [block.attn2 for block in transformer_blocks(network)]
        linears = [linear for attention in attentions for linear in (attention.to_k, attention.to_v)]
        self.keys_values = nn.ModuleList(concat_linears(group) for group in group_linears(linears))

    def forward(self, encoder_hidden_states: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat([product(encoder_hidden_states) for product in self.keys_values], dim=-1),)


class UnetTimeNetwork(nn.Module):
    """timestep [batch], text_embeds [batch, pooled], time_ids [batch, 5 or 6] -> time_embeds [batch, width].

    time_embeds is each ResNet block's projection of the time embedding, concatenated in the order of `resnets`. A UNet
    that embeds the guidance scale also takes timestep_cond [batch, time_cond_proj_dim].
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        self.biases = concat_linears([block.time_emb_proj for block in resnets(network)])
        keep_parameters(network, lambda name: name.startswith(_TIME_PARAMETERS))

    def forward(
        self, timestep: Tensor, text_embeds: Tensor, time_ids: Tensor, timestep_cond: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        network, dtype = self.network, text_embeds.dtype
        embedded = network.time_embedding(network.time_proj(timestep).to(dtype), timestep_cond)
        sizes = network.add_time_proj(time_ids.flatten()).reshape(time_ids.shape[0], -1).to(dtype)
        embedded = F.silu(embedded + network.add_embedding(torch.cat([text_embeds, sizes], dim=-1)))
        return (self.biases(embedded),)


class PlainUnetTimeNetwork(nn.Module):
    """timestep [batch] -> time_embeds [batch, width], as `UnetTimeNetwork` has them. For UNets without pooled text."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        self.biases = concat_linears([block.time_emb_proj for block in resnets(network)])
        keep_parameters(network, lambda name: name.startswith(_TIME_PARAMETERS))

    def forward(self, timestep: Tensor, timestep_cond: Tensor | None = None) -> tuple[Tensor, ...]:
        embedded = self.network.time_proj(timestep).to(self.biases.weight.dtype)
        return (self.biases(F.silu(self.network.time_embedding(embedded, timestep_cond))),)


def time_network(network: Any) -> nn.Module:
    """Wrap a UNet as the network that embeds the inputs it takes besides latents and text."""
    return UnetTimeNetwork(network) if network.config.addition_embed_type else PlainUnetTimeNetwork(network)


class StepUnet(nn.Module):
    """sample [batch, channels, height/8, width/8], time_embeds and keys_values -> predicted noise, shaped like sample.

    The batch of keys_values may be smaller. The later entries are then unconditional: they attend to zeros. Keys and
    values have no bias, so they are zeros for an encoding of zeros (diffusers' `force_zeros_for_empty_prompt`).

    The inputs of `features` (`model.engines.features`) follow in their order:

    image_prompt: image_keys, image_values [batch, adapters, tokens, width of all keys] and image_bias, float32 [batch,
        adapters, tokens], which is added to the scores of the attention. The tokens of each adapter have a
        separate attention. Zeros for an image without reference images: attention to values of zero adds nothing.
    control: the sums of ControlNets' outputs, added to each skip connection and to the result of the middle block.
    lora: lora_down and lora_up [batch, width], see `engine_builder.kernels.low_rank_linear`.

    guided_zeros: the first half of an even batch is conditional. The second half is unconditional and has the same
    latents, so its entries of `sample` and `keys_values` are not read. Up to the first ResNet bias both halves are
    equal, and they are computed once.

    bands: the number of bands of the image, of which the network computes one: see `bands`. It takes and returns whole
    latents. In `plain_operations` it computes the whole image, to validate engines against it.
    """

    def __init__(
        self,
        network: Any,
        features: Collection[str] = (),
        use_winograd: bool = False,
        rank: int = 0,
        bands: int = 1,
    ) -> None:
        """`use_winograd`: replace wide convolutions by the form in `winograd`. For GPUs in half precision only.

        `rank`: of the adapters that the feature "lora" takes.
        """
        super().__init__()
        assert not {GUIDED_ZEROS, IMAGE_PROMPT} <= set(features)  # both halves attend to reference images
        self.network = network
        self.features = frozenset(features)
        self.bands = bands
        self.widths = prepare_blocks(network, use_winograd)
        for block in network.up_blocks:
            for upsampler in block.upsamplers or ():
                subpixel_upsample(upsampler)
        keep_parameters(network, is_read_by_step)
        self.low_rank = add_low_rank_inputs(network, rank) if LORA in self.features else None

    @property
    def code_name(self) -> str:
        """The name of the module in engine keys, as in releases whose builder had a class for each set of features."""
        if self.bands > 1:
            return "BandUnetNetwork"
        return _CODE_NAMES.get(self.features) or "+".join(["StepUnet", *(f for f in FEATURES if f in self.features)])

    def forward(self, sample: Tensor, time_embeds: Tensor, keys_values: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        images = more[:3] if IMAGE_PROMPT in self.features else ()
        residuals = more[len(images) :]
        if self.low_rank is not None:
            *others, self.low_rank.vectors.down, self.low_rank.vectors.up = residuals
            residuals = tuple(others)
        if GUIDED_ZEROS in self.features:
            half = sample.shape[0] // 2
            sample, keys_values = sample[:half], keys_values[:half]
        contexts = self.widths.contexts(keys_values, *images)
        if self.bands == 1 or is_plain():
            return (self._predict(sample, time_embeds, contexts, residuals),)
        with divided(self.bands):
            return (whole_image(self._predict(own_rows(sample, self.bands), time_embeds, contexts, residuals)),)

    def _predict(
        self, sample: Tensor, time_embeds: Tensor, contexts: Iterator["Context"], residuals: tuple[Tensor, ...]
    ) -> Tensor:
        network = self.network
        biases = self.widths.biases(time_embeds)
        skips = encode(network, convolve(network.conv_in, sample), biases, contexts)
        skips[0] = repeat_batch(skips[0], time_embeds.shape[0])
        if residuals:
            skips = [skip + residual for skip, residual in zip(skips, residuals, strict=True)]
        hidden = skips.pop()
        for block in network.up_blocks:
            for layer, transformer in _layers(block):
                hidden = resnet(layer, torch.cat([hidden, skips.pop()], dim=1), next(biases))
                hidden = _transformer(transformer, hidden, contexts)
            for upsampler in block.upsamplers or ():
                hidden = upsample(upsampler, hidden)
        return convolve(network.conv_out, F.silu(group_norm(network.conv_norm_out, hidden)))


_CODE_NAMES = {
    frozenset[str](): "UnetNetwork",
    frozenset({GUIDED_ZEROS}): "GuidedUnetNetwork",
    frozenset({CONTROL}): "ControlledUnetNetwork",
    frozenset({IMAGE_PROMPT}): "ImagePromptUnetNetwork",
    frozenset({IMAGE_PROMPT, CONTROL}): "ImagePromptUnetNetwork",
    frozenset({LORA}): "LowRankUnetNetwork",
    frozenset({LORA, GUIDED_ZEROS}): "GuidedLowRankUnetNetwork",
}


class Context(NamedTuple):
    """The inputs of a cross-attention. keys, values: of the text, [batch, tokens, width]. image: of images, or None."""

    keys: Tensor
    values: Tensor
    image: ImageContext | None = None


@dataclass(frozen=True)
class BlockWidths:
    """The widths of each ResNet block's part of `time_embeds`, and of each key and value in `keys_values`."""

    time: list[int]
    text: list[int]

    def biases(self, time_embeds: Tensor) -> Iterator[Tensor]:
        """Return the biases of the ResNet blocks, in order."""
        return iter(torch.split(time_embeds, self.time, dim=-1))

    def contexts(self, keys_values: Tensor | None = None, *images: Tensor) -> Iterator[Context]:
        """Return the keys and values of the cross-attentions, in order.

        `images`: keys, values and the bias of reference images, see `StepUnet`; nothing: without them.
        """
        parts = () if keys_values is None else torch.split(keys_values, self.text, dim=-1)
        if not images:
            return map(Context, parts[::2], parts[1::2])
        *keys_and_values, bias = images
        keys, values = (torch.split(one.flatten(1, 2), self.text[::2], dim=-1) for one in keys_and_values)
        of_images = (ImageContext(*pair, bias) for pair in zip(keys, values, strict=True))
        return map(Context, parts[::2], parts[1::2], of_images)


def prepare_blocks(network: Any, use_winograd: bool) -> BlockWidths:
    """Write the blocks of a UNet or ControlNet in the form that `encode` and `StepUnet` run."""
    time = [block.time_emb_proj.out_features for block in resnets(network)]
    text = [block.attn2.to_k.out_features for block in transformer_blocks(network) for _ in ("keys", "values")]
    for transformer in transformers(network):
        transformer.proj_in, transformer.proj_out = map(_as_linear, (transformer.proj_in, transformer.proj_out))
    for block in transformer_blocks(network):
        _fuse_queries_keys_values(block.attn1)
        _interleave_gates(block.ff.net[0])
    for block in resnets(network) if use_winograd else ():
        replace_wide_convs(block)
    return BlockWidths(time, text)


def encode(network: Any, hidden: Tensor, biases: Iterator[Tensor], contexts: Iterator[Context]) -> list[Tensor]:
    """Run the down blocks and the middle block of a UNet or ControlNet on the convolved latents.

    Returns `hidden` and the result of each layer, which skip connections read, and last the middle block's. The batch
    of `hidden` may be smaller than the batch of the biases (see `resnet`).
    """
    results = [hidden]
    for block in network.down_blocks:
        for layer, transformer in _layers(block):
            hidden = _transformer(transformer, resnet(layer, hidden, next(biases)), contexts)
            results.append(hidden)
        for downsampler in block.downsamplers or ():
            hidden = convolve(downsampler.conv, hidden)
            results.append(hidden)
    middle = network.mid_block
    hidden = resnet(middle.resnets[0], hidden, next(biases))
    for layer, transformer in zip(middle.resnets[1:], middle.attentions, strict=True):
        hidden = resnet(layer, _transformer(transformer, hidden, contexts), next(biases))
    return [*results, hidden]


def is_read_by_step(name: str) -> bool:
    return not name.startswith(_TIME_PARAMETERS) and not any(part in name for part in _TEXT_AND_TIME_PROJECTIONS)


def time_width(network: Any) -> int:
    """Return the width of `time_embeds`."""
    return sum(int(block.time_emb_proj.out_features) for block in resnets(network))


def text_width(network: Any) -> int:
    """Return the width of `keys_values`."""
    return 2 * sum(int(block.attn2.to_k.out_features) for block in transformer_blocks(network))


def resnets(network: Any) -> Iterator[Any]:
    """Yield every ResNet block in the order of the forward pass."""
    for block in _blocks(network):
        yield from block.resnets


def transformers(network: Any) -> Iterator[Any]:
    """Yield every transformer in the order of the forward pass."""
    for block in _blocks(network):
        yield from getattr(block, "attentions", None) or ()


def transformer_blocks(network: Any) -> Iterator[Any]:
    """Yield every transformer block in the order of the forward pass."""
    for transformer in transformers(network):
        yield from transformer.transformer_blocks


def _blocks(network: Any) -> tuple[Any, ...]:
    """Return the blocks of a UNet, or of a ControlNet, which has no up blocks."""
    return (*network.down_blocks, network.mid_block, *getattr(network, "up_blocks", ()))


def residual_shapes(network: Any, vae_scale: int) -> tuple[tuple[int, int], ...]:
    """Return the channels of each result of `encode`, and the pixels of an image for each element's side."""
    shapes = [(int(network.conv_in.out_channels), vae_scale)]
    for block in network.down_blocks:
        shapes += [(int(layer.conv2.out_channels), shapes[-1][1]) for layer in block.resnets]
        shapes += [(int(layer.conv.out_channels), 2 * shapes[-1][1]) for layer in block.downsamplers or ()]
    return (*shapes, shapes[-1])


def keep_parameters(network: nn.Module, is_read: Callable[[str], bool]) -> None:
    """Drop every parameter unless `is_read(name)`. An engine has one constant for each remaining parameter."""
    for name, _ in list(network.named_parameters()):
        if not is_read(name):
            path, _, leaf = name.rpartition(".")
            setattr(network.get_submodule(path), leaf, None)


def _layers(block: Any) -> Iterable[tuple[Any, Any]]:
    """Return the ResNet blocks of a UNet block, each with the transformer after it or None."""
    transformers = getattr(block, "attentions", None) or [None] * len(block.resnets)
    return zip(block.resnets, transformers, strict=True)


def _transformer(transformer: Any, hidden: Tensor, contexts: Iterator[Context]) -> Tensor:
    """Run a transformer, or return `hidden` if it is None. `contexts` has what each of its blocks attends to."""
    if transformer is None:
        return hidden
    batch, channels, height, width = hidden.shape
    tokens = group_norm(transformer.norm, hidden).permute(0, 2, 3, 1).reshape(batch, height * width, channels)
    tokens = transformer.proj_in(tokens)
    for block in transformer.transformer_blocks:
        attention = block.attn1
        fused, to_out = attention.to_qkv(block.norm1(tokens)), attention.to_out[0]
        tokens = tokens + to_out(self_attention(fused, attention.heads, input_scale(to_out)))
        tokens = _add_cross_attention(block.attn2, tokens, block.norm2(tokens), next(contexts))
        tokens = tokens + feed_forward(block.ff.net[0].interleaved, block.ff.net[2], block.norm3(tokens))
    return tokens_to_pixels(transformer.proj_out(tokens), hidden) + hidden


def _add_cross_attention(attention: Any, tokens: Tensor, normed: Tensor, context: Context) -> Tensor:
    """Return `tokens` plus cross-attention of `normed`. Entries beyond the batch of the keys are unconditional.

    Attention to zeros is zero, so only the bias of the output projection is added to them. With reference images, all
    entries are conditional.
    """
    keys, values, image = context
    projection, conditional = attention.to_out[0], keys.shape[0]
    if conditional == 0:
        return tokens + cast(Tensor, projection.bias)
    queries = attention.to_q(normed[:conditional])
    mixed: Tensor = projection(cross_attention(queries, keys, values, attention.heads, input_scale(projection), image))
    if conditional == tokens.shape[0]:
        return tokens + mixed
    return torch.cat([tokens[:conditional] + mixed, tokens[conditional:] + projection.bias])


def _as_linear(projection: Any) -> nn.Linear:
    """Return a projection of each pixel as a Linear. Older models have it as a convolution with a 1x1 kernel."""
    if isinstance(projection, nn.Linear):
        return projection
    linear = nn.Linear(projection.in_channels, projection.out_channels, device="meta")
    linear.weight = nn.Parameter(projection.weight.flatten(1), requires_grad=False)
    linear.bias = nn.Parameter(projection.bias, requires_grad=False)
    return linear


def _fuse_queries_keys_values(attention: Any) -> None:
    """Fuse `to_q`, `to_k` and `to_v` of a self-attention into `to_qkv`."""
    attention.to_qkv = concat_linears([attention.to_q, attention.to_k, attention.to_v])
    attention.to_q = attention.to_k = attention.to_v = None


def group_linears(linears: Iterable[nn.Linear]) -> Iterator[list[nn.Linear]]:
    """Group `linears` in order, so that the concatenated weights of a group fit into a blob in any precision."""
    group: list[nn.Linear] = []
    weights = 0
    for linear in linears:
        if group and weights + linear.weight.numel() > _MAX_WEIGHTS:
            yield group
            group, weights = [], 0
        group.append(linear)
        weights += linear.weight.numel()
    if group:
        yield group


def _interleave_gates(widening: Any) -> None:
    """Replace `proj` (values, then gates) by `interleaved`, which has each value next to its gate for `geglu`."""
    widening.interleaved = nn.Linear(widening.proj.in_features, widening.proj.out_features, device="meta")
    for name in ("weight", "bias"):
        alternating = getattr(widening.proj, name).unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1).contiguous()
        setattr(widening.interleaved, name, nn.Parameter(alternating, requires_grad=False))
    widening.proj = None
