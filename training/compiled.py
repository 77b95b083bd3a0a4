"""Compiling what learns, without rounding what its group norms need on the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Function = TypeVar("Function", bound=Callable[..., object])


class WideGroupNorm(nn.GroupNorm):
    """A group norm that is computed in float32 when it is compiled, whatever its input is.

    PyTorch's compiler takes the norm apart (torch._refs.native_group_norm) and keeps the mean and the deviation, which
    the gradient is made of, in the input's dtype: eight bits of bfloat16. Eager PyTorch keeps them in float32.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().forward(input)
        weight, bias = (None if p is None else p.float() for p in (self.weight, self.bias))
        return F.group_norm(input.float(), self.num_groups, weight, bias, self.eps).to(input.dtype)


def widen_group_norms(networks: nn.Module) -> None:
    """Makes every group norm in `networks` a WideGroupNorm; weights and their names stay."""
    for module in networks.modules():
        if type(module) is nn.GroupNorm:
            module.__class__ = WideGroupNorm


def compiled(function: Function, networks: nn.Module) -> Function:
    """`function`, which runs `networks`, compiled for each shape that it is called with."""
    widen_group_norms(networks)
    return torch.compile(function, dynamic=False)
