"""A GPU's streams, events and graphs without a GPU, and a detector of races between streams.

Every operation on tensors is recorded with its stream. It is a race if it reads memory that another stream may not have
written yet, or that the allocator may have reused meanwhile.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.cuda.streams import SideStream
from model.pipeline.loaded_model import LoadedModel


class Race(Exception):
    """An operation reads memory that may hold something else."""


class Stream:
    """Counts its operations. It is known to run after the first `seen[other]` operations of another stream."""

    device = torch.device("cuda")

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.seen: dict[Stream, int] = defaultdict(int)
        self.waits = True
        """False: calls of `wait_stream` and `wait_event` are ignored, as if the code lacked them."""
        self.records = True
        """False: calls of `Tensor.record_stream` are ignored."""

    def wait_stream(self, other: "Stream") -> None:
        if self.waits:
            for stream, count in [*other.seen.items(), (other, other.count)]:
                self.seen[stream] = max(self.seen[stream], count)

    def record_event(self) -> "StreamEvent":
        return StreamEvent([*self.seen.items(), (self, self.count)])

    def wait_event(self, event: "StreamEvent") -> None:
        if self.waits:
            for stream, count in event.seen:
                self.seen[stream] = max(self.seen[stream], count)


@dataclass
class StreamEvent:
    """The operations that have finished when an event of a stream is reached."""

    seen: list[tuple[Stream, int]]

    def query(self) -> bool:
        return True


class Streams:
    """The streams of one device. For each storage it knows the stream that wrote it and the streams recorded for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main = self.current = Stream("main")
        self.side: dict[str, Stream] = {}
        """The side streams of the model, by name."""
        self._new = self.main
        self._writers: dict[int, tuple[Stream, int]] = {}  # address -> stream, and its count after writing
        self._recorded: set[tuple[int, Stream]] = set()
        self._kept: list[torch.Tensor] = []  # so that no address is used twice
        monkeypatch.setattr(torch.cuda, "Stream", self._create)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self.current)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda *_: self.main)
        monkeypatch.setattr(torch.cuda, "stream", self.use)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self._record(tensor, stream))

    def add_side_streams(self, model: LoadedModel) -> None:
        """Give a model on the CPU the side streams that it would have on a GPU."""
        for name in ("text", "first_text", "encode", "decode"):
            setattr(model, f"{name}_stream", SideStream(torch.device("cuda")))
            self.side[name] = self._new
            self._new.name = name

    def _create(self, *_: object, **__: object) -> Stream:
        self._new = Stream("side")
        return self._new

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """Make `stream` the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _record(self, tensor: torch.Tensor, stream: Stream) -> None:
        if stream.records:
            self._recorded.add((tensor.untyped_storage().data_ptr(), stream))

    def writer(self, tensor: torch.Tensor) -> Stream:
        """The stream that wrote a tensor while operations were checked."""
        return self._writers[tensor.untyped_storage().data_ptr()][0]

    def check(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Record an operation of the current stream. Raises Race."""
        current, read = self.current, {tensor.untyped_storage().data_ptr() for tensor in inputs}
        for address in read & self._writers.keys():
            writer, count = self._writers[address]
            if writer is not current and current.seen[writer] < count:
                raise Race(f"{name} on {current.name} reads what {writer.name} may not have written yet")
            if writer is not current and (address, current) not in self._recorded:
                raise Race(f"{name} on {current.name} reads what {writer.name} may have freed")
        current.count += 1
        for tensor in outputs:
            address = tensor.untyped_storage().data_ptr()
            # A view, or an operation in place, leaves the memory with the stream that allocated it.
            writer = self._writers[address][0] if address in self._writers and address in read else current
            self._writers[address] = (writer, current.count if writer is current else self._writers[address][1])
        self._kept += outputs

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Check every operation of this thread."""
        with _Check(self):
            yield


class _Check(TorchDispatchMode):
    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._streams.check(str(func), inputs, [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)])
        return result
