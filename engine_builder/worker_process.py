"""Worker processes that end with their parent process."""

import os
import signal
import threading
from contextlib import suppress
from multiprocessing import parent_process
from multiprocessing.context import SpawnProcess
from pathlib import Path

_EXIT_GRACE_SECONDS = 2.0


def end_with_parent() -> None:
    """End this process, and what it has started, when its parent ends, even by kill -9. Signals are left to the parent.

    A terminal or a service manager sends them to all processes. The parent then ends this one.
    """
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def end_process(process: SpawnProcess) -> None:
    """Wait until a process ends. Kills it after a grace period; see `kill_process`."""
    process.join(_EXIT_GRACE_SECONDS)
    kill_process(process)


def kill_process(process: SpawnProcess) -> None:
    """End a process that called `end_with_parent`, and what it has started, for example a compiler."""
    if process.is_alive() and process.pid is not None:
        with suppress(ProcessLookupError):  # it has no group yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.join()


def cpu_seconds(process: SpawnProcess) -> float:
    """Return the CPU time that a process that called `end_with_parent`, and what it has started, have used.

    Fields of /proc/PID/stat: proc_pid_stat(5). Ended children count in those that waited for them.
    """
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()  # from field 3 on: the name may have spaces
            # Until it calls `end_with_parent` it has no session of its own.
            if process.pid in (int(fields[3]), int(path.parent.name)):
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _exit_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
