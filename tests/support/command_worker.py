"""Run many `preheat` commands in one process, each as its own process would see it.

    python -m tests.support.command_worker FOLDER < cases.jsonl > results.jsonl

A case is {"args": [...], "stdin": BASE64}; arguments may hold surrogates, as those of a process do. A result has the
status, stdout, stderr, seconds and the forbidden actions: a write outside FOLDER, a new program. Connections to other
machines fail. A case that takes longer than its limit ends with the status "timeout".
"""

import base64
import ctypes
import io
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

LIMIT_SECONDS = 60.0
_MEMORY_BYTES = 16 * 2**30  # of address space, so that reading an endless device fails soon
_OVERRIDE_PERMISSIONS = 0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, with which root reads everything
_CAPABILITY_VERSION_3 = 0x20080522
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
_HARMLESS_PROGRAMS = {"git", "nvidia-smi", "uname", "ldconfig", "ldconfig.real"}  # they only read


class TimedOut(BaseException):
    """The command took longer than its limit."""


class Guard:
    """Audit hook that records the forbidden actions of the running case, and prevents them."""

    def __init__(self, folder: Path) -> None:
        self._allowed = (str(folder), "/dev/", "/proc/self/")
        self.forbidden: list[str] = []

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITES:
                self._check(path, "write")
        elif event in _CHANGES:
            self._check(arguments[0], event)
        elif event == "subprocess.Popen":
            if Path(os.fsdecode(arguments[0])).name not in _HARMLESS_PROGRAMS:
                self._forbid(f"run {arguments[0]}")
        elif event == "socket.getaddrinfo":
            if arguments[0] not in ("127.0.0.1", "localhost", "::1", b"127.0.0.1", b"localhost"):
                raise socket.gaierror(socket.EAI_NONAME, "no other machine can be reached")
        elif event == "socket.connect":
            if isinstance(arguments[1], tuple) and arguments[1][0] not in ("127.0.0.1", "::1"):
                raise OSError("no other machine can be reached")

    def _check(self, path: Any, action: str) -> None:
        if isinstance(path, (str, bytes, os.PathLike)):
            absolute = os.path.abspath(os.fsdecode(path))
            changes = action not in ("write", "os.mkdir") or not os.path.isdir(absolute)  # otherwise it fails anyway
            if changes and not absolute.startswith(self._allowed):
                self._forbid(f"{action} {absolute}")

    def _forbid(self, action: str) -> None:
        self.forbidden.append(action)
        raise PermissionError(f"not in this test: {action}")


def run(main: Any, args: list[str], stdin: bytes, guard: Guard) -> dict[str, Any]:
    """Run `preheat` with these arguments."""
    environment = dict(os.environ)
    guard.forbidden = []
    out, err = io.BytesIO(), io.BytesIO()
    original = sys.argv, sys.stdin, sys.stdout, sys.stderr
    sys.argv = ["preheat", *args]
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), "utf-8")
    sys.stdout = io.TextIOWrapper(out, "utf-8", write_through=True)
    sys.stderr = io.TextIOWrapper(err, "utf-8", errors="backslashreplace", write_through=True)
    status: Any = 0
    started = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
    try:
        main()
    except SystemExit as end:
        status = 0 if end.code is None else end.code
    except TimedOut:
        status = "timeout"
        traceback.print_exc()
    except BaseException:
        status = 1
        traceback.print_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.flush()
        out_bytes, err_bytes = out.getvalue(), err.getvalue()
        sys.argv, sys.stdin, sys.stdout, sys.stderr = original
        os.environ.clear()
        os.environ.update(environment)
    return {
        "status": status,
        "stdout": out_bytes.decode(errors="backslashreplace"),
        "stderr": err_bytes.decode(errors="backslashreplace"),
        "forbidden": guard.forbidden,
        "seconds": time.perf_counter() - started,
    }


def _drop_permission_overrides() -> None:
    """Make file permissions apply to root as to every other user. Does nothing for other users."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then their upper halves
    if libc.capget(header, data) == 0:
        data[0] &= ~_OVERRIDE_PERMISSIONS
        data[1] &= ~_OVERRIDE_PERMISSIONS
        libc.capset(header, data)


def _time_out(number: int, frame: FrameType | None) -> None:
    raise TimedOut


def main() -> None:
    from preheat.main import main as preheat

    guard = Guard(Path(sys.argv[1]).resolve())
    cases = [json.loads(line) for line in sys.stdin]
    results = sys.stdout
    _drop_permission_overrides()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGALRM, _time_out)
    sys.addaudithook(guard)
    threading.excepthook = lambda failed: traceback.print_exception(failed.exc_value)
    for case in cases:
        result = run(preheat, case["args"], base64.b64decode(case["stdin"]), guard)
        results.write(json.dumps(result) + "\n")
        results.flush()


if __name__ == "__main__":
    main()
