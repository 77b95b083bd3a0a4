"""A GPU's streams without a GPU: every operation on tensors is noted with its stream, and one that reads what another
stream has not surely made, or what its memory's owner may give away meanwhile, is a race."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.cuda.streams import SideStream
from model.pipeline.loaded_model import LoadedModel


class Race(Exception):
    pass


class Stream:
    """Counts what it is given; `seen` says up to which count of other streams it surely is past."""

    device = torch.device("cuda")

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.seen: dict[Stream, int] = defaultdict(int)

    def wait_stream(self, other: "Stream") -> None:
        for stream, count in [*other.seen.items(), (other, other.count)]:
            self.seen[stream] = max(self.seen[stream], count)


class Streams:
    """The streams of one device, and which tensors' memory each has made, may read, and is known to read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main = self.current = Stream("main")
        self._made: dict[int, tuple[Stream, int]] = {}  # storage -> by whom, at which count
        self._recorded: set[tuple[int, Stream]] = set()
        self._kept: list[torch.Tensor] = []  # so that no address comes back
        monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream("side"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._stream)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self._record(tensor, stream))

    def give(self, model: LoadedModel) -> None:
        """Let a model on the CPU have side streams as on a GPU."""
        for name in ("text", "first_text", "decode"):
            side = SideStream(torch.device("cuda"))
            side._stream.name = name  # type: ignore[union-attr, attr-defined]
            setattr(model, f"{name}_stream", side)

    @contextmanager
    def _stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _record(self, tensor: torch.Tensor, stream: Stream) -> None:
        self._recorded.add((tensor.untyped_storage().data_ptr(), stream))

    def ran(self, name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        current, addresses = self.current, {tensor.untyped_storage().data_ptr() for tensor in given}
        for address in addresses & self._made.keys():
            maker, count = self._made[address]
            if maker is not current and current.seen[maker] < count:
                raise Race(f"{name} reads on {current.name} what {maker.name} may not have made yet")
            if maker is not current and (address, current) not in self._recorded:
                raise Race(f"{name} reads on {current.name} what {maker.name} may have given away")
        current.count += 1
        for tensor in made:
            address = tensor.untyped_storage().data_ptr()
            maker = self._made[address][0] if address in self._made and address in addresses else current
            self._made[address] = (maker, current.count if maker is current else self._made[address][1])
        self._kept += made

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at every operation of this thread."""
        with _Watch(self):
            yield


class _Watch(TorchDispatchMode):
    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._streams.ran(str(func), given, [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)])
        return made
