"""torch.compile for training, without losing the precision of group norms in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Function = TypeVar("Function", bound=Callable[..., object])


class Float32GroupNorm(nn.GroupNorm):
    """A group norm that is computed in float32 when compiled, whatever the dtype of its input.

    PyTorch's compiler decomposes the norm (torch._refs.native_group_norm). It keeps the mean and the deviation, which
    the gradient uses, in the input's dtype: bfloat16 has only eight bits. Eager PyTorch keeps them in float32.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().forward(input)
        weight, bias = (None if p is None else p.float() for p in (self.weight, self.bias))
        return F.group_norm(input.float(), self.num_groups, weight, bias, self.eps).to(input.dtype)


def use_float32_group_norms(networks: nn.Module) -> None:
    """Change every group norm in `networks` to a Float32GroupNorm in place. Weights and their names stay."""
    for module in networks.modules():
        if type(module) is nn.GroupNorm:
            module.__class__ = Float32GroupNorm


def compile_function(function: Function, networks: nn.Module, backend: str = "inductor") -> Function:
    """Compile `function`, which runs `networks`, for each shape of its inputs.

    backend: as in torch.compile.
    """
    use_float32_group_norms(networks)
    return torch.compile(function, dynamic=False, backend=backend)
