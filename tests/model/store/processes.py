"""Run scripts as processes in this repository, also with mounts of their own."""

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from engine_builder.stores.store import WritableStore
from tests.support import releases
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


def race(publishers: Mapping[str, "subprocess.Popen[str]"]) -> dict[str, list[str]]:
    """Let processes that have printed "ready" go on at the same time. Returns the words that each then prints."""
    for publisher in publishers.values():
        assert publisher.stdout is not None and publisher.stdout.readline() == "ready\n", publisher.communicate()[1]
    for publisher in publishers.values():
        assert publisher.stdin is not None
        publisher.stdin.write("go\n")
        publisher.stdin.flush()
    return {name: finish(publisher).split() for name, publisher in publishers.items()}


PUBLISH = """
    import sys
    from pathlib import Path
    from engine_builder.stores.store import open_writable_store
    from model.errors import ReleaseExists
    from model.settings import read_settings
    from model.store.manifest import Manifest

    url, draft, versions, publisher = sys.argv[1:]
    store = open_writable_store(url, read_settings().store_options())
    manifest = Manifest.model_validate_json(Path(draft).read_bytes())
    store.releases()
    print("ready", flush=True)
    sys.stdin.readline()
    for version in map(str, range(int(versions))):
        try:
            store.write_release(manifest.model_copy(update={"version": version, "created": publisher}))
            print(version)
        except ReleaseExists:
            pass
"""


def assert_one_publisher_wins(store: WritableStore, url: str, draft: Path, environment: Mapping[str, str]) -> None:
    """Publish twelve versions from two processes. Each version must be the whole manifest of one of them."""
    draft.write_bytes(releases.draft_release(store).to_json())
    names = [str(version) for version in range(12)]
    published = race({name: python(PUBLISH, url, draft, 12, name, environment=environment) for name in "ab"})
    assert sorted(version for own in published.values() for version in own) == sorted(names)
    for name, own in published.items():
        for version in own:
            assert store.read_release(f"toy/{version}").created == name
