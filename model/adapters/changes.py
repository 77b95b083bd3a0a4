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
    def is_decomposed(self) -> bool:
        """True for DoRA."""
        return MAGNITUDE in self.parts

    @property
    def depends_on_weight(self) -> bool:
        """True for DoRA and (IA)3, whose change is of the model's own weight."""
        return self.is_decomposed or GAIN in self.parts


AdapterChanges = Mapping[str, Change]
"""The changes that an adapter makes, by layer."""


def difference(change: Change, scale: float, weight: torch.Tensor | None) -> torch.Tensor:
    """Return what to add to a weight [out, in, ...] in the layout of the checkpoint.

    scale: of the request. weight: the model's own, float32; it is read if the change depends on it.
    """
    if change.is_decomposed:
        assert weight is not None
        return decomposed(change, scale, weight).sub_(weight)
    factor = change.scale * scale
    if GAIN in change.parts:
        assert weight is not None
        return weight * _along(change.parts[GAIN], weight) * factor
    return _product(change) * factor


def decomposed(change: Change, scale: float, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [out, in, ...] that DoRA has changed (Liu et al. 2024, arXiv 2402.09353), a new tensor.

    It gives each output, or each input, a magnitude m: W' = m (W + s D) / |W + s D|. The scale s is inside, as in PEFT.
    """
    magnitude, factor = change.parts[MAGNITUDE], change.scale * scale
    if "up" in change.parts:
        up, down = change.parts["up"], change.parts["down"]
        moved = torch.addmm(weight.flatten(1), up, down.flatten(1), alpha=factor).view(weight.shape)
    else:
        moved = (_product(change) * factor).view(weight.shape).add_(weight)
    summed = [dim for dim in range(moved.ndim) if dim >= magnitude.ndim or magnitude.shape[dim] == 1]
    norm = torch.linalg.vector_norm(moved, dim=summed, keepdim=True).clamp_(min=_SMALLEST_NORM)
    return moved.mul_(_along(magnitude, moved) / norm)


def scale_of(scale: Scale, layer: str) -> float:
    """Return a request's scale of one layer. A scale by block has entries (start of the layers' names, number)."""
    if isinstance(scale, float | int):
        return scale
    return next((number for start, number in scale if layer.startswith(start)), 1.0)


def _product(change: Change) -> torch.Tensor:
    """Return what a change's matrices make. It may be one of the parts, so it is not to be changed."""
    form = FORMS[change.form]
    made: torch.Tensor = form.difference(*(_matrix(change.parts, prefix) for prefix in form.prefixes))
    return made


def _matrix(parts: Mapping[str, torch.Tensor], prefix: str) -> torch.Tensor:
    full = parts.get(f"{prefix}full")
    if full is not None:
        return full
    up, down = parts[f"{prefix}up"], parts[f"{prefix}down"]
    return (up @ down.flatten(1)).view(up.shape[0], *down.shape[1:])


def _along(vector: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """View [out, 1] or [1, in] so that it broadcasts with a weight."""
    return vector.view(*vector.shape, *(1,) * (weight.ndim - 2))
