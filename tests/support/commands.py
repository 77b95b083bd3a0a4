"""Run `preheat` commands in a sandbox: a folder outside of which they write nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import REPOSITORY
from tests.support.odd_files import base64_text


@dataclass(frozen=True)
class Case:
    """A command line without `preheat`, and its standard input. Arguments may hold surrogates."""

    args: list[str]
    stdin: bytes = b""


def make_sandbox(folder: Path) -> Path:
    """Create the folders that `environment` names. Returns `folder`."""
    for name in ("home", "work", "files", "tmp"):
        (folder / name).mkdir()
    return folder


def run(sandbox: Path, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Run the commands in one process, in `sandbox`/work, and return their results (see `command_worker`)."""
    lines = [json.dumps({"args": case.args, "stdin": base64_text(case.stdin)}) for case in cases]
    worker = subprocess.run(
        [sys.executable, "-m", "tests.support.command_worker", str(sandbox)],
        input="\n".join(lines),
        cwd=sandbox / "work",
        env=environment(sandbox),
        capture_output=True,
        text=True,
    )
    results = [json.loads(line) for line in worker.stdout.splitlines()]
    assert len(results) == len(cases), worker.stderr[-3000:]
    return results


def environment(sandbox: Path) -> dict[str, str]:
    """Return an environment in which nothing outside the sandbox is written, and no other machine is contacted."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(sandbox / "home"),
        "TMPDIR": str(sandbox / "tmp"),
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PREHEAT_STORE": str(sandbox / "work" / "store"),
        "PREHEAT_CACHE_DIR": str(sandbox / "work" / "cache"),
        "HF_HUB_OFFLINE": "1",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
        "MPLCONFIGDIR": str(sandbox / "home"),
        "OMP_NUM_THREADS": "1",
        "LANG": "C.UTF-8",
    }
