"""How a store hands over a blob's bytes while it reads them."""

from typing import Protocol


class Sink(Protocol):
    """Who takes a blob's bytes in order, in buffers of its own."""

    def buffer(self) -> memoryview:
        """Where the next bytes are to be put."""

    def filled(self, at: int, data: memoryview) -> None:
        """`data`, the beginning of that buffer, are the blob's bytes from `at` on. Byte 0 comes a second time where
        what had come was damaged and is fetched again."""


class Whole:
    """A sink of one buffer for all bytes, filled a chunk at a time so that hashing keeps up with reading."""

    def __init__(self, into: memoryview, chunk: int) -> None:
        self._into, self._chunk, self._at = into, chunk, 0

    def buffer(self) -> memoryview:
        return self._into[self._at : self._at + self._chunk]

    def filled(self, at: int, data: memoryview) -> None:
        self._at = at + len(data)


class Nobody:
    """A sink that lets all bytes go: who only wants them hashed."""

    def __init__(self, chunk: int) -> None:
        self._buffer = memoryview(bytearray(chunk))

    def buffer(self) -> memoryview:
        return self._buffer

    def filled(self, at: int, data: memoryview) -> None:
        pass
