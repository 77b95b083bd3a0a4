"""CLIP's text encoders: tokens in, what SDXL's UNets read of them out."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_builder.networks.blocks import beside


class TextNetwork(nn.Module):
    """CLIP without projection: input_ids [rows, tokens] -> penultimate hidden states [rows, tokens, width]."""

    def __init__(self, network: nn.Module) -> None:
        from transformers.models.clip.modeling_clip import CLIPAttention

        super().__init__()
        self.network = network
        for module in list(network.modules()):
            for name, child in module.named_children():
                if isinstance(child, CLIPAttention):
                    setattr(module, name, _SelfAttention(child))

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        output = self.network(input_ids, output_hidden_states=True, return_dict=True)
        return (output.hidden_states[-2],)


class PooledTextNetwork(TextNetwork):
    """CLIP with projection: also the pooled projection of the first end-of-text token, [rows, pooled width]."""

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        output = self.network(input_ids, output_hidden_states=True, return_dict=True)
        return output.hidden_states[-2], output.text_embeds


class _SelfAttention(nn.Module):
    """A CLIPAttention of tokens to those before them, with one product for queries, keys and values.

    A text's tokens are few: on a GPU each product takes longer to start than to compute.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.heads = attention.num_heads
        self.to_qkv = beside([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out_proj = attention.out_proj

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """`hidden_states` [rows, tokens, width] -> the same shape, and no weights. A mask of which tokens count, which
        SDXL has none of, is not read."""
        fused = self.to_qkv(hidden_states).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = fused.transpose(1, 3).unbind(2)  # each [rows, heads, tokens, width of a head]
        if hidden_states.is_cuda:
            mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        else:  # and in ONNX, where a mask that is a constant needs no operator that TensorRT's parser may lack
            place = torch.arange(hidden_states.shape[1], device=hidden_states.device)
            mixed = F.scaled_dot_product_attention(queries, keys, values, place[:, None] >= place)
        return self.out_proj(mixed.transpose(1, 2).flatten(2)), None
