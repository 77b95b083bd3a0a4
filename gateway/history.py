"""The history of finished requests, in an SQLite file. It has prompts and settings; images are digests, never data.

A key sees and deletes only its own entries. The file is readable by its owner only, and keeps the newest entries.

One thread uses the file, so that a lock, a full disk or a missing file never delays an image. Entries wait in memory
until they can be written. What exceeds that memory is lost, counted, and logged.
"""

import asyncio
import json
import logging
import os
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine_builder.files import check_writable
from gateway.errors import ApiError, GatewayConfigError

MAX_ENTRIES = 10_000  # of all keys
MAX_LISTED = 200  # of one answer
MAX_WAITING = 10_000  # entries that wait to be written
MAX_WAITING_BYTES = 2**24
_BUSY_SECONDS = 0.2  # to wait for another program's lock in one attempt
_RETRY_SECONDS = 0.5  # between two attempts
_ANSWER_SECONDS = 2.0  # to wait for a list
_CLOSE_SECONDS = 5.0  # to write the entries that wait at the end
_SQLITE_HEADER = b"SQLite format 3\0"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS history (
    id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL, created INTEGER NOT NULL, entry TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS history_of_key ON history (key, id);
"""
_REMEDY = "Name a new file, or one of this gateway."
Entry = dict[str, Any]
T = TypeVar("T")
logger = logging.getLogger("preheat.gateway")


@dataclass
class _OpenFile:
    """A connection, and the device and inode of its file."""

    connection: sqlite3.Connection
    identity: tuple[int, int]


class History:
    """An open history. Any thread may call its methods; none of them waits for the file, except `close`."""

    def __init__(self, path: Path, max_entries: int = MAX_ENTRIES) -> None:
        """Open or make the file, in a folder that exists. Afterwards only its owner can read it.

        A file that is locked is opened later. Raises GatewayConfigError, also for a file of another user unless this
        one is root, or NotWritable.
        """
        check_writable(path)
        self._path = path
        self._max_entries = max_entries
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: end the thread
        self._guard = threading.Lock()  # guards the next four; never held while the file is used
        self._waiting: deque[tuple[str, int, str]] = deque()  # key, time, JSON
        self._waiting_bytes = 0
        self.lost = 0
        """Entries that were never written."""
        self._lost_logged = 0
        # Only the thread uses the next three.
        self._file: _OpenFile | None = None
        self._problem = ""  # of the last attempt
        self._retry_at = 0.0  # time.monotonic()
        try:
            self._file = self._open()
        except (OSError, ValueError, sqlite3.Error) as error:
            if not _is_locked(error):
                raise GatewayConfigError(
                    f"The history {str(path)!r} cannot be opened: {_reason(error)}.", _REMEDY
                ) from error
            self._fail(error)
        self._thread = threading.Thread(target=self._work, name="history", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """The number of entries that wait to be written."""
        return len(self._waiting)

    def add(self, key: str, entry: Entry) -> None:
        """Add an entry of the key with this name soon, and drop the oldest entries beyond the limit."""
        text = json.dumps(entry)
        with self._guard:
            if len(self._waiting) >= MAX_WAITING or self._waiting_bytes + len(text) > MAX_WAITING_BYTES:
                if self.lost == self._lost_logged:
                    logger.error("Entries of the history %s are being lost.", self._path)
                self.lost += 1
                return
            self._waiting.append((key, int(time.time()), text))
            self._waiting_bytes += len(text)
        self._inbox.put(self._write)

    def count_lost(self, error: Exception) -> None:
        """Count an entry that could not be made."""
        logger.error("A finished request has no entry in the history.", exc_info=error)
        with self._guard:
            self.lost += 1
            self._lost_logged += 1

    def list(self, key: str, limit: int, before: int | None = None) -> "Future[list[Entry]]":
        """Return at most `limit` entries of a key, the newest first, of those with an id smaller than `before`.

        See `answer_of`.
        """

        def read(connection: sqlite3.Connection) -> Any:
            rows = connection.execute(
                "SELECT id, created, entry FROM history WHERE key = ? AND id < ? ORDER BY id DESC LIMIT ?",
                (key, 2**62 if before is None else before, limit),
            ).fetchall()
            return [{"id": number, "created": created, **json.loads(entry)} for number, created, entry in rows]

        return self._ask(read)

    def clear(self, key: str) -> Future[int]:
        """Delete all entries of a key, also those that wait. Return their number. See `answer_of`."""
        return self._ask(lambda connection: connection.execute("DELETE FROM history WHERE key = ?", (key,)).rowcount)

    def close(self) -> None:
        """Write the entries that wait, for a few seconds at most, and close the file."""
        self._inbox.put(None)
        self._thread.join(_CLOSE_SECONDS + 2 * _BUSY_SECONDS)
        with self._guard:
            if self._waiting:
                self.lost += len(self._waiting)
                logger.error("%d entries of the history %s are lost.", len(self._waiting), self._path)

    def _ask(self, operation: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Let the thread call `operation` after it has written the entries that wait."""
        future: Future[T] = Future()

        def answer() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if time.monotonic() < self._retry_at:
                    raise _unavailable()
                future.set_result(self._use(operation))
            except ApiError as error:
                future.set_exception(error)

        if self._inbox.qsize() > 2 * MAX_WAITING:  # the file's disk does not answer
            future.set_exception(_unavailable())
        else:
            self._inbox.put(answer)
        return future

    def _work(self) -> None:
        while True:
            try:
                task = self._inbox.get(timeout=_RETRY_SECONDS if self._waiting else None)
            except queue.Empty:
                task = self._write
            if task is None:
                break
            task()
        end = time.monotonic() + _CLOSE_SECONDS
        while self._waiting and time.monotonic() < end:
            time.sleep(max(0.0, min(end, self._retry_at) - time.monotonic()))
            self._write()
        self._close_file()

    def _write(self) -> None:
        if self._waiting and time.monotonic() >= self._retry_at:
            try:
                self._use(lambda _: None)
            except ApiError:
                pass  # it is logged, and tried again

    def _use(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        """Write the entries that wait, and call `operation`. Raises ApiError."""
        try:
            connection = self._connect()
            if self._waiting:
                self._write_to(connection)
            result = operation(connection)
        except Exception as error:  # whatever it is, it must not end the thread
            self._fail(error)
            raise _unavailable() from error
        with self._guard:
            lost, self._lost_logged = self.lost - self._lost_logged, self.lost
        if self._problem or lost:
            logger.warning("The history %s can be used again. Entries lost meanwhile: %d.", self._path, lost)
            self._problem = ""
        return result

    def _write_to(self, connection: sqlite3.Connection) -> None:
        with self._guard:
            entries = list(self._waiting)
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.executemany("INSERT INTO history (key, created, entry) VALUES (?, ?, ?)", entries)
            connection.execute(
                "DELETE FROM history WHERE id <= (SELECT max(id) FROM history) - ?", (self._max_entries,)
            )
            connection.execute("COMMIT")
        except BaseException:
            connection.rollback()
            raise
        with self._guard:
            for _, _, text in entries:
                self._waiting.popleft()
                self._waiting_bytes -= len(text)

    def _connect(self) -> sqlite3.Connection:
        """Return a connection to the file that is now at the path. A missing file is made."""
        if self._file is not None:
            try:
                found = os.stat(self._path)
            except FileNotFoundError:
                found = None
            if found is None or (found.st_dev, found.st_ino) != self._file.identity:
                logger.warning(
                    "The history %s was deleted or replaced. Entries are written to the file of this name.", self._path
                )
                self._close_file()
        if self._file is None:
            self._file = self._open()
        return self._file.connection

    def _open(self) -> _OpenFile:
        identity = _make_private(self._path)
        connection = sqlite3.connect(self._path, timeout=_BUSY_SECONDS, check_same_thread=False, isolation_level=None)
        try:
            connection.executescript(_SCHEMA)
        except sqlite3.Error:
            connection.close()
            raise
        return _OpenFile(connection, identity)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.connection.close()
            self._file = None

    def _fail(self, error: Exception) -> None:
        """Log the first failure of a row. Try again later, with the file opened again unless it is only locked."""
        if not self._problem:
            self._problem = _reason(error)
            logger.error(
                "The history %s cannot be used: %s. Up to %d entries wait in memory.",
                self._path,
                self._problem,
                MAX_WAITING,
            )
        if not _is_locked(error):
            self._close_file()
        self._retry_at = time.monotonic() + _RETRY_SECONDS


async def answer_of(asked: Future[T]) -> T:
    """Return what was asked of a history. Raises ApiError with status 503 if its file cannot be used within seconds."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(asked), _ANSWER_SECONDS)
    except TimeoutError as error:
        raise _unavailable() from error


def _unavailable() -> ApiError:
    return ApiError(
        503,
        "The history cannot be used now; the gateway's log has the reason. Repeat the request.",
        None,
        "history_unavailable",
        1,
    )


def _is_locked(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without SQLite's extension of the code
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _make_private(path: Path) -> tuple[int, int]:
    """Make the file, or take the permissions of all other users from it. Return its device and inode.

    Raises GatewayConfigError or OSError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        found = os.fstat(descriptor)
        if os.geteuid() not in (0, found.st_uid):
            raise GatewayConfigError(f"The history {str(path)!r} cannot be opened: another user owns it.", _REMEDY)
        # The permissions of a file that SQLite will refuse stay as they are.
        if os.read(descriptor, len(_SQLITE_HEADER)) in (b"", _SQLITE_HEADER):
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
    return found.st_dev, found.st_ino
