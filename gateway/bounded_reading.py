"""Reading a backend's answer within limits of bytes and time, whatever the backend sends."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing

import httpx

from gateway.errors import ApiError

MAX_DESCRIPTION_BYTES = 2**22  # of all releases of a server
MAX_ERROR_BYTES = 2**16
MAX_HELD_BYTES = 96 * 2**20  # unfinished lines of all answers
SMALL_LINE_BYTES = 2**20  # a line without an image; it is read whatever the total is
_PIECE_BYTES = 2**15  # a line is collected in pieces, because one growing block fragments the memory
_BUSY_SECONDS = 5  # until a request may be repeated


class InvalidAnswer(Exception):
    """An answer is not what a Preheat server sends; the message states what is wrong with it."""


async def read_body(answer: httpx.Response, max_bytes: int) -> bytes:
    """Return the body of an answer. Raises InvalidAnswer if it is larger, and httpx.HTTPError."""
    body = bytearray()
    async with aclosing(_chunks(answer)) as chunks:
        async for chunk in chunks:
            body += chunk
            if len(body) > max_bytes:
                raise InvalidAnswer(f"its body has more than {max_bytes} bytes")
    return bytes(body)


class HeldLines:
    """The unfinished lines of all answers. If they exceed MAX_HELD_BYTES, the oldest large one is given up."""

    def __init__(self) -> None:
        self._bytes = 0
        self._large: dict[LineReader, asyncio.Timeout] = {}  # the oldest first

    def add(self, reader: "LineReader", size: int, deadline: asyncio.Timeout) -> None:
        """Count bytes that a reader has added to its line, which it reads until `deadline`."""
        self._bytes += size
        if reader.held_bytes > SMALL_LINE_BYTES:
            self._large.setdefault(reader, deadline)
        while self._bytes > MAX_HELD_BYTES and self._large:
            oldest, until = next(iter(self._large.items()))
            oldest.give_up()
            if not until.expired():
                until.reschedule(asyncio.get_running_loop().time())

    def remove(self, reader: "LineReader") -> None:
        """Forget the line of a reader."""
        self._bytes -= reader.held_bytes
        self._large.pop(reader, None)


class LineReader:
    """Reads the lines of one answer. Call `aclose` at the end."""

    def __init__(self, answer: httpx.Response, max_bytes: int, held: HeldLines) -> None:
        self.held_bytes = 0
        """Bytes of the unfinished line."""
        self._chunks = _chunks(answer)
        self._max_bytes = max_bytes
        self._held = held
        self._is_given_up = False
        self._finished: deque[bytes] = deque()
        self._pieces: list[bytearray] = []  # of the unfinished line

    async def read(self, seconds: float) -> bytes | None:
        """Return the next line without its end, or None at the end of the answer.

        Raises TimeoutError if the line takes longer, InvalidAnswer if it is too long, ApiError if all answers hold too
        much, and httpx.HTTPError.
        """
        try:
            async with asyncio.timeout(seconds) as deadline:
                while not self._finished:
                    chunk = await anext(self._chunks, None)
                    if chunk is None:
                        return self._take() or None
                    if self._is_given_up:
                        raise _full()
                    first, *others = chunk.split(b"\n")
                    self._add(first, deadline)
                    for other in others:
                        self._finished.append(self._take())
                        self._add(other, deadline)
        except TimeoutError:
            if self._is_given_up:
                raise _full() from None
            raise
        return self._finished.popleft()

    def give_up(self) -> None:
        """Drop the unfinished line; `read` fails."""
        self._is_given_up = True
        self._drop()

    async def aclose(self) -> None:
        """Drop what was read."""
        self._drop()
        await self._chunks.aclose()

    def _add(self, part: bytes, deadline: asyncio.Timeout) -> None:
        if self._is_given_up:
            return
        if self._pieces and len(self._pieces[-1]) < _PIECE_BYTES:
            self._pieces[-1] += part
        else:
            self._pieces.append(bytearray(part))
        self.held_bytes += len(part)
        self._held.add(self, len(part), deadline)
        if self.held_bytes > self._max_bytes:
            raise InvalidAnswer(f"it has a line of more than {self._max_bytes} bytes")

    def _take(self) -> bytes:
        line = b"".join(self._pieces)
        self._drop()
        return line

    def _drop(self) -> None:
        self._held.remove(self)
        self._pieces, self.held_bytes = [], 0


def _full() -> ApiError:
    return ApiError(
        503,
        f"The answers in flight exceed {MAX_HELD_BYTES / 2**20:g} MiB. Repeat the request in {_BUSY_SECONDS} s.",
        None,
        "overloaded",
        _BUSY_SECONDS,
    )


async def _chunks(answer: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of a body. A compressed one is refused: it was not asked for, and may be of any size."""
    encoding = answer.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise InvalidAnswer(f"it is compressed ({encoding[:20]!r})")
    async for chunk in answer.aiter_raw():
        yield chunk
        await asyncio.sleep(0)  # other requests run, however many small chunks have arrived
