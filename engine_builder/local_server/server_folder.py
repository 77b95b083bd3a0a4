"""Folders for the files of local servers: one for each server, deleted when it ends.

The owner holds a lock on its folder, and its server process inherits it. The kernel releases it when both have ended,
also after kill -9. So a folder whose lock is free belongs to nobody, and the next server deletes it.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from model.errors import PreheatError


class FolderFailed(PreheatError):
    """The folder of a server cannot be made."""

    remedy = "Make room or change its permissions."


@dataclass(frozen=True)
class ServerFolder:
    """The folder `path`, and the file descriptor `lock`, which the server's process must inherit."""

    path: Path
    lock: int


@contextmanager
def server_folder(parent: Path) -> Iterator[ServerFolder]:
    """Make a folder under `parent` for one server, and delete it at the end.

    After an error it stays for its log, until the next server starts. Deletes abandoned folders first. Raises
    FolderFailed.
    """
    try:
        with _exclusive(parent):
            _delete_abandoned(parent)
            path = Path(mkdtemp(prefix="server-", dir=parent))
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise FolderFailed(f"{parent} cannot hold a server's files: {error.strerror}.") from error
    try:
        yield ServerFolder(path, lock)
    except Exception:
        raise
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    else:
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


@contextmanager
def _exclusive(parent: Path) -> Iterator[None]:
    """Let one process at a time make and delete folders under `parent`."""
    parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(parent / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _delete_abandoned(parent: Path) -> None:
    for path in parent.glob("server-*"):
        with suppress(FileNotFoundError):  # no lock: its owner was killed while it made or deleted the folder
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            finally:
                os.close(lock)
        shutil.rmtree(path, ignore_errors=True)
