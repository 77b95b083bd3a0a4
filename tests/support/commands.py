"""Runs `preheat` commands for tests: in a folder of their own, outside of which they write nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import REPOSITORY
from tests.support.odd_files import encoded


@dataclass(frozen=True)
class Case:
    """A command line without `preheat`, and its standard input. Arguments may hold surrogates."""

    args: list[str]
    stdin: bytes = b""


def make_arena(folder: Path) -> Path:
    """Make the folders that `environment` names. Returns `folder`."""
    for name in ("home", "work", "files", "tmp"):
        (folder / name).mkdir()
    return folder


def run_here(arena: Path, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Run the commands in one process, in `arena`/work, and return their results (see `command_worker`)."""
    lines = [json.dumps({"args": case.args, "stdin": encoded(case.stdin)}) for case in cases]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.command_worker", str(arena)],
        input="\n".join(lines),
        cwd=arena / "work",
        env=environment(arena),
        capture_output=True,
        text=True,
    )
    results = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(results) == len(cases), ran.stderr[-3000:]
    return results


def environment(arena: Path) -> dict[str, str]:
    """Return an environment in which nothing outside the arena is written, and no other machine is asked."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(arena / "home"),
        "TMPDIR": str(arena / "tmp"),
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PREHEAT_STORE": str(arena / "work" / "store"),
        "PREHEAT_CACHE_DIR": str(arena / "work" / "cache"),
        "HF_HUB_OFFLINE": "1",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
        "MPLCONFIGDIR": str(arena / "home"),
        "OMP_NUM_THREADS": "1",
        "LANG": "C.UTF-8",
    }
