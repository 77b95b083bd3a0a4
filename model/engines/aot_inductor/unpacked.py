"""Folders of unpacked packages, each for as long as a container needs it.

A process may end at any time, and leave its folders. So they are in one folder for each process, which the process
holds locked, and each process first deletes the folders of those that have ended.
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


def make_folder() -> Path:
    """Return a new folder. Delete it with `shutil.rmtree`."""
    try:
        return Path(tempfile.mkdtemp(dir=_of_process(os.getpid())))
    except FileNotFoundError:  # something has cleaned the folder of temporary files
        _of_process.cache_clear()
        return Path(tempfile.mkdtemp(dir=_of_process(os.getpid())))


@cache
def _of_process(process: int) -> Path:
    """Return the folder of this process, in the system's folder of temporary files. `process`: its id."""
    root = Path(tempfile.gettempdir())
    for left in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # locked, of another user, or deleted meanwhile
            handle = _locked(left)
            shutil.rmtree(left, ignore_errors=True)
            os.close(handle)
    # Locked under another name first: no other process may take it for a folder that was left.
    folder = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
    with suppress(OSError):  # without locks the name stays, under which no other process looks for it
        _locked(folder)  # until the process ends
        folder = folder.rename(root / folder.name.removeprefix("."))
    atexit.register(_delete, folder, process)
    return folder


def _locked(folder: Path) -> int:
    """Lock a folder, and return the descriptor that holds the lock. Raises OSError, also if another process has it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def _delete(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not a fork of it
        shutil.rmtree(folder, ignore_errors=True)
