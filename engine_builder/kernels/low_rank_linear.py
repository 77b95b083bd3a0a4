"""Linears with a low-rank change for each entry of the batch: y = x W^T + b + (x D^T) U.

D [rank, in] and U [rank, out] are parts of two input vectors of the network (model/adapters/packing.py). Zeros change
nothing. Weights have their names in the plain network, so both networks share one copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_builder.kernels.kernel_form import has_half_kernels
from model.adapters.layers import find_layers
from model.adapters.packing import PackedLayer, Packing, make_packing
from model.pipeline.spec import UNET

LOW_RANK_VERSION = 2  # part of the keys of engines with these linears. Raise it when their code changes
_MIN_OUTPUTS = 2**24  # of a product. In smaller ones the kernel leaves multiprocessors without a tile; not measured


@dataclass(frozen=True)
class LowRankInputs:
    """The packing of the low-rank changes of a network's linears in its inputs, and the inputs of the current call."""

    packing: Packing
    vectors: "LowRankVectors"


def add_low_rank_inputs(network: nn.Module, rank: int) -> LowRankInputs:
    """Replace each linear of a UNet that adapters may change by a `LowRankLinear`. Weights keep their names."""
    shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    packing, vectors = make_packing(find_layers({UNET: shapes}), rank), LowRankVectors()
    for tensor, places in groupby(packing.layers, key=lambda place: place.layer.tensor):
        path, _, name = tensor.removesuffix(".weight").rpartition(".")
        parent: Any = network.get_submodule(path)
        changed = LowRankLinear(getattr(parent, name), tuple(places), rank, vectors)
        if name.isdecimal():
            parent[int(name)] = changed
        else:
            setattr(parent, name, changed)
    return LowRankInputs(packing, vectors)


class LowRankVectors:
    """The inputs of the current call, which all linears read. Not a tensor attribute: an export would refuse that."""

    down: Tensor
    up: Tensor


class LowRankLinear(nn.Module):
    """A linear with a low-rank change for each batch entry. It has one part for each layer that shares the weight."""

    def __init__(self, linear: nn.Linear, parts: Sequence[PackedLayer], rank: int, vectors: LowRankVectors) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._parts, self._rank, self._vectors = parts, rank, vectors

    def forward(self, inputs: Tensor) -> Tensor:
        """[batch, tokens, in] -> [batch, tokens, out]. The inputs may be the batch's first entries only."""
        narrow = self.narrow(inputs)
        if self.has_kernel(inputs):
            from engine_builder.kernels import attention_kernels as kernels

            out: Tensor = kernels.low_rank_linear(
                inputs.contiguous(), self.weight, self.bias, narrow, self.up(), len(self._parts)
            )
            return out
        changes = []
        for index, part in enumerate(self._parts):
            out_features = part.layer.shape[0]
            up = self._vectors.up[: inputs.shape[0], part.up : part.up + self._rank * out_features]
            of_part = narrow[..., index * self._rank : (index + 1) * self._rank]
            changes.append(torch.bmm(of_part, up.reshape(inputs.shape[0], self._rank, out_features)))
        change = torch.cat(changes, -1) if len(changes) > 1 else changes[0]
        return F.linear(inputs, self.weight, self.bias) + change

    def has_kernel(self, inputs: Tensor) -> bool:
        """True if kernels add the change in the product: a separate change reads and writes all outputs again."""
        if not has_half_kernels(inputs):
            return False
        batch, tokens, inner = inputs.shape
        widths = {part.layer.shape[0] for part in self._parts}
        fits = tokens % 128 == 0 and inner % 64 == 0 and self._rank % 16 == 0
        is_large = batch * tokens * self.out_features >= _MIN_OUTPUTS
        # The compute capabilities of `blocks.geglu`.
        has_tensor_memory = torch.cuda.get_device_capability(inputs.device)[0] in (9, 10)
        return fits and len(widths) == 1 and min(widths) % 128 == 0 and is_large and has_tensor_memory

    def narrow(self, inputs: Tensor) -> Tensor:
        """[batch, tokens, in] -> x D^T, [batch, tokens, parts * rank]."""
        first, width = self._parts[0].down, len(self._parts) * self._rank
        down = self._vectors.down[: inputs.shape[0], first : first + width * self.in_features]
        return torch.bmm(inputs, down.reshape(inputs.shape[0], width, self.in_features).transpose(1, 2))

    def up(self) -> Tensor:
        """Return U of all parts, [batch, parts * rank * out / parts]. It is a part of the input, and is not copied."""
        first = self._parts[0].up
        return self._vectors.up[:, first : first + self._rank * self.out_features]
