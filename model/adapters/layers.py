"""The layers of a checkpoint that an adapter may change, and where their weights are in a server's tensors.

A server's networks are fused: queries, keys and values of a self-attention share a tensor, and so do the keys and
values of all cross-attentions. The names and shapes of a release's tensors therefore decide which layers it has. The
order of rows is that of `engine_builder.networks`; a test compares both. Imports no torch.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from model.errors import AdapterError
from model.pipeline.spec import TEXT_ENCODER, TEXT_ENCODER_2, TEXT_ENCODER_FINAL, UNET, UNET_TEXT, UNET_TIME

AdapterSet = tuple[tuple[str, float], ...]
"""Adapters by name and their scales, in the order of names. Images with equal sets may share a batch."""
Shape = tuple[int, ...]
Shapes = Mapping[str, Mapping[str, Shape]]
"""Component -> tensor -> its shape in the server's layout."""

_TEXT_ENCODERS = {TEXT_ENCODER: TEXT_ENCODER, TEXT_ENCODER_FINAL: TEXT_ENCODER, TEXT_ENCODER_2: TEXT_ENCODER_2}
"""Component -> its name in a checkpoint."""
COMPONENTS = (UNET, UNET_TEXT, UNET_TIME, *_TEXT_ENCODERS)
"""Components whose weights adapters change: those of the base model, without its VAE."""
_TEXT_PREFIX = "text_model."  # of the names in a checkpoint; a CLIP without projection has none on the server
_TEXT_LAYER = re.compile(r"encoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Layer:
    """A linear or a convolution of the checkpoint.

    name: "unet.", "text_encoder." or "text_encoder_2.", and the checkpoint's name of the module.
    shape: of its weight in the checkpoint: [out, in] or [out, in, height, width].
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
    unet = {name: shape for name, shape in shapes.get(UNET, {}).items() if name.endswith(".weight")}
    layers = [*_unet_layers(unet), *_text_projections(unet, shapes.get(UNET_TEXT, {}))]
    layers += _time_layers(unet, shapes.get(UNET_TIME, {}))
    for component in _TEXT_ENCODERS:
        layers += _text_layers(component, shapes.get(component, {}))
    return {layer.name: layer for layer in layers}


def _unet_layers(tensors: Mapping[str, Shape]) -> Iterator[Layer]:
    for tensor, shape in tensors.items():
        module = f"{UNET}.{tensor.removesuffix('.weight')}"
        parent = module.rpartition(".")[0]
        if module.endswith(".to_qkv"):
            yield from _thirds(UNET, tensor, shape, [f"{parent}.to_{part}" for part in "qkv"])
        elif module.endswith(".interleaved"):
            yield Layer(f"{parent}.proj", shape, UNET, tensor)
        elif module.endswith(".phases"):
            yield Layer(f"{parent}.conv", (shape[0] // 4, shape[1], 3, 3), UNET, tensor)
        elif len(shape) == 3:  # Winograd: [16, out, in]
            yield Layer(module, (*shape[1:], 3, 3), UNET, tensor)
        elif len(shape) > 1:
            yield Layer(module, shape, UNET, tensor)


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
    for tensor, shape in tensors.items():
        if tensor.endswith(".weight") and not tensor.startswith("biases."):
            yield Layer(f"{UNET}.{tensor.removesuffix('.weight')}", shape, UNET_TIME, tensor)
    convs = sorted((name for name in unet if re.search(r"\.resnets\.\d+\.conv1\.weight$", name)), key=forward_order)
    names = [name.replace("conv1.weight", "time_emb_proj") for name in convs]
    widths = [unet[name][1] if len(unet[name]) == 3 else unet[name][0] for name in convs]
    yield from _rows(
        UNET_TIME, {name: shape for name, shape in tensors.items() if name == "biases.weight"}, names, widths
    )


def _rows(component: str, tensors: Mapping[str, Shape], names: list[str], widths: list[int]) -> Iterator[Layer]:
    """Yield layers whose rows fill `tensors` one after the other, in order."""
    if not tensors:
        return
    remaining = list(zip(names, widths, strict=True))
    for tensor, shape in tensors.items():
        start = 0
        while start < shape[0] and remaining:
            name, width = remaining.pop(0)
            yield Layer(f"{UNET}.{name}", (width, shape[1]), component, tensor, start)
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
    """Yield the linears of a text encoder, also those of its last layer that no engine reads.

    The names of engines' constants lack these. The layers of an encoder have equal shapes.
    """
    prefix = _TEXT_PREFIX if any(name.startswith(_TEXT_PREFIX) for name in tensors) else ""
    linears = {
        name.removeprefix(prefix): shape
        for name, shape in tensors.items()
        if name.endswith(".weight") and len(shape) == 2 and "embedding" not in name
    }
    matches = [match for name in linears if (match := _TEXT_LAYER.fullmatch(name))]
    count = 1 + max((int(match[1]) for match in matches), default=-1)
    first = {match[2]: linears[match[0]] for match in matches if match[1] == "0"}
    for index in range(count):
        linears |= {f"encoder.layers.{index}.{part}": shape for part, shape in first.items()}
    for name, shape in linears.items():
        stem = name.removesuffix(".weight")
        checkpoint = _TEXT_ENCODERS[component]
        module = f"{checkpoint}.{_TEXT_PREFIX}{stem}" if _TEXT_LAYER.fullmatch(name) else f"{checkpoint}.{stem}"
        tensor = prefix + name if _TEXT_LAYER.fullmatch(name) else name
        if stem.endswith(".to_qkv"):
            parent = module.rpartition(".")[0]
            yield from _thirds(component, tensor, shape, [f"{parent}.{part}_proj" for part in "qkv"])
        else:
            yield Layer(module, shape, component, tensor)


def forward_order(name: str) -> tuple[object, ...]:
    """Sort key of a UNet's tensors: the order in which the network runs its blocks."""
    blocks = {"down_blocks": 0, "mid_block": 1, "up_blocks": 2}
    first, *rest = name.split(".")
    return (blocks.get(first, 3), *(int(part) if part.isdecimal() else -1 for part in rest))
