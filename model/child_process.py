"""Start a child of this interpreter that imports the same modules and ends with its parent.

The parent holds one end of a pipe, the child's stdin, and never writes to it. The kernel closes it when the parent
ends, however that happens. Then the child ends, too.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

FAILED_EXIT_CODE = 70  # of a process whose device failed; EX_SOFTWARE of sysexits.h
_hangs_at_exit = False
_ROOT = str(Path(__file__).resolve().parents[1])  # not in sys.path in a script of an editable installation
GRACE_SECONDS = 2.0  # for answers in flight, before a process with a failed device ends


def start_child(
    entry: str,
    *arguments: int,
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
    stdout: int | None = None,
    inherited: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """Start a child that calls the function `entry` ("package.module.function") with `arguments`.

    environment: variables in addition to this process's own. stdout: of `subprocess.Popen`. inherited: file descriptors
    that stay open in the child. Raises OSError.
    """
    module, _, function = entry.rpartition(".")
    call = f"{function}({', '.join(map(str, arguments))})"
    path = os.pathsep.join(folder or os.getcwd() for folder in [*sys.path, _ROOT])
    return subprocess.Popen(
        # -S: no .pth files, which take time; the folders that they add are already in `path`. -P: not the current one.
        [python, "-S", "-P", "-c", f"from {module} import {function}; {call}"],
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        stdin=subprocess.PIPE,
        stdout=stdout,
        pass_fds=inherited,
    )


def start_connected_child(entry: str, environment: Mapping[str, str]) -> "tuple[subprocess.Popen[bytes], Connection]":
    """Start a child whose `entry` gets the file descriptor of a connection, whose other end is returned.

    Raises OSError.
    """
    from multiprocessing.connection import Connection

    own, other = socket.socketpair()
    with other:
        process = start_child(entry, other.fileno(), environment=environment, inherited=[other.fileno()])
    return process, Connection(own.detach())


def shut_down(connection: "Connection") -> None:
    """End a connection of `start_connected_child`, also for threads that wait for it. They get EOFError or OSError."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own, suppress(OSError):
        own.shutdown(socket.SHUT_RDWR)


def wait_for_parent() -> None:
    """Return when the parent has ended or closed this process's stdin."""
    while os.read(0, 1):
        pass


def end_with_parent() -> None:
    """End this process when its parent ends. Returns at once."""

    def watch() -> None:
        wait_for_parent()
        os._exit(0)

    threading.Thread(target=watch, name="preheat-parent", daemon=True).start()


def mark_hanging_exit() -> None:
    """Record that the interpreter of this process may hang at its end. A command then ends by `exit_now`."""
    global _hangs_at_exit
    _hangs_at_exit = True


def hangs_at_exit() -> bool:
    return _hangs_at_exit


def exit_now(code: int) -> None:
    """End this process without the interpreter's own end, after its output is written."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def exit_soon() -> None:
    """End this process after a grace period for answers in flight, with the exit code of a failed device."""
    timer = threading.Timer(GRACE_SECONDS, os._exit, [FAILED_EXIT_CODE])
    timer.daemon = True
    timer.start()


def visible_gpu(number: int, gpus: int) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for one of the `gpus` GPUs that this process sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(gpus)]
    return names[number].strip()
