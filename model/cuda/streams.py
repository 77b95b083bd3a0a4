"""Side streams for text encoding and decoding, which then overlap with the steps of the denoising loops.

One thread queues all work. A stream may read another's tensors after waiting for it. The caching allocator tracks only
the stream that made a tensor, so other streams that read it are recorded (torch.Tensor.record_stream). Its memory is
then not reused before they are done. On a CPU there are no streams, and work happens when it is called.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

_HIGH_PRIORITY = -1  # the work is short, and an image that starts or ends waits for it


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to `device` on the current stream, through pinned memory.

    A copy from pageable memory would wait for all work that was queued before it.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class SideStream:
    """A CUDA stream whose work overlaps that of the current stream, unless one waits for the other."""

    def __init__(self, device: torch.device) -> None:
        """Create the stream. It first waits for all work queued on the current stream, such as copies of weights."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def run_after(self, *inputs: torch.Tensor) -> Iterator[None]:
        """Make this the current stream within a `with` statement.

        `inputs`: tensors of the previously current stream that the work reads. With any, this stream first waits for
        all work that is queued on that stream.
        """
        if self._stream is None:
            yield
            return
        if inputs:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self.keep(inputs)
        with torch.cuda.stream(self._stream):
            yield

    def keep(self, inputs: Iterable[torch.Tensor]) -> None:
        """Keep the memory of complete tensors of another stream until the work is done that is queued here so far, also
        if they are freed before.
        """
        if self._stream is not None:
            for tensor in inputs:
                tensor.record_stream(self._stream)

    def finish_before_current(self) -> None:
        """Make the current stream wait for all work that is queued here."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def start_after_current(self) -> None:
        """Make this stream wait for all work that is queued on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def release_to_current(self, outputs: Iterable[torch.Tensor]) -> None:
        """Let the current stream read `outputs` of this stream. It first waits for all work that is queued here."""
        self.record(outputs).release_to_current()

    def record(self, outputs: Iterable[torch.Tensor]) -> "Outputs":
        """Record that `outputs` are complete after the work that is queued here so far."""
        return Outputs(None if self._stream is None else self._stream.record_event(), tuple(outputs))


@dataclass(frozen=True, eq=False)
class Outputs:
    """Tensors of a side stream. `event`: the end of the work that makes them; None on a CPU, where it is done."""

    event: torch.cuda.Event | None
    tensors: tuple[torch.Tensor, ...]

    def ready(self) -> bool:
        """True if the work is done."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Return when the work is done. The host waits, not a stream."""
        if self.event is not None:
            self.event.synchronize()

    def release_to_current(self) -> None:
        """Let the current stream read the tensors. It first waits for the work."""
        if self.event is None:
            return
        current = torch.cuda.current_stream(self.tensors[0].device)
        current.wait_event(self.event)
        for tensor in self.tensors:
            tensor.record_stream(current)


class StageTimer:
    """Measures stages on the device, by events between the queued work. The host does not wait for the events."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events = [("", self._record())]

    def end(self, stage: str) -> None:
        """End `stage` after the work that is queued on the current stream so far."""
        self._events.append((stage, self._record()))

    def milliseconds(self) -> dict[str, float]:
        """Return the milliseconds of each stage, in order. Stages of one name are summed. Waits for the last stage."""
        if self._on_gpu:
            self._events[-1][1].synchronize()
        by_stage: dict[str, float] = {}
        for (_, before), (stage, after) in pairwise(self._events):
            milliseconds = before.elapsed_time(after) if self._on_gpu else (after - before) * 1000
            by_stage[stage] = by_stage.get(stage, 0.0) + milliseconds
        return by_stage

    def _record(self) -> Any:
        if not self._on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
