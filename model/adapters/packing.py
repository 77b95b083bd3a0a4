"""Adapters as inputs of a UNet: the low-rank factors of all linears in two vectors for each batch entry.

The network that takes them has one fixed rank. An image's adapters fill as much of it as they need, one after the
other, and the rest is zero. So images with different adapters, and images without any, share a batch.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from model.adapters.changes import AdapterChanges, scale_of
from model.adapters.layers import Layer, Scale
from model.engines.signatures import LORA_DOWN, LORA_UP
from model.pipeline.spec import UNET, UNET_TEXT


@dataclass(frozen=True)
class PackedLayer:
    """A linear's place in the vectors.

    down: the first element of its [rank, in] in `lora_down`. up: the first element of its [rank, out] in `lora_up`.
    """

    layer: Layer
    down: int
    up: int


@dataclass(frozen=True)
class Packing:
    """The order of all linears of a UNet's step in the vectors. `down_width`, `up_width`: elements of the vectors."""

    rank: int
    layers: tuple[PackedLayer, ...]
    down_width: int
    up_width: int


def make_packing(layers: Mapping[str, Layer], rank: int) -> Packing:
    """Return the packing of a UNet's linears. Those that share a tensor are adjacent, in the order of their rows."""
    linears = [layer for layer in layers.values() if layer.component == UNET and len(layer.shape) == 2]
    packed, down, up = [], 0, 0
    for layer in sorted(linears, key=lambda layer: (layer.tensor, layer.start)):
        packed.append(PackedLayer(layer, down, up))
        down += rank * layer.shape[1]
        up += rank * layer.shape[0]
    return Packing(rank, tuple(packed), down, up)


def rank_of(layers: Mapping[str, Layer], down_width: int) -> int:
    """Return the rank of a network whose `lora_down` has so many elements."""
    return down_width // make_packing(layers, 1).down_width


def can_pack(names: Collection[str], layers: Mapping[str, Layer]) -> bool:
    """True if an adapter changes only linears of the UNet's step, and keys and values of the text."""
    return all(layers[name].component in (UNET, UNET_TEXT) and len(layers[name].shape) == 2 for name in names)


def pack(
    packing: Packing, adapters: Sequence[tuple[AdapterChanges, Scale]], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the inputs of a batch entry with these adapters and scales: `lora_down`, `lora_up`, each [1, width].

    The sum of their ranks must not exceed the packing's. Each factor pair is balanced to equal maxima before it is
    rounded, because small scales would otherwise leave `up` below the range of fp16.
    """
    device = next(part.device for changes, _ in adapters for one in changes.values() for part in one.parts.values())
    downs = torch.zeros(1, packing.down_width, dtype=dtype, device=device)
    ups = torch.zeros(1, packing.up_width, dtype=dtype, device=device)
    for place in packing.layers:
        out, inner = place.layer.shape
        down = downs[0, place.down : place.down + packing.rank * inner].view(packing.rank, inner)
        up = ups[0, place.up : place.up + packing.rank * out].view(packing.rank, out)
        row = 0
        for changes, scale in adapters:
            if (change := changes.get(place.layer.name)) is None:
                continue
            factor = change.scale * scale_of(scale, place.layer.name)
            inner_part, scaled = change.parts["down"], change.parts["up"].T * factor  # [rank, in], [rank, out]
            if place.layer.tensor.endswith(".interleaved.weight"):
                scaled = scaled.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)  # type: ignore[no-untyped-call]
            largest = inner_part.abs().amax().clamp(min=1e-30), scaled.abs().amax().clamp(min=1e-30)
            balance = (largest[0] / largest[1]).sqrt()
            end = row + len(scaled)
            down[row:end] = inner_part / balance
            up[row:end] = scaled * balance
            row = end
    return {LORA_DOWN: downs, LORA_UP: ups}


def add_to_keys_values(
    keys_values: torch.Tensor,
    hidden: torch.Tensor,
    layers: Mapping[str, Layer],
    adapters: Sequence[tuple[AdapterChanges, Scale]],
) -> torch.Tensor:
    """Return keys and values [texts, tokens, width], changed by adapters. hidden: the text, [texts, tokens, width]."""
    changed = keys_values.float()
    rows: dict[str, int] = {}  # of each tensor of the text network
    for layer in layers.values():
        if layer.component == UNET_TEXT:
            rows[layer.tensor] = max(rows.get(layer.tensor, 0), layer.start + layer.shape[0])
    first, total = {}, 0
    for tensor in sorted(rows, key=lambda name: int(name.split(".")[1])):
        first[tensor], total = total, total + rows[tensor]
    for changes, scale in adapters:
        for name, change in changes.items():
            layer = layers[name]
            if layer.component == UNET_TEXT:
                start = first[layer.tensor] + layer.start
                product = (hidden.float() @ change.parts["down"].T) @ change.parts["up"].T
                changed[..., start : start + layer.shape[0]] += product * (change.scale * scale_of(scale, name))
    return changed.to(keys_values.dtype)
