"""A UNet whose linears take low-rank changes as inputs: each entry of the batch has its own.

y = x W^T + b becomes y = x W^T + b + (x D^T) U, where D [rank, in] and U [rank, out] are parts of two input vectors
(model/adapters/packing.py). Zeros change nothing. Weights and their names are those of the plain UNet, so both share
one copy.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_builder.networks.unet import UnetNetwork
from model.adapters.layers import find_layers
from model.adapters.packing import PackedLayer, Packing, make_packing
from model.pipeline.spec import UNET


class _Vectors:
    """The inputs of the current call, which all linears read. Not a tensor attribute: an export would refuse that."""

    down: Tensor
    up: Tensor


class LowRankLinear(nn.Module):
    """A linear with a low-rank change for each batch entry. It has one part for each layer that shares the weight."""

    def __init__(self, linear: nn.Linear, parts: Sequence[PackedLayer], rank: int, vectors: _Vectors) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._parts, self._rank, self._vectors = parts, rank, vectors

    def forward(self, inputs: Tensor) -> Tensor:
        """[batch, tokens, in] -> [batch, tokens, out]."""
        entries, rank = inputs.shape[0], self._rank
        down_at, width = self._parts[0].down, len(self._parts) * rank
        down = self._vectors.down[:, down_at : down_at + width * self.in_features]
        narrow = torch.bmm(inputs, down.reshape(entries, width, self.in_features).transpose(1, 2))
        changes = []
        for index, part in enumerate(self._parts):
            out = part.layer.shape[0]
            up = self._vectors.up[:, part.up : part.up + rank * out].reshape(entries, rank, out)
            changes.append(torch.bmm(narrow[..., index * rank : (index + 1) * rank], up))
        change = torch.cat(changes, -1) if len(changes) > 1 else changes[0]
        return F.linear(inputs, self.weight, self.bias) + change


class LowRankUnetNetwork(UnetNetwork):
    """The inputs of `UnetNetwork`, lora_down [batch, width] and lora_up [batch, width] -> predicted noise."""

    def __init__(self, network: Any, rank: int, use_winograd: bool = False) -> None:
        super().__init__(network, use_winograd)
        self.packing = _packing_of(network, rank)
        self._vectors = _Vectors()
        for tensor, places in groupby(self.packing.layers, key=lambda place: place.layer.tensor):
            path, _, name = tensor.removesuffix(".weight").rpartition(".")
            parent = network.get_submodule(path)
            changed = LowRankLinear(getattr(parent, name), tuple(places), rank, self._vectors)
            if name.isdecimal():
                parent[int(name)] = changed
            else:
                setattr(parent, name, changed)

    def forward(  # type: ignore[override]
        self, sample: Tensor, time_embeds: Tensor, keys_values: Tensor, lora_down: Tensor, lora_up: Tensor
    ) -> tuple[Tensor, ...]:
        self._vectors.down, self._vectors.up = lora_down, lora_up
        return super().forward(sample, time_embeds, keys_values)


def _packing_of(network: nn.Module, rank: int) -> Packing:
    shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    return make_packing(find_layers({UNET: shapes}), rank)
