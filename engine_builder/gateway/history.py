"""The history of finished requests, in an SQLite file. It has prompts and settings; images are digests, never data.

A key sees and deletes only its own entries. The file is readable by its owner only, and keeps the newest entries.
"""

import json
import os
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

from engine_builder.files import check_writable
from engine_builder.gateway.errors import GatewayConfigError

MAX_ENTRIES = 10_000  # of all keys
MAX_LISTED = 200  # of one answer
_SQLITE_HEADER = b"SQLite format 3\0"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS history (
    id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL, created INTEGER NOT NULL, entry TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS history_of_key ON history (key, id);
"""
_REMEDY = "Name a new file, or one of this gateway."
Entry = dict[str, Any]


class History:
    """An open history. Any thread may call its methods; they take milliseconds."""

    def __init__(self, path: Path, max_entries: int = MAX_ENTRIES) -> None:
        """Open or make the file, in a folder that exists. Afterwards only its owner can read it.

        Raises GatewayConfigError, also for a file of another user unless this one is root, or NotWritable.
        """
        check_writable(path)
        self._lock = threading.Lock()
        self._max_entries = max_entries
        try:
            _make_private(path)
            self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            try:
                self._connection.executescript(_SCHEMA)
            except sqlite3.Error:
                self._connection.close()
                raise
        except (OSError, ValueError, sqlite3.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise GatewayConfigError(f"The history {str(path)!r} cannot be opened: {reason}.", _REMEDY) from error

    def add(self, key: str, entry: Entry) -> None:
        """Add an entry of the key with this name, and drop the oldest entries beyond the limit."""
        with self._lock:
            added = self._connection.execute(
                "INSERT INTO history (key, created, entry) VALUES (?, ?, ?)", (key, int(time.time()), json.dumps(entry))
            )
            self._connection.execute("DELETE FROM history WHERE id <= ?", ((added.lastrowid or 0) - self._max_entries,))

    def list(self, key: str, limit: int, before: int | None = None) -> list[Entry]:
        """Return at most `limit` entries of a key, the newest first, of those with an id smaller than `before`."""
        with self._lock:
            rows = self._connection.execute(
                "SELECT id, created, entry FROM history WHERE key = ? AND id < ? ORDER BY id DESC LIMIT ?",
                (key, 2**62 if before is None else before, limit),
            ).fetchall()
        return [{"id": number, "created": created, **json.loads(entry)} for number, created, entry in rows]

    def clear(self, key: str) -> int:
        """Delete all entries of a key. Return their number."""
        with self._lock:
            return self._connection.execute("DELETE FROM history WHERE key = ?", (key,)).rowcount

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()


def _make_private(path: Path) -> None:
    """Make the file, or take the permissions of all other users from it. Raises GatewayConfigError or OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        if os.geteuid() not in (0, os.fstat(descriptor).st_uid):
            raise GatewayConfigError(f"The history {str(path)!r} cannot be opened: another user owns it.", _REMEDY)
        # The permissions of a file that SQLite will refuse stay as they are.
        if os.read(descriptor, len(_SQLITE_HEADER)) in (b"", _SQLITE_HEADER):
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
