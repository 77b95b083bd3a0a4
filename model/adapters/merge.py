"""Merge adapters into weights on the device, in place, and restore the weights exactly.

Engines and CUDA graphs read weights at fixed addresses, so a changed weight needs no new engine and no new capture. A
copy of each weight that an offered adapter changes is kept. Every merge begins with that copy, so rounding errors do
not add up: W + scale_1 * D_1 + ... is computed in fp32 and rounded once, for the differences D of
`model.adapters.changes`. Those that depend on the weight are of W, so their order does not matter.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from model.adapters.changes import AdapterChanges, Change, decomposed, difference, scale_of
from model.adapters.layers import Layer, Scale
from model.weights.fp8 import quantize
from model.weights.transforms import phase_weights, restore_phases, restore_winograd, winograd_weight

Weights = Mapping[str, Sequence[Mapping[str, torch.Tensor]]]
"""Component -> its tensors by name, once for each set of weights (of a precision, or of an engine)."""


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
        self._restored: list[tuple[torch.Tensor, torch.Tensor]] = []  # originals in another form, and their sources
        copies: dict[int, torch.Tensor] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # with the weights that they are of
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
                    self._copies.append((copies[tensor.data_ptr()], tensor))
                base = _part(copies[tensor.data_ptr()], layer)
                if tensor.dtype == torch.float8_e4m3fn:
                    assert originals is not None
                    source = originals[layer.component][layer.tensor]
                    like = _like(source, tensor)
                    if like is not source:
                        self._restored.append((like, source))
                    original = _part(like, layer)
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
    def merge(self, adapters: Sequence[tuple[AdapterChanges, Scale]]) -> None:
        """Set the weights to those of the model, changed by these adapters, each with its scale.

        The work is queued on the current stream. Without adapters the weights are exactly the model's. After an error
        the next merge overwrites them.
        """
        needed = {name for changes, _ in adapters for name in changes}
        self._changed |= needed  # the next merge writes all of them, also if an error ends this one
        for name in self._changed:
            changes = [(of[name], scale_of(scale, name)) for of, scale in adapters if name in of]
            changes = [(change, scale) for change, scale in changes if scale]  # 0 leaves an adapter out, also a DoRA
            for region in self._regions.get(name, ()):
                _write(region, changes)
        self._changed = needed

    @torch.inference_mode()
    def renew(self) -> None:
        """Copy the weights again, after others have replaced all of them. No adapter is merged into those."""
        for copy, tensor in self._copies:
            copy.copy_(tensor, non_blocking=True)
        for like, source in self._restored:
            like.copy_(_like(source, like))
        self._changed = set()


def copied_bytes(weights: Weights, layers: Iterable[Layer]) -> int:
    """Return the bytes that `AdaptableWeights` copies."""
    tensors = {
        tensor.data_ptr(): tensor.nbytes
        for layer in layers
        for by_name in weights[layer.component]
        if (tensor := by_name.get(layer.tensor)) is not None
    }
    return sum(tensors.values())


def _write(region: _Region, changes: Sequence[tuple[Change, float]]) -> None:
    weight = region.weight
    if not changes:
        weight.copy_(region.base, non_blocking=True)
        return
    base = region.base if region.original is None else region.original
    base = base.to(weight.device, non_blocking=True)
    own = _restored(base, region) if any(change.depends_on_weight for change, _ in changes) else None
    if own is not None and len(changes) == 1 and changes[0][0].is_decomposed:
        changed = _in_layout(decomposed(*changes[0], own), region)
        weight.copy_(changed if region.scale is None else quantize(changed, region.scale))
        return
    delta: torch.Tensor | None = None
    for change, scale in changes:
        if change.is_low_rank:
            down, up = _kernel_in_layout(change.parts["down"], region), _rows_in_layout(change.parts["up"], region)
            product, alpha = torch.matmul(up, down), change.scale * scale
        else:
            product, alpha = _in_layout(difference(change, scale, own), region), 1.0
        delta = product.mul_(alpha) if delta is None else delta.add_(product, alpha=alpha)
    assert delta is not None
    if region.original is not None:
        assert region.scale is not None
        weight.copy_(quantize(base.float() + delta, region.scale))
    else:
        torch.add(base, delta, out=weight)


def _kernel_in_layout(down: torch.Tensor, region: _Region) -> torch.Tensor:
    """Return rows [rows, in, ...] in the layout of `region.weight`, but for the order of its rows."""
    if region.tensor.ndim == 3:
        return winograd_weight(down)
    rows = down.shape[0]
    if region.layer.tensor.endswith(".phases.weight"):
        down = phase_weights(down)  # [4 rows, in, 2, 2]
    if down.ndim == 4 and _is_channels_last(region.tensor):
        down = down.permute(0, 2, 3, 1)
    down = down.flatten(1) if down.ndim > 1 else down[:, None]
    return down.view(4, rows, -1) if region.layer.tensor.endswith(".phases.weight") else down


def _rows_in_layout(rows: torch.Tensor, region: _Region) -> torch.Tensor:
    """Return outputs [out, ...] in the order of the rows of `region.weight`."""
    if _is_interleaved(region):
        return rows.reshape(2, -1, *rows.shape[1:]).transpose(0, 1).flatten(0, 1)
    return rows


def _in_layout(delta: torch.Tensor, region: _Region) -> torch.Tensor:
    """Return a difference in the layout of the checkpoint, [out, in, ...] or [out], as that of `region.weight`."""
    delta = _kernel_in_layout(_rows_in_layout(delta.view(region.layer.shape), region), region)
    return delta.expand_as(region.weight).contiguous()  # the phases have equal biases


def _restored(base: torch.Tensor, region: _Region) -> torch.Tensor:
    """Invert `_in_layout`, in float32. Winograd's weights and phases are restored up to the rounding of their sums."""
    shape, base = region.layer.shape, base.float()
    if region.tensor.ndim == 3:
        return restore_winograd(base)
    if _is_interleaved(region):
        return base.reshape(-1, 2, *base.shape[1:]).transpose(0, 1).reshape(shape)
    side = 2 if region.layer.tensor.endswith(".phases.weight") else shape[-1]
    if len(shape) == 4 and _is_channels_last(region.tensor):
        base = base.view(-1, side, side, shape[1]).permute(0, 3, 1, 2)
    elif len(shape) == 4:
        base = base.reshape(-1, shape[1], side, side)
    return restore_phases(base) if side == 2 and len(shape) == 4 else base.reshape(shape)


def _is_interleaved(region: _Region) -> bool:
    return ".interleaved." in region.layer.tensor


def _part(tensor: torch.Tensor, layer: Layer) -> torch.Tensor:
    """View a layer's part of its tensor as [out, in], or as [parts, out, in] of Winograd's weights and of phases.

    The numbers of a bias or of a norm are rows of length 1.
    """
    stored = _physical(tensor)
    if ".phases." in layer.tensor:
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
