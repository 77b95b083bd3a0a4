"""A cache in a shared folder, where someone else has put links and pipes under the names that a server will use."""

import os
from pathlib import Path

import pytest

from model.errors import StoreError
from tests.attacks.conftest import Victim, through_a_cache

pytestmark = through_a_cache


@pytest.fixture
def digest(victim: Victim) -> str:
    for folder in ("blobs/sha256", "partial", "users"):
        (victim.cache / folder).mkdir(parents=True)
    return victim.manifest.weights[0].blobs[0].sha256


def test_a_link_in_place_of_a_partial_blob_is_not_written_through(victim: Victim, digest: str, outside: Path) -> None:
    link = victim.cache / "partial" / digest
    link.symlink_to(outside)
    victim.refused(StoreError, "cannot be used: Too many levels of symbolic links")
    assert outside.read_bytes() == b"precious"
    link.unlink()


def test_a_link_in_place_of_the_lock_is_not_written_through(victim: Victim, digest: str, tmp_path: Path) -> None:
    (victim.cache / "lock").symlink_to(tmp_path / "made")
    victim.refused(StoreError, "cannot be used: Too many levels of symbolic links")
    assert not (tmp_path / "made").exists()


def test_a_pipe_in_place_of_the_lock_is_not_waited_for(victim: Victim, digest: str) -> None:
    os.mkfifo(victim.cache / "lock")
    victim.refused(StoreError, "lock in it is no file")


def test_a_link_in_place_of_a_blob_is_replaced_where_it_leads_to_something_else(
    victim: Victim, digest: str, outside: Path
) -> None:
    path = victim.cache / "blobs" / "sha256" / digest
    path.symlink_to(outside)
    assert victim.served().release == "toy/1"
    assert not path.is_symlink() and outside.read_bytes() == b"precious"


def test_a_pipe_in_place_of_a_blob_is_not_waited_for(victim: Victim, digest: str) -> None:
    path = victim.cache / "blobs" / "sha256" / digest
    os.mkfifo(path)
    assert victim.served().release == "toy/1"
    assert path.is_file()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user: run as root")
def test_a_cache_of_another_user_s_is_none(victim: Victim, digest: str) -> None:
    """Root reads everyone's files, and that user could change one between its check and its use."""
    os.chown(victim.cache, 12345, 12345)
    victim.refused(StoreError, "it belongs to user 12345")
    os.chown(victim.cache, 0, 0)
