"""The layers of a checkpoint that an adapter may change, and where their weights are in a server's tensors.

A server's networks are fused: queries, keys and values of a self-attention share a tensor, and so do the keys and
values of all cross-attentions. The names and shapes of a release's tensors therefore decide which layers it has. The
order of rows is that of `engine_builder.networks`; a test compares both. Imports no torch.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from model.errors import AdapterError
from model.pipeline.spec import TEXT_ENCODER, TEXT_ENCODER_2, TEXT_ENCODER_FINAL, UNET, UNET_TEXT, UNET_TIME

Scale = float | tuple[tuple[str, float], ...]
"""Of an adapter: a number, or a number for the layers whose names have a start. The first that fits is used, else 1."""
AdapterSet = tuple[tuple[str, Scale], ...]
"""Adapters by name and their scales, in the order of names. Images with equal sets may share a batch."""
Shape = tuple[int, ...]
Shapes = Mapping[str, Mapping[str, Shape]]
"""Component -> tensor -> its shape in the server's layout."""

_TEXT_ENCODERS = {TEXT_ENCODER: TEXT_ENCODER, TEXT_ENCODER_FINAL: TEXT_ENCODER, TEXT_ENCODER_2: TEXT_ENCODER_2}
"""Component -> its name in a checkpoint."""
COMPONENTS = (UNET, UNET_TEXT, UNET_TIME, *_TEXT_ENCODERS)
"""Components whose weights adapters change: those of the base model, without its VAE."""
_TEXT_PREFIX = "text_model."  # of the names in a checkpoint; a CLIP without projection has none on the server
_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("to_q", "to_k", "to_v"))  # of a text encoder, of a UNet
_TEXT_LAYER = re.compile(r"encoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Layer:
    """A tensor of the checkpoint: the weight of a linear or of a convolution, a bias, or the weight of a norm.

    name: "unet.", "text_encoder." or "text_encoder_2.", and the checkpoint's name of the module; of a bias or a norm's
    weight that of the tensor, which ends with ".bias" or ".weight".
    shape: in the checkpoint: [out, in] or [out, in, height, width]; [out] of a bias or a norm's weight.
    component, tensor: where the server has its weight.
    start: the first of its rows there. 0 for a tensor that is all its own.
    """

    name: str
    shape: Shape
    component: str
    tensor: str
    start: int = 0


def find_layers(shapes: Shapes) -> dict[str, Layer]:
    """Return the layers of a release's base model by name. Raises AdapterError for tensors in an unknown order."""
    unet = shapes.get(UNET, {})
    layers = [*_plain_layers(UNET, UNET, unet), *_text_projections(unet, shapes.get(UNET_TEXT, {}))]
    layers += _time_layers(unet, shapes.get(UNET_TIME, {}))
    for component in _TEXT_ENCODERS:
        layers += _text_layers(component, shapes.get(component, {}))
    return {layer.name: layer for layer in layers}


def _plain_layers(component: str, checkpoint: str, tensors: Mapping[str, Shape], prefix: str = "") -> Iterator[Layer]:
    """Yield the layers of tensors that keep the name of their module, or are a fused form of it.

    checkpoint: the component's name there. prefix: of the names of modules there.
    """
    for tensor, shape in tensors.items():
        stem, _, kind = tensor.rpartition(".")
        if kind not in ("weight", "bias"):
            continue
        suffix = "" if len(shape) > 1 else f".{kind}"
        module = f"{checkpoint}.{prefix}{stem}"
        parent, _, last = module.rpartition(".")
        if last == "to_qkv":
            projections = [f"{parent}.{part}" for part in _PROJECTIONS[component == UNET]]
            yield from _thirds(component, tensor, shape, [name + suffix for name in projections])
        elif last == "interleaved":
            yield Layer(f"{parent}.proj{suffix}", shape, component, tensor)
        elif last == "phases":
            kernel = (shape[1], 3, 3) if len(shape) > 1 else ()
            yield Layer(f"{parent}.conv{suffix}", (shape[0] // 4, *kernel), component, tensor)
        elif len(shape) == 3:  # Winograd: [16, out, in]
            yield Layer(module, (*shape[1:], 3, 3), component, tensor)
        elif shape:
            yield Layer(module + suffix, shape, component, tensor)


def _thirds(component: str, tensor: str, shape: Shape, names: list[str]) -> Iterator[Layer]:
    rows = shape[0] // 3
    for index, name in enumerate(names):
        yield Layer(name, (rows, *shape[1:]), component, tensor, index * rows)


def _text_projections(unet: Mapping[str, Shape], tensors: Mapping[str, Shape]) -> Iterator[Layer]:
    """Yield `to_k` and `to_v` of the cross-attentions. Groups of them are rows of `keys_values.0`, `.1` and so on."""
    queries = sorted((name for name in unet if name.endswith(".attn2.to_q.weight")), key=forward_order)
    names = [name.replace("to_q.weight", part) for name in queries for part in ("to_k", "to_v")]
    widths = [unet[name][0] for name in queries for _ in ("to_k", "to_v")]
    groups = sorted((name for name in tensors if name.startswith("keys_values.")), key=forward_order)
    yield from _rows(UNET_TEXT, {name: tensors[name] for name in groups}, names, widths)


def _time_layers(unet: Mapping[str, Shape], tensors: Mapping[str, Shape]) -> Iterator[Layer]:
    own = {name: shape for name, shape in tensors.items() if not name.startswith("biases.")}
    yield from _plain_layers(UNET_TIME, UNET, own)
    convs = sorted((name for name in unet if re.search(r"\.resnets\.\d+\.conv1\.weight$", name)), key=forward_order)
    widths = [unet[name][1] if len(unet[name]) == 3 else unet[name][0] for name in convs]
    for kind, suffix in (("weight", ""), ("bias", ".bias")):
        names = [name.replace("conv1.weight", f"time_emb_proj{suffix}") for name in convs]
        of_kind = {name: shape for name, shape in tensors.items() if name == f"biases.{kind}"}
        yield from _rows(UNET_TIME, of_kind, names, widths)


def _rows(component: str, tensors: Mapping[str, Shape], names: list[str], widths: list[int]) -> Iterator[Layer]:
    """Yield layers whose rows fill `tensors` one after the other, in order."""
    if not tensors:
        return
    remaining = list(zip(names, widths, strict=True))
    for tensor, shape in tensors.items():
        start = 0
        while start < shape[0] and remaining:
            name, width = remaining.pop(0)
            yield Layer(f"{UNET}.{name}", (width, *shape[1:]), component, tensor, start)
            start += width
        if start != shape[0]:
            break
    else:
        if not remaining:
            return
    raise AdapterError(
        f"The rows of {component} in this release have an unknown order.",
        "Build it again with this version (`preheat build`), and publish a new release.",
    )


def _text_layers(component: str, tensors: Mapping[str, Shape]) -> Iterator[Layer]:
    """Yield the layers of a text encoder, also its last layer and final norm, which no engine of SDXL's first reads.

    The names of engines' constants lack these. The layers of an encoder have equal shapes.
    """
    prefix = _TEXT_PREFIX if any(name.startswith(_TEXT_PREFIX) for name in tensors) else ""
    own = {name.removeprefix(prefix): shape for name, shape in tensors.items() if "embedding" not in name}
    matches = [match for name in own if (match := _TEXT_LAYER.fullmatch(name))]
    count = 1 + max((int(match[1]) for match in matches), default=-1)
    first = {match[2]: own[match[0]] for match in matches if match[1] == "0"}
    for index in range(count):
        own |= {f"encoder.layers.{index}.{part}": shape for part, shape in first.items()}
    norm = {part: first[f"layer_norm1.{part}"] for part in ("weight", "bias") if f"layer_norm1.{part}" in first}
    own |= {f"final_layer_norm.{part}": shape for part, shape in norm.items()}
    # In a checkpoint all names but that of the projection begin with the prefix.
    of_projection = {name: shape for name, shape in own.items() if name.startswith("text_projection.")}
    of_model = {name: shape for name, shape in own.items() if name not in of_projection}
    checkpoint = _TEXT_ENCODERS[component]
    yield from _plain_layers(component, checkpoint, of_projection)
    for layer in _plain_layers(component, checkpoint, of_model, _TEXT_PREFIX):
        yield replace(layer, tensor=prefix + layer.tensor)


def forward_order(name: str) -> tuple[object, ...]:
    """Sort key of a UNet's tensors: the order in which the network runs its blocks."""
    blocks = {"down_blocks": 0, "mid_block": 1, "up_blocks": 2}
    first, *rest = name.split(".")
    return (blocks.get(first, 3), *(int(part) if part.isdecimal() else -1 for part in rest))
