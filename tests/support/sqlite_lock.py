"""A lock on an SQLite file, as another program holds it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, statement: str) -> Iterator[None]:
    """Hold a lock of SQLite on a file from another process, because a process loses its own as it closes the file."""
    script = (
        "import sqlite3, sys; connection = sqlite3.connect(sys.argv[1], isolation_level=None);"
        "connection.execute('BEGIN'); connection.execute(sys.argv[2]).fetchall(); print('locked', flush=True);"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(path), statement]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"locked\n"
        try:
            yield
        finally:
            process.communicate()
