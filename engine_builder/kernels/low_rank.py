"""A UNet whose linears take low-rank changes as inputs: each entry of the batch has its own.

y = x W^T + b becomes y = x W^T + b + (x D^T) U, where D [rank, in] and U [rank, out] are parts of two input vectors
(model/adapters/packing.py). Zeros change nothing. Weights and their names are those of the plain UNet, so both share
one copy.
"""

from itertools import groupby
from typing import Any

from torch import Tensor, nn

from engine_builder.kernels.low_rank_linear import LowRankLinear, LowRankVectors
from engine_builder.networks.unet import UnetNetwork
from model.adapters.layers import find_layers
from model.adapters.packing import Packing, make_packing
from model.pipeline.spec import UNET


class LowRankUnetNetwork(UnetNetwork):
    """The inputs of `UnetNetwork`, lora_down [batch, width] and lora_up [batch, width] -> predicted noise."""

    def __init__(self, network: Any, rank: int, use_winograd: bool = False) -> None:
        super().__init__(network, use_winograd)
        self.packing = _packing_of(network, rank)
        self._vectors = LowRankVectors()
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


class GuidedLowRankUnetNetwork(LowRankUnetNetwork):
    """Both halves of guidance against zeros in one call, as `GuidedUnetNetwork`. Each half has the same adapters."""

    def forward(  # type: ignore[override]
        self, sample: Tensor, time_embeds: Tensor, keys_values: Tensor, lora_down: Tensor, lora_up: Tensor
    ) -> tuple[Tensor, ...]:
        half = sample.shape[0] // 2
        return super().forward(sample[:half], time_embeds, keys_values[:half], lora_down, lora_up)


def _packing_of(network: nn.Module, rank: int) -> Packing:
    shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    return make_packing(find_layers({UNET: shapes}), rank)
