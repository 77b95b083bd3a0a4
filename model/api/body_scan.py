"""Bound the cost of parsing a body, while it arrives and before it is parsed.

A body of a few megabytes can hold millions of values, and a parser that builds them holds the interpreter lock for
seconds. A request of Preheat has few values: its size is the base64 of its images. So a JSON body may have 1 MiB apart
from long runs of base64, and a msgpack body a number of values.
"""

import re
from typing import Protocol

from model.errors import RequestRefused

MAX_TEXT_BYTES = 2**20  # of a JSON body, apart from runs
MIN_RUN_BYTES = 1024  # a shorter run counts as text
MAX_DEPTH = 100  # of a JSON body, at least: values that are opened one after the other without a text count as nested
MAX_VALUES = 100_000  # of a msgpack body
_MAX_ESCAPES_SHARE = 1 / 16  # of a body; some clients write "/" as "\/", which is 1 of 64 characters of base64
# Base64, and the backslash of "\/".
_RUN_CHARACTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=\\"
_RUN = re.compile(rb"[A-Za-z0-9+/=\\]+")


class BodyScan(Protocol):
    """Reads a body in the parts that arrive."""

    def feed(self, part: bytes) -> None:
        """Read the next part. Raises RequestRefused for a body that costs too much to parse."""


class JsonScan:
    """Finds the long runs of base64 in a JSON body, and how deep its values are nested.

    A run of digits only is text, because thousands of digits are slow to parse as numbers.
    """

    def __init__(self) -> None:
        self.runs: list[tuple[int, int]] = []
        """The first and the last position, exclusive, of each run that has ended."""
        self._bytes = self._run_bytes = self._escapes = 0
        self._open: int | None = None  # the first position of the run at the end of what has arrived
        self._is_open_run_digits = True
        self._depth = 0
        self._is_in_text = False
        self._rest = b""  # a backslash whose next character has not arrived

    def feed(self, part: bytes) -> None:
        """Read the next part. Raises RequestRefused."""
        self._escapes += part.count(b"\\")
        self._follow_depth(part)
        if part.translate(None, _RUN_CHARACTERS):
            self._find_runs(part)
        else:
            self._extend(self._bytes, part)
        self._bytes += len(part)
        self._check()

    def finish(self) -> list[tuple[int, int]]:
        """Return all runs of the whole body."""
        self._close(self._bytes)
        return self.runs

    def _find_runs(self, part: bytes) -> None:
        end = 0  # of the last run in this part
        for match in _RUN.finditer(part):
            start, end = match.span()
            if start:
                self._close(self._bytes)  # a run of the part before
            if end == len(part):
                self._extend(self._bytes + start, match[0])
            elif start == 0 and self._open is not None:
                self._extend(self._bytes, match[0])
                self._close(self._bytes + end)
            elif end - start >= MIN_RUN_BYTES and not match[0].isdigit():
                self._add(self._bytes + start, self._bytes + end)
        if end != len(part):
            self._close(self._bytes)

    def _follow_depth(self, part: bytes) -> None:
        data = self._rest + part if self._rest else part
        backslashes = len(data) - len(data.rstrip(b"\\"))
        self._rest = b"\\" if backslashes % 2 else b""
        data = data[: len(data) - len(self._rest)].replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = data.translate(None, _RUN_CHARACTERS).split(b'"')
        for number, piece in enumerate(pieces):
            if self._is_in_text == (number % 2 == 1):  # outside of texts
                opened = piece.count(b"[") + piece.count(b"{")
                if self._depth + opened > MAX_DEPTH:
                    raise RequestRefused("request", f"its JSON is nested more than {MAX_DEPTH} deep.")
                self._depth += opened - piece.count(b"]") - piece.count(b"}")
        self._is_in_text ^= len(pieces) % 2 == 0

    def _extend(self, start: int, run: bytes) -> None:
        if self._open is None:
            self._open, self._is_open_run_digits = start, True
        self._is_open_run_digits = self._is_open_run_digits and (not run or run.isdigit())

    def _close(self, end: int) -> None:
        if self._open is not None and end - self._open >= MIN_RUN_BYTES and not self._is_open_run_digits:
            self._add(self._open, end)
        self._open = None

    def _add(self, start: int, end: int) -> None:
        self.runs.append((start, end))
        self._run_bytes += end - start

    def _check(self) -> None:
        run = 0 if self._open is None or self._is_open_run_digits else self._bytes - self._open
        if self._bytes - self._run_bytes - run > MAX_TEXT_BYTES:
            raise RequestRefused("request", f"it has more than {MAX_TEXT_BYTES // 2**20} MiB of JSON besides base64.")
        if self._escapes > MAX_TEXT_BYTES // 8 + self._bytes * _MAX_ESCAPES_SHARE:
            raise RequestRefused("request", "its JSON has too many escaped characters (backslashes).")


class MsgpackScan:
    """Counts the values of a msgpack body, as its specification lays them out."""

    def __init__(self) -> None:
        self._values = self._skipped = 0
        self._rest = b""  # the first bytes of a value whose length has not arrived

    def feed(self, part: bytes) -> None:
        """Read the next part. Raises RequestRefused."""
        if self._skipped >= len(part):
            self._skipped -= len(part)
            return
        data, position = self._rest + part[self._skipped :], 0
        self._rest, self._skipped = b"", 0
        while position < len(data):
            length_bytes, content_bytes = _MSGPACK_VALUES.get(data[position], (0, 0))
            end = position + 1 + length_bytes
            if end > len(data):
                self._rest = data[position:]
                return
            position = end + content_bytes + int.from_bytes(data[position + 1 : end])
            self._values += 1
            if self._values > MAX_VALUES:
                raise RequestRefused("request", f"it has more than {MAX_VALUES:,} values.")
        self._skipped = position - len(data)


# First byte of a value -> the bytes of its length, and what its content has beyond that length. Values of one byte, and
# the heads of arrays and maps, are left out: their entries are values.
_MSGPACK_VALUES = {
    **{0xA0 + length: (0, length) for length in range(32)},  # short texts
    **{0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)},  # bytes, extensions
    **{0xCA: (0, 4), 0xCB: (0, 8)},  # floats
    **{first + power: (0, 2**power) for first in (0xCC, 0xD0) for power in range(4)},  # integers
    **{0xD4 + power: (0, 1 + 2**power) for power in range(5)},  # extensions of a fixed length
    **{0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)},  # texts
    **{0xDC: (0, 2), 0xDD: (0, 4), 0xDE: (0, 2), 0xDF: (0, 4)},  # arrays and maps: the number of entries
}


def scan_of(content_type: str) -> BodyScan:
    """Return the scan of a body as Truss parses it: msgpack if its type says so, else JSON."""
    media_type = content_type.partition(";")[0].strip().lower()
    return MsgpackScan() if media_type == "application/octet-stream" else JsonScan()
