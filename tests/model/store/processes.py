"""Run scripts as processes in this repository, also with mounts of their own."""

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.repository import REPOSITORY

CHANGING_FILE = Path("/proc/self/io")  # counts the reads of this process, so each read of it returns other bytes


def python(
    script: str, *arguments: object, prefix: tuple[str, ...] = (), environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[str]":
    """Start `script` without this machine's credentials and settings. `prefix`: a command that starts it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PREHEAT_"))}
    return subprocess.Popen(
        [*prefix, sys.executable, "-W", "error::ResourceWarning", "-c", textwrap.dedent(script), *map(str, arguments)],
        cwd=REPOSITORY, env={**inherited, "PYTHONPATH": str(REPOSITORY), **(environment or {})},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: "subprocess.Popen[str]") -> str:
    """Wait for the process and return its output. It must succeed."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def own_mounts() -> tuple[str, ...]:
    """Return a command prefix that gives a process its own mounts. Skips the test if the system refuses that."""
    prefixes = (("unshare", "--mount"), ("unshare", "--map-root-user", "--mount"))
    for prefix in prefixes if shutil.which("unshare") else ():
        if subprocess.run([*prefix, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0:
            return prefix
    pytest.skip("needs the right to mount a small disk: run as root, or where unshare --map-root-user works")
