"""Scales of an adapter by block, in the names of diffusers' `set_adapters`. Imports no torch.

    {"unet": {"down": 0.5, "mid": 1, "up": {"block_0": 0, "block_1": [0.4, 0.8, 1]}}, "text_encoder": 0.3}

A number is for all layers of a component, of a side or of a block. A list has a number for each attention of a block
and the resnet before it; the first is also for the block's sampler. What is not named has scale 1.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from model.adapters.layers import Layer, Scale
from model.pipeline.spec import TEXT_ENCODER, TEXT_ENCODER_2, UNET
from model.validation import MAX_LORA_SCALE, format_value

_SIDES = ("down", "mid", "up")
_BLOCK = re.compile(r"block_(\d)")
_RESNET = re.compile(r"unet\.(down|up)_blocks\.(\d+)\.resnets\.(\d+)\.")
Blocks = Mapping[str, int]
"""A block of a UNet, such as "up.block_1" -> its resnets."""
_EXPECTED = f"a number from {-MAX_LORA_SCALE} to {MAX_LORA_SCALE}"


def unet_blocks(layers: Mapping[str, Layer]) -> dict[str, int]:
    """Return the blocks of the UNet that has these layers."""
    blocks: dict[str, int] = {}
    for name in layers:
        if match := _RESNET.match(name):
            block = f"{match[1]}.block_{match[2]}"
            blocks[block] = max(blocks.get(block, 0), int(match[3]) + 1)
    return dict(sorted(blocks.items()))


def check_scale(value: object) -> None:
    """Raise ValueError for what is neither a scale nor scales by block. The model's blocks are not known here."""
    if isinstance(value, Mapping):
        for _ in _entries(value, None):
            pass
    elif not _is_scale(value):
        raise ValueError(f"got {format_value(value)}, expected {_EXPECTED}, or scales by block")


def layer_scale(value: Any, blocks: Blocks) -> Scale:
    """Return the scale of each layer. Raises ValueError for a block that the UNet does not have."""
    if not isinstance(value, Mapping):
        return float(value)
    return tuple((start, float(number)) for start, number in _entries(value, blocks))


def _entries(value: Mapping[str, Any], blocks: Blocks | None) -> Iterator[tuple[str, float]]:
    """Yield the starts of layers' names with their numbers. Raises ValueError."""
    for component in _known(value, (UNET, TEXT_ENCODER, TEXT_ENCODER_2), ""):
        scales = value[component]
        if _is_scale(scales):
            yield f"{component}.", scales
        elif component != UNET or not isinstance(scales, Mapping):
            raise ValueError(f"{component} expects {_EXPECTED}{', or scales by block' if component == UNET else ''}")
        else:
            for side in _known(scales, _SIDES, f"{UNET}."):
                yield from _of_side(side, scales[side], blocks)


def _of_side(side: str, scales: object, blocks: Blocks | None) -> Iterator[tuple[str, float]]:
    where, start = f"{UNET}.{side}", f"{UNET}.{side}_block{'' if side == 'mid' else 's'}."
    if _is_scale(scales):
        yield start, scales  # type: ignore[misc]
        return
    if side == "mid" or not isinstance(scales, Mapping):
        raise ValueError(f"{where} expects {_EXPECTED}{'' if side == 'mid' else ', or scales by block'}")
    if not scales:
        raise ValueError(f"{where} is empty: name a block, or leave it out")
    own = {name: count for name, count in (blocks or {}).items() if name.startswith(f"{side}.")}
    for block, of_block in scales.items():
        match = _BLOCK.fullmatch(block) if isinstance(block, str) else None
        if match is None or (blocks is not None and f"{side}.{block}" not in own):
            known = ", ".join(name.partition(".")[2] for name in own) or "block_0, block_1 and so on"
            raise ValueError(f"{where} has no block {str(block)[:40]!r}: name one of {known}")
        inside = f"{start}{match[1]}."
        if _is_scale(of_block):
            yield inside, of_block
            continue
        if not isinstance(of_block, list) or not of_block or not all(map(_is_scale, of_block)):
            raise ValueError(f"{where}.{block} expects {_EXPECTED}, or a list of such numbers")
        layers = len(of_block) if blocks is None else own[f"{side}.{block}"]
        if len(of_block) != layers:
            raise ValueError(f"{where}.{block} has {len(of_block)} numbers, and the block has {layers} layers")
        for index, number in enumerate(of_block):
            yield from ((f"{inside}{kind}.{index}.", number) for kind in ("attentions", "resnets"))
        yield f"{inside}{side}samplers.0.", of_block[0]


def _known(value: Mapping[str, Any], names: tuple[str, ...], where: str) -> list[str]:
    """Return the keys of an object in the order of `names`. Raises ValueError for others, and for none."""
    if unknown := [name for name in value if name not in names]:
        raise ValueError(f"{where}{str(unknown[0])[:40]} is unknown: name some of {', '.join(names)}")
    if not value:
        raise ValueError(f"{where.rstrip('.') or 'the scale'} is empty: name some of {', '.join(names)}")
    return [name for name in names if name in value]


def _is_scale(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -MAX_LORA_SCALE <= value <= MAX_LORA_SCALE  # type: ignore[operator]
