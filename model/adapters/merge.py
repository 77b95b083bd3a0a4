"""Merge adapters into weights on the device, in place, and restore the weights exactly.

Engines and CUDA graphs read weights at fixed addresses, so a changed weight needs no new engine and no new capture. A
copy of each weight that an offered adapter changes is kept. Every merge begins with that copy, so rounding errors do
not add up: W + scale_1 * up_1 @ down_1 + ... is computed in fp32 and rounded once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from model.adapters.layers import Layer
from model.weights.fp8 import quantize
from model.weights.transforms import phase_weights, restore_winograd, winograd_weight

Weights = Mapping[str, Sequence[Mapping[str, torch.Tensor]]]
"""Component -> its tensors by name, once for each set of weights (of a precision, or of an engine)."""


@dataclass(frozen=True)
class Factors:
    """The change of one layer: scale * (up @ down).

    down: float32 [rank, in] or [rank, in, height, width]. up: float32 [out, rank]. Both on the device.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float


AdapterFactors = Mapping[str, Factors]
"""The change that an adapter makes, by layer."""


@dataclass(frozen=True, eq=False)
class _Region:
    """A layer's part of one tensor on the device.

    weight: the part that engines read, [out, in] or [parts, out, in]. base: the same part of the copy. original: of an
    8-bit weight, the part in 16 bits or more that it was quantized from. scale: of an 8-bit weight; one number, or of
    each output.
    """

    layer: Layer
    tensor: torch.Tensor
    weight: torch.Tensor
    base: torch.Tensor
    original: torch.Tensor | None = None
    scale: torch.Tensor | None = None


class AdaptableWeights:
    """The weights of a model that adapters may change. Used from one thread, on its current stream."""

    def __init__(
        self,
        weights: Weights,
        layers: Iterable[Layer],
        originals: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
        on_host: bool = False,
    ) -> None:
        """Copy the weights of `layers`. `originals`: of components with 8-bit weights, those in 16 bits or more.

        on_host: keep the copies in page-locked host memory, which makes a merge slower.
        """
        self._on_host = on_host
        self._regions: dict[str, list[_Region]] = {}
        self._changed: set[str] = set()
        self.copied_bytes = 0
        copies: dict[int, torch.Tensor] = {}
        for layer in layers:
            regions = self._regions.setdefault(layer.name, [])
            seen: set[int] = set()
            for tensors in weights[layer.component]:
                tensor = tensors.get(layer.tensor)
                if tensor is None or tensor.data_ptr() in seen:
                    continue  # an encoder's last layer, or a variant with the same weights
                seen.add(tensor.data_ptr())
                if tensor.data_ptr() not in copies:
                    copies[tensor.data_ptr()] = self._copy(tensor)
                base = _part(copies[tensor.data_ptr()], layer)
                if tensor.dtype == torch.float8_e4m3fn:
                    assert originals is not None
                    original = _part(_like(originals[layer.component][layer.tensor], tensor), layer)
                    scale = tensors[layer.tensor + "_scale"]
                    if scale.ndim:  # of a convolution
                        scale = scale.view(*original.shape[:-1], 1)
                    regions.append(_Region(layer, tensor, _part(tensor, layer), base, original, scale))
                else:
                    regions.append(_Region(layer, tensor, _part(tensor, layer), base))

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        self.copied_bytes += tensor.nbytes
        copy = tensor.detach().clone(memory_format=torch.preserve_format)
        if self._on_host:
            # `pin_memory` keeps no strides, and the physical form is contiguous.
            host = _physical(copy).cpu()
            host = host.pin_memory() if tensor.is_cuda else host
            return host.permute(0, 3, 1, 2) if _is_channels_last(copy) else host
        return copy

    @torch.inference_mode()
    def merge(self, adapters: Sequence[tuple[AdapterFactors, float]]) -> None:
        """Set the weights to those of the model, changed by these adapters, each with its scale.

        The work is queued on the current stream. Without adapters the weights are exactly the model's. After an error
        the next merge overwrites them.
        """
        needed = {name for factors, _ in adapters for name in factors}
        self._changed |= needed  # the next merge writes all of them, also if an error ends this one
        for name in self._changed:
            changes = [(factors[name], scale) for factors, scale in adapters if name in factors]
            for region in self._regions.get(name, ()):
                _write(region, changes)
        self._changed = needed


def copied_bytes(weights: Weights, layers: Iterable[Layer]) -> int:
    """Return the bytes that `AdaptableWeights` copies."""
    tensors = {
        tensor.data_ptr(): tensor.nbytes
        for layer in layers
        for by_name in weights[layer.component]
        if (tensor := by_name.get(layer.tensor)) is not None
    }
    return sum(tensors.values())


def _write(region: _Region, changes: Sequence[tuple[Factors, float]]) -> None:
    weight = region.weight
    if not changes:
        weight.copy_(region.base, non_blocking=True)
        return
    delta: torch.Tensor | None = None
    for factors, scale in changes:
        down, up = _in_layout(factors, region)
        product, alpha = torch.matmul(up, down), factors.scale * scale
        delta = product.mul_(alpha) if delta is None else delta.add_(product, alpha=alpha)
    assert delta is not None
    if region.original is not None:
        assert region.scale is not None
        weight.copy_(quantize(region.original.float() + delta, region.scale))
    else:
        torch.add(region.base.to(weight.device, non_blocking=True), delta, out=weight)


def _in_layout(factors: Factors, region: _Region) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factors (down, up) whose product has the shape and the order of `region.weight`.

    All layouts transform a convolution's rows and columns only, and so only `down`.
    """
    down, up, name = factors.down, factors.up, region.layer.tensor
    if name.endswith(".interleaved.weight"):
        return down, up.reshape(2, -1, up.shape[1]).transpose(0, 1).flatten(0, 1)
    if region.tensor.ndim == 3:
        return winograd_weight(down), up
    rank = down.shape[0]
    if name.endswith(".phases.weight"):
        down = phase_weights(down)  # [4 rank, in, 2, 2]
    if down.ndim == 4 and _is_channels_last(region.tensor):
        down = down.permute(0, 2, 3, 1)
    down = down.flatten(1)
    return (down.view(4, rank, -1) if name.endswith(".phases.weight") else down), up


def _part(tensor: torch.Tensor, layer: Layer) -> torch.Tensor:
    """View a layer's part of its tensor as [out, in], or as [parts, out, in] of Winograd's weights and of phases."""
    stored = _physical(tensor)
    if layer.tensor.endswith(".phases.weight"):
        return stored.view(4, layer.shape[0], -1)
    if tensor.ndim == 3:
        return stored
    return stored[layer.start : layer.start + layer.shape[0]].view(layer.shape[0], -1)


def _like(original: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the weight that an 8-bit weight was quantized from, in its form. Engines in fp16 may have Winograd's."""
    if original.ndim == 3 and tensor.ndim == 4:
        original = restore_winograd(original)
        return original.contiguous(memory_format=torch.channels_last) if _is_channels_last(tensor) else original
    return original


def _physical(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor with its dimensions in the order of its memory."""
    return tensor.permute(0, 2, 3, 1) if _is_channels_last(tensor) else tensor


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 4 and not tensor.is_contiguous()
