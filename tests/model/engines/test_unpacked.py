"""Folders of unpacked engines: the folders of processes that were killed are deleted."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from model.engines.aot_inductor.unpacked import make_folder
from tests.support.repository import REPOSITORY

_SCRIPT = """
import sys, tempfile
from model.engines.aot_inductor.unpacked import make_folder
print(make_folder(), flush=True)
sys.stdin.read()
"""


def _start(temporary: Path, script: str = _SCRIPT) -> tuple["subprocess.Popen[str]", Path]:
    """Start a process that makes a folder. Return it with the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_process_deletes_the_folders_of_those_that_were_killed(tmp_path: Path) -> None:
    killed, left = _start(tmp_path)
    running, kept = _start(tmp_path)
    assert left.is_dir() and left.parent != kept.parent, "each process has a folder of its own"
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert left.is_dir()
    other, own = _start(tmp_path)
    assert not left.parent.exists() and kept.is_dir() and own.is_dir()
    for process in (running, other):
        process.communicate(timeout=60)
    assert [*tmp_path.iterdir()] == [], "a process that ends deletes its own folder"


def test_folders_of_one_process_are_beside_each_other() -> None:
    first, second = make_folder(), make_folder()
    assert first != second and first.parent == second.parent
    shutil.rmtree(first.parent)  # as by a program that cleans the folder of temporary files
    assert make_folder().is_dir()


def test_a_fork_leaves_its_parents_folder(tmp_path: Path) -> None:
    script = _SCRIPT.replace(
        "sys.stdin.read()", "import os\nif os.fork() == 0: sys.exit()\nos.wait()\nsys.stdin.read()"
    )
    process, folder = _start(tmp_path, script)
    other, _ = _start(tmp_path)
    other.communicate(timeout=60)
    assert folder.is_dir()
    process.communicate(timeout=60)
    assert [*tmp_path.iterdir()] == []
