"""SDXL's UNet in three networks: what is computed once a text, once a request, and once a step.

`UnetTextNetwork` makes the keys and values of every cross-attention from the text, `UnetTimeNetwork` every ResNet
block's bias from the timestep and the sizes, and `UnetNetwork` does the rest. Together they compute what diffusers'
`UNet2DConditionModel` computes, from the same checkpoint; each keeps only the parameters it reads.

Activations are [rows, channels, height, width] between blocks and [rows, height * width, channels] inside a
transformer. Where weights are channels_last the two are the same memory, and no copy is made between them.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_builder.networks.blocks import (
    attend_to_itself,
    attend_to_text,
    beside,
    geglu,
    group_norm,
    repeated,
    resnet,
    split_into_phases,
    upsample,
)
from engine_builder.networks.winograd import transform_wide
from model.store.manifest import BLOB_LIMIT

_WEIGHTS = BLOB_LIMIT // 5  # of one product: 4 bytes each in fp32, and room for a blob's header
_EMBEDDINGS = ("time_embedding.", "add_embedding.")
_ELSEWHERE = (".time_emb_proj.", ".attn2.to_k.", ".attn2.to_v.")  # what else a step does not read


class UnetTextNetwork(nn.Module):
    """encoder_hidden_states [rows, tokens, width] -> keys_values [rows, tokens, 2 * channels of all cross-attentions].

    Keys, then values, of each cross-attention in the order of `transformer_blocks`, as few products.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        attentions = [block.attn2 for block in transformer_blocks(network)]
        linears = [part for attention in attentions for part in (attention.to_k, attention.to_v)]
        self.keys_values = nn.ModuleList(beside(part) for part in _parts(linears))

    def forward(self, encoder_hidden_states: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat([product(encoder_hidden_states) for product in self.keys_values], dim=-1),)


