"""Folders of unpacked packages, each for as long as a container needs it.

A process may end at any time, and leave its folders. So they are in one folder for each process, with a file that the
process holds locked, and each process first deletes the folders of those that have ended.
"""

import atexit
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

_PREFIX = "preheat-engines-"
_LOCK = "lock"


def make_folder() -> Path:
    """Return a new folder. Delete it with `shutil.rmtree`."""
    return Path(tempfile.mkdtemp(dir=_of_process()))


@cache
def _of_process() -> Path:
    """Return the folder of this process, in the system's folder of temporary files."""
    root = Path(tempfile.gettempdir())
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # of another user, or deleted meanwhile
            _delete_if_left(folder)
    # Locked under another name first: no other process may take it for a folder that was left.
    folder = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
    fcntl.flock(os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_EX)  # until the process ends
    folder = folder.rename(root / folder.name.removeprefix("."))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _delete_if_left(folder: Path) -> None:
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)
