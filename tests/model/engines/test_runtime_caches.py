"""Files of compiled kernels: only those that nobody else can write are read, and a failed write is no error."""

import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from model.engines.tensorrt import runtime_caches
from model.engines.tensorrt.runtime_caches import RuntimeCacheFolder

PLAN = "a" * 64
MACHINE = "sm86-driver580.159.04-rtx1.7.1.116"
NAME = f"{PLAN}-{MACHINE}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of caches, which does not exist yet."""
    return tmp_path / "preheat" / "runtime-caches"


@pytest.fixture
def kept(folder: Path) -> Path:
    """The file of a cache that was written."""
    RuntimeCacheFolder(folder, MACHINE).write(PLAN, b"kernels")
    return folder / NAME


def test_reads_what_it_wrote(folder: Path) -> None:
    caches = RuntimeCacheFolder(folder, MACHINE)
    assert caches.read(PLAN) == b""
    caches.write(PLAN, b"kernels")
    caches.write("b" * 64, b"others")
    assert (caches.read(PLAN), caches.read("b" * 64)) == (b"kernels", b"others")
    caches.write(PLAN, b"newer")
    assert caches.read(PLAN) == b"newer"
    assert {path.name for path in folder.iterdir()} == {NAME, NAME.replace("a" * 64, "b" * 64)}, (
        "no temporary files are left"
    )


def test_machines_that_differ_keep_a_file_each(kept: Path) -> None:
    """Otherwise each start of the one would replace the kernels of the other."""
    for other in ("sm89-driver580.159.04-rtx1.7.1.116", "sm86-driver590.1-rtx1.7.1.116", "sm86-driver1-rtx1.7.2.1"):
        caches = RuntimeCacheFolder(kept.parent, other)
        assert caches.read(PLAN) == b""
        caches.write(PLAN, b"other kernels")
        assert RuntimeCacheFolder(kept.parent, MACHINE).read(PLAN) == b"kernels"


def test_writes_only_bytes_that_differ(kept: Path) -> None:
    before = kept.stat()
    RuntimeCacheFolder(kept.parent, MACHINE).write(PLAN, b"kernels")
    assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    RuntimeCacheFolder(kept.parent, MACHINE).write(PLAN, b"kernels+")
    assert kept.stat().st_ino != before.st_ino, "a reader would see half a file"


def test_reading_counts_as_use(kept: Path) -> None:
    """A disk with relative access times does not replace a time in the future when a file is read."""
    os.utime(kept, (time.time() + 3600, 1000))
    RuntimeCacheFolder(kept.parent, MACHINE).read(PLAN)
    assert kept.stat().st_atime < time.time() + 1800 and kept.stat().st_mtime == 1000


def test_only_the_owner_can_read_and_write(kept: Path) -> None:
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700


def replace_by_fifo(path: Path) -> None:
    """A pipe without a writer must not block either."""
    path.unlink()
    os.mkfifo(path, 0o600)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("target"))
    path.symlink_to("target")


REPLACEMENTS: dict[str, Callable[[Path], object]] = {
    "group can write": lambda path: path.chmod(0o620),
    "others can write": lambda path: path.chmod(0o602),
    "link": replace_by_link,
    "pipe": replace_by_fifo,
    "folder": lambda path: (path.unlink(), path.mkdir(0o700)),
    "too large": lambda path: os.truncate(path, 2**30 + 1),  # a sparse file
}


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_does_not_read_what_others_may_have_written(name: str, kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    REPLACEMENTS[name](kept)
    assert RuntimeCacheFolder(kept.parent, MACHINE).read(PLAN) == b""
    assert (f"the runtime cache {kept} is not used: others can write it" in caplog.text) == ("can write" in name)


def test_does_not_read_the_file_of_another_user(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = kept.stat().st_uid
    monkeypatch.setattr(runtime_caches.os, "geteuid", lambda: owner + 1)
    assert RuntimeCacheFolder(kept.parent, MACHINE).read(PLAN) == b""


def test_next_write_replaces_a_file_that_is_not_used(kept: Path) -> None:
    caches = RuntimeCacheFolder(kept.parent, MACHINE)
    replace_by_link(kept)
    caches.write(PLAN, b"newer")
    assert caches.read(PLAN) == b"newer" and not kept.is_symlink()
    assert kept.with_name("target").read_bytes() == b"kernels", "the link is replaced, not followed"


def test_does_not_write_what_it_would_not_read(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise each start would write the same large file again."""
    caches = RuntimeCacheFolder(kept.parent, MACHINE, size_limit=8)
    caches.write(PLAN, b"8 bytes.")
    assert caches.read(PLAN) == b"8 bytes." and not caplog.records
    caches.write(PLAN, b"9 bytes..")
    assert caches.read(PLAN) == b"8 bytes." and kept.read_bytes() == b"8 bytes."
    assert "the runtime cache of a plan was not kept (9 bytes; the limit is 8)" in caplog.text


@pytest.mark.parametrize("obstacle", ["file", "folder of the name"])
def test_failed_write_is_logged(obstacle: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    if obstacle == "file":
        folder.parent.mkdir()
        folder.write_text("a file where the folder should be")
    else:
        (folder / NAME / "content").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        RuntimeCacheFolder(folder, MACHINE).write(PLAN, b"kernels")
    assert "the runtime cache of a plan was not kept" in caplog.text
    assert RuntimeCacheFolder(folder, MACHINE).read(PLAN) == b""
    if obstacle != "file":
        assert [path.name for path in folder.iterdir()] == [NAME], "no temporary file is left"
