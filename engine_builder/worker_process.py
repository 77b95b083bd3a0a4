"""Worker processes that end with the process that started them."""

import os
import signal
import threading
from multiprocessing import parent_process
from multiprocessing.context import SpawnProcess

_EXIT_GRACE_SECONDS = 2.0


def follow_parent() -> None:
    """Make this process end when its parent does, even by kill -9, and leave Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def end(process: SpawnProcess) -> None:
    """Wait for a process that was told to end, and kill it if it does not."""
    process.join(_EXIT_GRACE_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()


def _exit_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
