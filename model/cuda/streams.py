"""Streams of a GPU beside the one that the loops run on, so that text and pictures are worked on while others step.

All are fed by one thread. What one stream made another may read once it waits for it, and memory that it reads must not
be given away before it has: the allocator knows only the stream that a tensor was made on, so it is told of others
(torch.Tensor.record_stream). On a CPU there are no streams, and everything happens as it is called.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

_FIRST = -1  # priority: what runs here is short, and an image waits for it that is about to begin or to end


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` of the host on `device`, queued on the current stream. A copy from memory that is not pinned would wait
    until the device has done all that was queued before it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class SideStream:
    """One more queue of the device. Work that is queued here overlaps the current stream's unless it waits for it."""

    def __init__(self, device: torch.device) -> None:
        """What the current stream has been given so far, as weights on their way, is waited for."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=_FIRST)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def beside(self, *given: torch.Tensor) -> Iterator[None]:
        """Within it this is the current stream. `given`: what the work in it reads of the stream that was current."""
        if self._stream is None:
            yield
            return
        if given:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            for tensor in given:
                tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def hand_over(self, made: Iterable[torch.Tensor]) -> None:
        """Let the current stream read tensors that were `made` on this one: it waits for all that is queued here."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in made:
            tensor.record_stream(current)


class Laps:
    """When each stage ended, as the device has it: marks among its work, which nobody waits for."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks = [("", self._mark())]

    def end(self, stage: str) -> None:
        """What is queued on the current stream by now is the end of `stage`."""
        self._marks.append((stage, self._mark()))

    def milliseconds(self) -> dict[str, float]:
        """Of each stage, in order."""
        if self._on_gpu:
            self._marks[-1][1].synchronize()
        return {
            stage: before.elapsed_time(after) if self._on_gpu else (after - before) * 1000
            for (_, before), (stage, after) in pairwise(self._marks)
        }

    def _mark(self) -> Any:
        if not self._on_gpu:
            return perf_counter()
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record()
        return mark
