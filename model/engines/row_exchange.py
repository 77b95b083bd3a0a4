"""Exchanges between engines that compute bands of one image: each runs on a GPU of its own, for some of the rows.

Such an engine takes and returns whole latents. In between it computes its own band, and gets what it needs of the
others by the operators of this module, which are calls in its compiled code:

    preheat::own_rows(whole, bands): the band of this rank
    preheat::gather(own, bands): the same tensor of all bands
    preheat::neighbour_rows(edges): the rows above and below this band

All bands run the same engine at the same time, and so make the same calls in the same order. Importing this module
registers the operators. All tensors are [batch, rows, width, channels] or have no rows, and are contiguous, because
compiled code relies on the layout.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from model.errors import EngineError


class Bands(Protocol):
    """The ranks that compute the bands of an image. `index`: the band of this rank, from the top."""

    index: int
    count: int

    def gather(self, own: Tensor) -> Tensor:
        """Return the contiguous tensors of all bands, from the top, [bands, *own.shape]. `own` is contiguous."""


_of_process: Bands | None = None
_of_thread: ContextVar[Bands | None] = ContextVar("_of_thread", default=None)


def join(bands: Bands | None) -> None:
    """Set the bands that engines of this process belong to; None: they leave."""
    global _of_process
    _of_process = bands


@contextmanager
def joined(bands: Bands) -> Iterator[None]:
    """Set the bands that engines belong to which run on this thread."""
    before = _of_thread.set(bands)
    try:
        yield
    finally:
        _of_thread.reset(before)


def _current(count: int | None = None) -> Bands:
    bands = _of_thread.get() or _of_process
    if bands is None or (count is not None and bands.count != count):
        have = "one rank" if bands is None else f"{bands.count} ranks"
        raise EngineError(f"An engine computes one of {count or 'several'} bands of an image, and this is {have}.", "")
    return bands


def _own_rows(whole: Tensor, bands: int) -> Tensor:
    own = whole.chunk(bands, 1)[_current(bands).index]
    return own.clone(memory_format=torch.contiguous_format)  # compiled code expects no alias of an input


def _gather(own: Tensor, bands: int) -> Tensor:
    return _current(bands).gather(own.contiguous())


def _neighbour_rows(edges: Tensor) -> Tensor:
    """edges: this band's first and last row, [2, batch, width, channels]. Returns the row above the first, and the row
    below the last, in the same shape. They are zeros at the edge of the image."""
    bands = _current()
    of_all = bands.gather(edges.contiguous())  # [bands, 2, batch, width, channels]
    rows = torch.zeros_like(edges, memory_format=torch.contiguous_format)
    if bands.index > 0:
        rows[0] = of_all[bands.index - 1, 1]
    if bands.index < bands.count - 1:
        rows[1] = of_all[bands.index + 1, 0]
    return rows


_library: Any = torch.library.Library("preheat", "DEF")  # type: ignore[no-untyped-call]
for _schema, _operator in (
    ("own_rows(Tensor whole, int bands) -> Tensor", _own_rows),
    ("gather(Tensor own, int bands) -> Tensor", _gather),
    ("neighbour_rows(Tensor edges) -> Tensor", _neighbour_rows),
):
    _library.define(_schema)
    for _device in ("CPU", "CUDA"):
        _library.impl(_schema.partition("(")[0], _operator, _device)
