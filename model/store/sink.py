"""Receivers of a blob's bytes while a store reads them."""

from collections.abc import Callable
from typing import Protocol

from model.errors import Unavailable


class Sink(Protocol):
    """Receives a blob's bytes in order, in buffers of its own."""

    def buffer(self, at: int) -> memoryview:
        """Return the buffer for the bytes from offset `at` on. It is not empty unless the blob ends there."""

    def filled(self, at: int, data: memoryview) -> None:
        """Accept `data`, the start of that buffer: the blob's bytes from offset `at` on.

        If a copy was damaged, the blob is fetched once more and begins again at offset 0.
        """


class BufferSink:
    """Fills one buffer of the blob's size, at most `chunk_bytes` at a time, so that hashing keeps up with reading."""

    def __init__(self, into: memoryview, chunk_bytes: int) -> None:
        self._into, self._chunk_bytes = into, chunk_bytes

    def buffer(self, at: int) -> memoryview:
        return self._into[at : at + self._chunk_bytes]

    def filled(self, at: int, data: memoryview) -> None:
        pass


class DiscardSink:
    """Discards all bytes, for callers that only want them verified."""

    def __init__(self, chunk_bytes: int) -> None:
        self._buffer = memoryview(bytearray(chunk_bytes))

    def buffer(self, at: int) -> memoryview:
        return self._buffer

    def filled(self, at: int, data: memoryview) -> None:
        pass


class StoppableSink:
    """Passes the bytes on to another sink, and raises Unavailable once `is_stopped` is true."""

    def __init__(self, sink: Sink, is_stopped: Callable[[], bool]) -> None:
        self._sink, self._is_stopped = sink, is_stopped

    def buffer(self, at: int) -> memoryview:
        if self._is_stopped():
            raise load_stopped()
        return self._sink.buffer(at)

    def filled(self, at: int, data: memoryview) -> None:
        self._sink.filled(at, data)


def load_stopped() -> Unavailable:
    """Return the error of a load or a fetch that the end of the server stops."""
    return Unavailable("The load was stopped, because this server ends.")
