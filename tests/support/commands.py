"""Run `preheat` commands in a sandbox: a folder for everything that they write.

The environment points stores, caches and temporary files into the sandbox. The command worker also prevents writes to
other folders (see `command_worker`). A command that a test runs in a process of its own has only the environment.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import typer

from preheat.lazy_group import LazyCommand
from preheat.main import app
from tests.support.odd_files import base64_text
from tests.support.repository import REPOSITORY

WORKER_TIMEOUT_SECONDS = 1800  # for all commands of one worker, which also limits each command
CLOSED_PORT_URL = "http://127.0.0.1:9"  # nothing listens on port 9, so connections are refused at once


def command_tree() -> Any:
    """Return the group of all `preheat` commands. `commands` of a group are those with their options."""
    group: Any = typer.main.get_command(app)
    group.commands |= {name: each.load() for name, each in group.commands.items() if isinstance(each, LazyCommand)}
    return group


@dataclass(frozen=True)
class Invocation:
    """The arguments of `preheat`, and its standard input.

    Arguments may contain lone surrogates: Python decodes a byte that is not UTF-8 to such a character.
    """

    args: list[str]
    stdin: bytes = b""


class CommandResult(TypedDict):
    status: int | str
    """The exit status, or "timeout"."""
    stdout: str
    stderr: str
    forbidden: list[str]
    """Actions that the worker prevented, such as a write outside the sandbox."""
    seconds: float


def make_sandbox(folder: Path) -> Path:
    """Create the sandbox's folders: home, work (the working directory), files (for tests) and tmp. Returns `folder`."""
    for name in ("home", "work", "files", "tmp"):
        (folder / name).mkdir()
    return folder


def run(sandbox: Path, invocations: Sequence[Invocation]) -> list[CommandResult]:
    """Run the commands one after the other in one worker process, and return their results in the same order."""
    lines = [json.dumps({"args": call.args, "stdin": base64_text(call.stdin)}) for call in invocations]
    worker = subprocess.run(
        [sys.executable, "-m", "tests.support.command_worker", str(sandbox)],
        input="\n".join(lines),
        cwd=sandbox / "work",
        env=environment(sandbox),
        capture_output=True,
        text=True,
        timeout=WORKER_TIMEOUT_SECONDS,
    )
    results = [json.loads(line) for line in worker.stdout.splitlines()]
    assert len(results) == len(invocations), worker.stderr[-3000:]
    return results


def environment(sandbox: Path) -> dict[str, str]:
    """Return environment variables for a command in the sandbox.

    Its stores, caches, home and temporary files are in the sandbox. Requests to S3 and the Hugging Face Hub fail.
    """
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(sandbox / "home"),
        "TMPDIR": str(sandbox / "tmp"),
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PREHEAT_STORE": str(sandbox / "work" / "store"),
        "PREHEAT_CACHE_DIR": str(sandbox / "work" / "cache"),
        "HF_HUB_OFFLINE": "1",
        "AWS_ENDPOINT_URL": CLOSED_PORT_URL,
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
        "MPLCONFIGDIR": str(sandbox / "home"),
        "OMP_NUM_THREADS": "1",
        "LANG": "C.UTF-8",
    }
