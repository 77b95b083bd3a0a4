"""What rank 0 sends to the others: the calls of its denoising loops, in their order.

An image is sent without its tensors, but with their shapes. The tensors follow by collectives of the group.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from model.denoising.cover import Cover
from model.denoising.loop import ImageState
from model.pipeline.loaded_model import LoopKey
from model.settings import Settings


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


@dataclass(frozen=True)
class TensorShape:
    """Stands for a tensor that follows a message: number `index` of those that follow."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class GeneratorState:
    """Stands for a generator on the host."""

    state: bytes


@dataclass(frozen=True)
class AddImage:
    """Add an image to a loop. `number` names it in later messages. Sent as `take_tensors` returns it."""

    key: LoopKey
    number: int
    image: ImageState


@dataclass(frozen=True)
class RemoveImage:
    """Remove an image from a loop, if it is still there."""

    key: LoopKey
    number: int


@dataclass(frozen=True)
class Step:
    """Run one step of a loop with these calls."""

    key: LoopKey
    cover: Cover


@dataclass(frozen=True)
class Leave:
    """Leave the group and exit the process."""


Message = MakeLoop | AddImage | RemoveImage | Step | Leave


def take_tensors(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return what a message has of `value`, and the tensors that follow it, each of them once.

    Dataclasses, tuples and mappings are walked. Tensors become `TensorShape`, generators `GeneratorState`. `LOCAL`
    fields get their default.
    """
    indices: dict[int, int] = {}  # by identity of a tensor
    tensors: list[torch.Tensor] = []

    def take(leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return GeneratorState(leaf.get_state().numpy().tobytes())
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in indices:
            indices[id(leaf)] = len(tensors)
            tensors.append(leaf)
        return TensorShape(indices[id(leaf)], tuple(leaf.shape), leaf.dtype)

    return _walk(value, take), tensors


def put_tensors(value: Any, receive: Callable[[TensorShape], torch.Tensor]) -> Any:
    """Undo `take_tensors`. `receive` is called once for each tensor, in their order."""
    tensors: dict[int, torch.Tensor] = {}

    def put(leaf: Any) -> Any:
        if isinstance(leaf, GeneratorState):
            generator = torch.Generator()
            generator.set_state(torch.frombuffer(bytearray(leaf.state), dtype=torch.uint8))
            return generator
        if not isinstance(leaf, TensorShape):
            return leaf
        if leaf.index not in tensors:
            tensors[leaf.index] = receive(leaf)
        return tensors[leaf.index]

    return _walk(value, put)


def _walk(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of `value` whose leaves are changed, without what is in `LOCAL` fields."""
    changed = change(value)
    if changed is not value:
        return changed
    if is_dataclass(value) and not isinstance(value, type):
        copies = {
            one.name: _default(one) if "local" in one.metadata else _walk(getattr(value, one.name), change)
            for one in fields(value)
        }
        return replace(value, **copies)
    if isinstance(value, tuple):
        return tuple(_walk(item, change) for item in value)
    if isinstance(value, Mapping):
        return {key: _walk(item, change) for key, item in value.items()}
    return value


def _default(one: Field[Any]) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()
