"""Folders for the files of local servers: one for each server, deleted when it ends.

The process that starts a server locks its folder, and the server's process inherits the lock. The kernel releases the
lock when both have ended, also after kill -9. So a folder with a free lock is abandoned, and the next server deletes
it.
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

    remedy = "Free disk space, or change the folder's permissions."


@dataclass(frozen=True)
class ServerFolder:
    """A locked folder. `lock`: a file descriptor that the server's process must inherit."""

    path: Path
    lock: int


@contextmanager
def server_folder(parent: Path) -> Iterator[ServerFolder]:
    """Make a folder under `parent` for one server, and delete it at the end.

    After an error the folder with its log stays until the next server starts. Deletes abandoned folders first. Raises
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
        with suppress(FileNotFoundError):  # no lock: a process was killed while it made or deleted the folder
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            finally:
                os.close(lock)
        shutil.rmtree(path, ignore_errors=True)
