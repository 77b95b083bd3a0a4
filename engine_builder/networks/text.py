"""CLIP's text encoders: token ids in, the outputs that UNets read out."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_builder.networks.blocks import concat_linears
from engine_builder.networks.onnx_form import is_for_onnx


class TextNetwork(nn.Module):
    """CLIP without projection: input_ids [batch, tokens] -> penultimate hidden states [batch, tokens, width].

    A 1 in column k of clip_skip [batch, layers] selects the states of k layers earlier.
    """

    def __init__(self, network: nn.Module) -> None:
        from transformers.models.clip.modeling_clip import CLIPAttention

        super().__init__()
        self.network = network
        for module in list(network.modules()):
            for name, child in module.named_children():
                if isinstance(child, CLIPAttention):
                    setattr(module, name, _SelfAttention(child))

    def forward(self, input_ids: Tensor, clip_skip: Tensor) -> tuple[Tensor, ...]:
        output = self.network(input_ids, output_hidden_states=True, return_dict=True)
        return (_select(output.hidden_states[:-1], clip_skip),)


class FinalTextNetwork(TextNetwork):
    """CLIP without projection. It returns the last hidden states, or earlier ones, after the final layer norm."""

    def forward(self, input_ids: Tensor, clip_skip: Tensor) -> tuple[Tensor, ...]:
        output = self.network(input_ids, output_hidden_states=True, return_dict=True)
        final_layer_norm = cast(nn.LayerNorm, self.network.final_layer_norm)
        return (final_layer_norm(_select(output.hidden_states[1:], clip_skip)),)


LARGEST_ID = 2
"""`eos_token_id` of a config that means the largest id in a text, not a token."""


class PooledTextNetwork(TextNetwork):
    """CLIP with projection. It also returns the projection of the first end-of-text token, [batch, pooled width]."""

    def forward(self, input_ids: Tensor, clip_skip: Tensor) -> tuple[Tensor, ...]:
        output = self.network(input_ids, output_hidden_states=True, return_dict=True)
        return _select(output.hidden_states[:-1], clip_skip), output.text_embeds


def _select(states: Sequence[Tensor], clip_skip: Tensor) -> Tensor:
    """Return for each text the states whose column is 1, the last states in column 0. The result is exact."""
    selected, *earlier = reversed(states)  # each [batch, tokens, width]
    for column, of_layer in enumerate(earlier, start=1):
        selected = torch.where(clip_skip[:, column, None, None] == 1, of_layer, selected)
    return selected


def add_embedding_rows(network: Any, rows: int, end_token: int | None) -> None:
    """Add rows of zeros to the end of a text encoder's table of tokens, for embeddings of textual inversion.

    end_token: where the pooled text is read from now on, if the network reads it at the largest id in a text. With
    embeddings that is no longer the end of a text. None: as the network says.
    """
    embedding = network.get_input_embeddings()
    for module in network.modules() if end_token is not None else ():
        if getattr(module, "eos_token_id", None) == LARGEST_ID:
            module.eos_token_id = end_token
    zeros = embedding.weight.new_zeros(rows, embedding.embedding_dim)
    embedding.weight = nn.Parameter(torch.cat([embedding.weight.detach(), zeros]), requires_grad=False)
    embedding.num_embeddings += rows


class _SelfAttention(nn.Module):
    """Causal CLIPAttention with one product for queries, keys and values.

    A text has few tokens, so on a GPU a product takes longer to launch than to compute.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.heads = attention.num_heads
        self.to_qkv = concat_linears([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out_proj = attention.out_proj

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Return attention of the shape [batch, tokens, width], and None. Masks are ignored: none is passed."""
        fused = self.to_qkv(hidden_states).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = fused.transpose(1, 3).unbind(2)  # each [batch, heads, tokens, head width]
        if hidden_states.is_cuda or is_for_onnx():
            mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        else:
            position = torch.arange(hidden_states.shape[1], device=hidden_states.device)
            mixed = F.scaled_dot_product_attention(queries, keys, values, position[:, None] >= position)
        return self.out_proj(mixed.transpose(1, 2).flatten(2)), None
