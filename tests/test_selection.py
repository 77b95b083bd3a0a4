"""`make test-skipped` runs exactly the tests that `make test` skipped, and the parts of `make full` are all of it."""

import subprocess
import sys
from pathlib import Path

from tests.support.repository import REPOSITORY

MODULES = {
    "conftest": "from tests.support.selection import *\n",
    "test_tool": """
import pathlib, pytest
@pytest.fixture
def tool():
    if not pathlib.Path("tool.py").exists():
        pytest.skip("no tool")
@pytest.mark.parametrize("name", ["a b", "c::d", "[e]", "é", "new" if pathlib.Path("tool.py").exists() else "old"])
def test_with_tool(name, tool): pass
def test_without_tool(): pass
""",
    "test_import": "import pytest\npytest.importorskip('tool')\ndef test_of_module(): pass\n",
    "test_plain": "def test_plain(): pass\n",
}


def run_pytest(folder: Path, *arguments: str) -> dict[str, int]:
    """Run the tests in two processes. Returns how many have each outcome."""
    command = [sys.executable, "-m", "pytest", "-q", "--numprocesses=2", "--dist=loadfile", *arguments]
    environment = {"PYTHONPATH": f"{REPOSITORY}:{folder}", "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    words = ran.stdout.splitlines()[-1].replace(",", "").split()
    return {outcome: int(count) for count, outcome in zip(words, words[1:], strict=False) if count.isdecimal()}


def test_skipped_tests_run_later(tmp_path: Path) -> None:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert run_pytest(tmp_path, "--write-skipped=kept/skipped.txt") == {"passed": 2, "skipped": 6}
    (tmp_path / "tool.py").touch()
    assert run_pytest(tmp_path, "@kept/skipped.txt") == {"passed": 6}


def test_no_skipped_test_leaves_an_empty_file(tmp_path: Path) -> None:
    for name in ("conftest", "test_plain"):
        (tmp_path / f"{name}.py").write_text(MODULES[name])
    assert run_pytest(tmp_path, "--write-skipped=skipped.txt") == {"passed": 1}
    assert (tmp_path / "skipped.txt").read_bytes() == b""


def test_each_test_is_in_one_part(tmp_path: Path) -> None:
    for name in ("conftest", "test_plain"):
        (tmp_path / f"{name}.py").write_text(MODULES[name])
    (tmp_path / "test_full.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    assert [run_pytest(tmp_path, "--part", f"{part}/2") for part in (1, 2)] == [{"passed": 2}, {"passed": 1}]
