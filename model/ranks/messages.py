"""What rank 0 sends to the others: the calls of its denoising loops, in their order.

An image is sent without its tensors, but with their shapes. The tensors follow by collectives of the group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from model.denoising.loop import Conditioning, ImageState, Known
from model.pipeline.loaded_model import LoopKey
from model.settings import Settings

_NO_TENSOR = torch.empty(0)
_COND, _UNCOND = "cond ", "uncond "


@dataclass(frozen=True)
class Start:
    """The first message: which release a follower loads, as which rank, and where the ranks meet."""

    settings: Settings
    secrets: Mapping[str, str]
    rank: int
    size: int
    meeting: str


@dataclass(frozen=True)
class MakeLoop:
    """Make the loop of a UNet at a size."""

    key: LoopKey


@dataclass(frozen=True)
class Join:
    """All ranks have loaded the release: meet."""


class TensorShape(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class AddImage:
    """Add an image to a loop. `number` names it in later messages. `generator`: the state of its generator.

    tensors: the shapes of those that follow, by the names of `tensors_of`, in their order.
    """

    key: LoopKey
    number: int
    image: ImageState
    generator: bytes
    tensors: dict[str, TensorShape]


@dataclass(frozen=True)
class RemoveImage:
    """Remove an image from a loop, if it is still there."""

    key: LoopKey
    number: int


@dataclass(frozen=True)
class Step:
    """Run one step of a loop."""

    key: LoopKey


@dataclass(frozen=True)
class Leave:
    """Leave the group and exit the process."""


Message = MakeLoop | AddImage | RemoveImage | Step | Leave


def tensors_of(image: ImageState) -> dict[str, torch.Tensor]:
    """Return the tensors that a loop reads of an image that joins it, by name."""
    found = {"latents": image.latents}
    if image.denoised is not None:
        found["denoised"] = image.denoised
    if image.extra_channels is not None:
        found["extra_channels"] = image.extra_channels
    if image.known is not None:
        found |= {"known": image.known.latents, "known_noise": image.known.noise, "mask": image.known.mask}
    found |= {_COND + name: tensor for name, tensor in image.cond.inputs.items()}
    if image.uncond is not None:
        found |= {_UNCOND + name: tensor for name, tensor in image.uncond.inputs.items()}
    return found


def without_tensors(image: ImageState) -> ImageState:
    """Return what a message has of an image: its numbers and settings, without tensors and without its generator."""
    return replace(
        image,
        generator=None,  # type: ignore[arg-type]  # its state is sent
        latents=_NO_TENSOR,
        denoised=None,
        extra_channels=None,
        known=None,
        cond=Conditioning(is_zero=image.cond.is_zero),
        uncond=image.uncond and Conditioning(is_zero=image.uncond.is_zero),
        inputs=None,
        checks={},
        result=None,
        pixels=None,
    )


def with_tensors(image: ImageState, generator: bytes, tensors: Mapping[str, torch.Tensor]) -> ImageState:
    """Return the image of `without_tensors` with its tensors and a generator in the given state."""
    known = None
    if "known" in tensors:
        known = Known(tensors["known"], tensors["known_noise"], tensors["mask"])
    state = torch.frombuffer(bytearray(generator), dtype=torch.uint8)
    restored = torch.Generator()
    restored.set_state(state)
    return replace(
        image,
        generator=restored,
        latents=tensors["latents"],
        denoised=tensors.get("denoised"),
        extra_channels=tensors.get("extra_channels"),
        known=known,
        cond=replace(image.cond, inputs=_inputs(tensors, _COND)),
        uncond=image.uncond and replace(image.uncond, inputs=_inputs(tensors, _UNCOND)),
    )


def _inputs(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
