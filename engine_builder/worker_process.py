"""Worker processes that end with their parent process."""

import os
import signal
import threading
from multiprocessing import parent_process
from multiprocessing.context import SpawnProcess

_EXIT_GRACE_SECONDS = 2.0


def end_with_parent() -> None:
    """End this process when its parent ends, even by kill -9. Ctrl-C is left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def end_process(process: SpawnProcess) -> None:
    """Wait until a process ends. Kills it after a grace period."""
    process.join(_EXIT_GRACE_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()


def _exit_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
