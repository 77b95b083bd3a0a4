"""Gather the inputs of a step's network by name, for both loops."""

from collections.abc import Callable

import torch

from model.engines.shapes import DTYPES
from model.store.manifest import Signature, TensorSpec

TensorOf = Callable[[TensorSpec, str], torch.Tensor]
"""Returns the tensor [batch, ...] of an input, from its entry in the signature and its name in a conditioning."""


def gather_inputs(signature: Signature, tensor_of: TensorOf, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return a network's inputs by name, in its dtypes. `prefix`: of their names in a conditioning."""
    return {spec.name: tensor_of(spec, prefix + spec.name).to(DTYPES[spec.dtype]) for spec in signature.inputs}


def repeat_tokens(keys_values: torch.Tensor, tokens: int) -> torch.Tensor:
    """Repeat the keys and values of a text [own tokens, width] until they are `tokens`, a multiple of their number.

    Attention to keys that are all repeated equally often is attention to them once: each weight of the softmax is
    divided among the copies. So texts of different lengths share a batch without a mask.
    """
    assert tokens % len(keys_values) == 0
    return keys_values if len(keys_values) == tokens else keys_values.repeat(tokens // len(keys_values), 1)
