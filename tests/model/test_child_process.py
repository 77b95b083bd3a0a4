"""Children of this interpreter import what it imports."""

import subprocess
import sys
import textwrap
from pathlib import Path

from tests.support.repository import REPOSITORY

SCRIPT = """
    import sys
    sys.path.insert(0, sys.argv[1])
    from model.child_process import start_child
    sys.path.remove(sys.argv[1])
    child = start_child("model.child_process.hangs_at_exit")
    sys.exit(child.wait())
"""


def test_a_child_imports_the_packages_of_an_editable_installation(tmp_path: Path) -> None:
    """Its import hook finds them, and `sys.path` does not have their folder."""
    run = [sys.executable, "-P", "-c", textwrap.dedent(SCRIPT), str(REPOSITORY)]
    ended = subprocess.run(run, cwd=tmp_path, env={}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
