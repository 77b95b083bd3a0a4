"""What an adapter does to a weight on the device, in fp32."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from model.adapters.layers import Scale
from model.store.adapter_forms import FACTORS, FORMS, GAIN, MAGNITUDE

_SMALLEST_NORM = 1e-12


@dataclass(frozen=True)
class Change:
    """The change of one tensor: `scale` times what the parts make, see `model.store.adapter_forms`.

    parts: on one device, in float32 where they are used. Those of a LoRA are "down", [rank, in] or
    [rank, in, height, width], and "up", [out, rank].
    """

    form: str
    parts: Mapping[str, torch.Tensor]
    scale: float

    def in_float(self) -> "Change":
        """Return the change with its parts in float32."""
        return replace(self, parts={name: part.float() for name, part in self.parts.items()})

    @property
    def is_low_rank(self) -> bool:
        """True for a plain LoRA: the product of two factors, whatever the weight is."""
        return self.parts.keys() == FACTORS

    @property
    def depends_on_weight(self) -> bool:
        """True for DoRA and (IA)3, whose change is of the model's own weight."""
        return MAGNITUDE in self.parts or GAIN in self.parts


AdapterChanges = Mapping[str, Change]
"""The changes that an adapter makes, by layer."""


def difference(change: Change, scale: float, weight: torch.Tensor | None) -> torch.Tensor:
    """Return what to add to a weight [out, in, ...] in the layout of the checkpoint.

    scale: of the request. weight: the model's own, float32; it is read if the change depends on it. DoRA (Liu et al.
    2024, arXiv 2402.09353) gives each output, or each input, a magnitude m: W' = m (W + s D) / |W + s D|. The scale is
    inside, as in PEFT.
    """
    factor = change.scale * scale
    if GAIN in change.parts:
        assert weight is not None
        return weight * _along(change.parts[GAIN], weight) * factor
    form = FORMS[change.form]
    added: torch.Tensor = form.difference(*(_matrix(change.parts, prefix) for prefix in form.prefixes)) * factor
    if (magnitude := change.parts.get(MAGNITUDE)) is None:
        return added
    assert weight is not None
    moved = added.view(weight.shape).add_(weight)
    summed = [dim for dim in range(moved.ndim) if dim >= magnitude.ndim or magnitude.shape[dim] == 1]
    norm = torch.linalg.vector_norm(moved, dim=summed, keepdim=True).clamp_(min=_SMALLEST_NORM)
    return moved.mul_(_along(magnitude, moved) / norm).sub_(weight)


def scale_of(scale: Scale, layer: str) -> float:
    """Return a request's scale of one layer. A scale by block has entries (start of the layers' names, number)."""
    if isinstance(scale, float | int):
        return scale
    return next((number for start, number in scale if layer.startswith(start)), 1.0)


def _matrix(parts: Mapping[str, torch.Tensor], prefix: str) -> torch.Tensor:
    full = parts.get(f"{prefix}full")
    if full is not None:
        return full
    up, down = parts[f"{prefix}up"], parts[f"{prefix}down"]
    return (up @ down.flatten(1)).view(up.shape[0], *down.shape[1:])


def _along(vector: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """View [out, 1] or [1, in] so that it broadcasts with a weight."""
    return vector.view(*vector.shape, *(1,) * (weight.ndim - 2))