class UnetTimeNetwork(nn.Module):
    """timestep [rows], text_embeds [rows, pooled], time_ids [rows, 5 or 6] -> time_embeds [rows, channels of all
    ResNet blocks]: each block's projection of the embedded time, in the order of `resnets`.

    A UNet distilled to embed guidance also takes timestep_cond [rows, time_cond_proj_dim].
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        self.biases = beside([block.time_emb_proj for block in resnets(network)])
        keep_parameters(network, lambda name: name.startswith(_EMBEDDINGS))

    def forward(
        self, timestep: Tensor, text_embeds: Tensor, time_ids: Tensor, timestep_cond: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        network, dtype = self.network, text_embeds.dtype
        embedded = network.time_embedding(network.time_proj(timestep).to(dtype), timestep_cond)
        sizes = network.add_time_proj(time_ids.flatten()).reshape(time_ids.shape[0], -1).to(dtype)
        embedded = F.silu(embedded + network.add_embedding(torch.cat([text_embeds, sizes], dim=-1)))
        return (self.biases(embedded),)


class UnetNetwork(nn.Module):
    """sample [rows, channels, height/8, width/8], time_embeds and keys_values of each row -> predicted noise."""

    def __init__(self, network: Any, by_tiles: bool = False) -> None:
        """`by_tiles`: wide convolutions in the form of `winograd`, which runs on GPUs in half precision only."""
        super().__init__()
        self.network = network
        self._time = [block.time_emb_proj.out_features for block in resnets(network)]
        self._text = [block.attn2.to_k.out_features for block in transformer_blocks(network)]
        for block in transformer_blocks(network):
            _fuse_queries_keys_values(block.attn1)
            _interleave_gates(block.ff.net[0])
        for block in network.up_blocks:
            for upsampler in block.upsamplers or ():
                split_into_phases(upsampler)
        for block in resnets(network) if by_tiles else ():
            transform_wide(block)
        keep_parameters(network, _is_read_each_step)

    def forward(self, sample: Tensor, time_embeds: Tensor, keys_values: Tensor) -> tuple[Tensor, ...]:
        network = self.network
        biases = iter(torch.split(time_embeds, self._time, dim=-1))
        texts = iter(torch.split(keys_values, [width for width in self._text for _ in ("keys", "values")], dim=-1))
        hidden = network.conv_in(sample)
        skips = [repeated(hidden, time_embeds.shape[0])]
        for block in network.down_blocks:
            for layer, transformer in _layers(block):
                hidden = _transformer(transformer, resnet(layer, hidden, next(biases)), texts)
                skips.append(hidden)
            for downsampler in block.downsamplers or ():
                hidden = downsampler.conv(hidden)
                skips.append(hidden)
        middle = network.mid_block
        hidden = resnet(middle.resnets[0], hidden, next(biases))
        for layer, transformer in zip(middle.resnets[1:], middle.attentions, strict=True):
            hidden = resnet(layer, _transformer(transformer, hidden, texts), next(biases))
        for block in network.up_blocks:
            for layer, transformer in _layers(block):
                hidden = resnet(layer, torch.cat([hidden, skips.pop()], dim=1), next(biases))
                hidden = _transformer(transformer, hidden, texts)
            for upsampler in block.upsamplers or ():
                hidden = upsample(upsampler, hidden)
        return (network.conv_out(F.silu(group_norm(network.conv_norm_out, hidden))),)


class GuidedUnetNetwork(UnetNetwork):
    """A `UnetNetwork` of an even number of rows, for guidance against nothing at all: the second half of the rows are
    the latents of the first once more, and told no text. What they are given of `sample` and `keys_values` is not read.

    Until a ResNet block adds the time, which comes with the text, both halves are the same and computed once. No text
    stands for zeros, which an encoding of zeros comes to (diffusers' `force_zeros_for_empty_prompt`), for keys and
    values have no bias. Attention to zeros is zero: only the bias of its projection is left of it.
    """

    def forward(self, sample: Tensor, time_embeds: Tensor, keys_values: Tensor) -> tuple[Tensor, ...]:
        half = sample.shape[0] // 2
        return super().forward(sample[:half], time_embeds, keys_values[:half])


class UnconditionalUnetNetwork(UnetNetwork):
    """A `UnetNetwork` of rows that are told no text at all: what they are given of `keys_values` is not read. Beside a
    `UnetNetwork` of as many rows it is the other half of guidance against nothing; `GuidedUnetNetwork` says what no
    text stands for."""

    def forward(self, sample: Tensor, time_embeds: Tensor, keys_values: Tensor) -> tuple[Tensor, ...]:
        return super().forward(sample, time_embeds, keys_values[:0])


def _is_read_each_step(name: str) -> bool:
    return not name.startswith(_EMBEDDINGS) and not any(part in name for part in _ELSEWHERE)


def time_width(network: Any) -> int:
    """The width of `time_embeds`."""
    return sum(int(block.time_emb_proj.out_features) for block in resnets(network))


def text_width(network: Any) -> int:
    """The width of `keys_values`."""
    return 2 * sum(int(block.attn2.to_k.out_features) for block in transformer_blocks(network))


def resnets(network: Any) -> Iterator[Any]:
    """Every ResNet block in the order of the forward pass."""
    for block in (*network.down_blocks, network.mid_block, *network.up_blocks):
        yield from block.resnets


def transformer_blocks(network: Any) -> Iterator[Any]:
    """Every transformer block in the order of the forward pass."""
    for block in (*network.down_blocks, network.mid_block, *network.up_blocks):
        for transformer in getattr(block, "attentions", None) or ():
            yield from transformer.transformer_blocks


def keep_parameters(network: nn.Module, wanted: Callable[[str], bool]) -> None:
    """Drop every parameter whose name `wanted(name)` refuses: an engine has a constant for each one that is left."""
    for name, _ in list(network.named_parameters()):
        if not wanted(name):
            path, _, leaf = name.rpartition(".")
            setattr(network.get_submodule(path), leaf, None)


def _layers(block: Any) -> Iterable[tuple[Any, Any]]:
    transformers = getattr(block, "attentions", None) or [None] * len(block.resnets)
    return zip(block.resnets, transformers, strict=True)


def _transformer(transformer: Any, hidden: Tensor, texts: Iterator[Tensor]) -> Tensor:
    if transformer is None:
        return hidden
    rows, channels, height, width = hidden.shape
    tokens = group_norm(transformer.norm, hidden).permute(0, 2, 3, 1).reshape(rows, height * width, channels)
    tokens = transformer.proj_in(tokens)
    for block in transformer.transformer_blocks:
        tokens = tokens + _self_attention(block.attn1, block.norm1(tokens))
        tokens = _with_cross_attention(block.attn2, tokens, block.norm2(tokens), next(texts), next(texts))
        tokens = tokens + block.ff.net[2](geglu(block.ff.net[0].interleaved, block.norm3(tokens)))
    out: Tensor = transformer.proj_out(tokens)
    return out.reshape(rows, height, width, channels).permute(0, 3, 1, 2) + hidden


def _self_attention(attention: Any, tokens: Tensor) -> Tensor:
    out: Tensor = attention.to_out[0](attend_to_itself(attention.to_qkv(tokens), attention.heads))
    return out


def _with_cross_attention(attention: Any, tokens: Tensor, normed: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`tokens` and what attention adds to them. Rows beyond those of `keys` and `values` are told no text."""
    projection, told = attention.to_out[0], keys.shape[0]
    if told == 0:
        return tokens + cast(Tensor, projection.bias)
    mixed: Tensor = projection(attend_to_text(attention.to_q(normed[:told]), keys, values, attention.heads))
    if told == tokens.shape[0]:
        return tokens + mixed
    return torch.cat([tokens[:told] + mixed, tokens[told:] + projection.bias])


def _fuse_queries_keys_values(attention: Any) -> None:
    """`to_q`, `to_k` and `to_v` of a self-attention become one `to_qkv`."""
    attention.to_qkv = beside([attention.to_q, attention.to_k, attention.to_v])
    attention.to_q = attention.to_k = attention.to_v = None


def _parts(linears: Iterable[nn.Linear]) -> Iterator[list[nn.Linear]]:
    """`linears` in order, cut where their weights beside each other would be too large for a blob, in any precision."""
    part: list[nn.Linear] = []
    weights = 0
    for linear in linears:
        if part and weights + linear.weight.numel() > _WEIGHTS:
            yield part
            part, weights = [], 0
        part.append(linear)
        weights += linear.weight.numel()
    if part:
        yield part


def _interleave_gates(widening: Any) -> None:
    """`proj`, values and then gates, becomes `interleaved`: each value beside its gate, as one kernel needs them."""
    widening.interleaved = nn.Linear(widening.proj.in_features, widening.proj.out_features, device="meta")
    for name in ("weight", "bias"):
        alternating = getattr(widening.proj, name).unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1).contiguous()
        setattr(widening.interleaved, name, nn.Parameter(alternating, requires_grad=False))
    widening.proj = None
