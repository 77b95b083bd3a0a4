"""Blobs that an attacker changed, in a store or in a shared cache folder."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from model.errors import CorruptBlob, StoreError
from model.store.manifest import Blob, Manifest
from model.store.s3 import S3Store
from tests.attacks.conftest import Victim, in_bucket, in_folder_and_bucket

DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "longer": (lambda data: data + b"\0", "bytes instead of"),
    "much longer": (lambda data: data + bytes(2**21), "bytes instead of"),
    "shorter": (lambda data: data[:-1], "bytes instead of"),
    "empty": (lambda data: b"", "is damaged: it has "),
    "one bit": (lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:], "its bytes have changed"),
    "zeros": (lambda data: bytes(len(data)), "its bytes have changed"),
}
BLOBS: dict[str, Callable[[Manifest], Blob]] = {
    "engine": lambda manifest: manifest.engines[2].blob,
    "weights": lambda manifest: manifest.weights[1].blobs[0],
    "tokenizer": lambda manifest: manifest.tokenizers["tokenizer"].blob,
}


@in_folder_and_bucket
@pytest.mark.parametrize("damage, words", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("choose", BLOBS.values(), ids=BLOBS)
def test_refuses_changed_blob(
    victim: Victim, choose: Callable[[Manifest], Blob], damage: Callable[[bytes], bytes], words: str
) -> None:
    digest = choose(victim.manifest).sha256
    path = victim.blob(digest)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert digest[:12] in victim.refused(CorruptBlob, words)
    path.write_bytes(whole)
    assert victim.served().release == victim.manifest.name


@in_folder_and_bucket
def test_refuses_swapped_blobs(victim: Victim) -> None:
    """Two blobs of weights of the same size and format, each under the other's digest."""
    one, two = (victim.blob(victim.manifest.weights[index].blobs[0].sha256) for index in (0, 2))
    first, second = one.read_bytes(), two.read_bytes()
    assert len(first) == len(second) and first != second
    one.write_bytes(second)
    two.write_bytes(first)
    victim.refused(CorruptBlob, "its bytes have changed")


SUBSTITUTES: dict[str, tuple[Callable[[Path], object], type[StoreError], str]] = {
    "pipe": (os.mkfifo, StoreError, "it is not a regular file"),
    "folder": (Path.mkdir, StoreError, "it is not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), StoreError, "it is not a regular file"),
    "link to itself": (lambda path: path.symlink_to(path), StoreError, "Too many levels of symbolic links"),
    "terabyte": (lambda path: os.truncate(path, 2**40) if not path.touch() else None, CorruptBlob, "1099511627776"),
}


@pytest.mark.parametrize("make, kind, words", SUBSTITUTES.values(), ids=SUBSTITUTES)
@pytest.mark.parametrize("choose", BLOBS.values(), ids=BLOBS)
def test_refuses_substitute_for_a_file(
    victim: Victim,
    choose: Callable[[Manifest], Blob],
    make: Callable[[Path], object],
    kind: type[StoreError],
    words: str,
) -> None:
    """None of them may block the load or fill the memory."""
    path = victim.blob(choose(victim.manifest).sha256)
    path.unlink()
    make(path)
    assert path.name[:12] in victim.refused(kind, words)


@in_folder_and_bucket
def test_untrue_size_takes_no_space(victim: Victim) -> None:
    """The service's own size is compared before the cache allocates any space."""
    for engine in victim.entries["engines"]:
        engine["blob"]["bytes"] = 2**27
    truth = victim.manifest.engines[0].blob.bytes
    victim.refused(CorruptBlob, f"it has {truth} bytes instead of {2**27}")


# -- links and pipes in a shared cache folder, under the names that a server will use ---------------------------------


@pytest.fixture
def digest(victim: Victim) -> str:
    for folder in ("blobs/sha256", "partial", "users"):
        (victim.cache / folder).mkdir(parents=True)
    return victim.manifest.weights[0].blobs[0].sha256


@in_bucket
def test_writes_through_no_link_to_a_partial_blob(victim: Victim, digest: str, outside: Path) -> None:
    link = victim.cache / "partial" / digest
    link.symlink_to(outside)
    victim.refused(StoreError, f"{digest} in it: Too many levels of symbolic links")
    assert outside.read_bytes() == b"precious"
    link.unlink()


@in_bucket
def test_writes_through_no_link_to_the_lock(victim: Victim, digest: str, tmp_path: Path) -> None:
    (victim.cache / "lock").symlink_to(tmp_path / "made")
    victim.refused(StoreError, "lock in it: Too many levels of symbolic links")
    assert not (tmp_path / "made").exists()


@in_bucket
def test_refuses_pipe_in_place_of_the_lock(victim: Victim, digest: str) -> None:
    os.mkfifo(victim.cache / "lock")
    victim.refused(StoreError, "lock in it: Not a regular file")


@in_bucket
def test_replaces_link_in_place_of_a_blob(victim: Victim, digest: str, outside: Path) -> None:
    path = victim.cache / "blobs" / "sha256" / digest
    path.symlink_to(outside)
    assert victim.served().release == "toy/1"
    assert not path.is_symlink() and outside.read_bytes() == b"precious"


@in_bucket
def test_replaces_pipe_in_place_of_a_blob(victim: Victim, digest: str) -> None:
    path = victim.cache / "blobs" / "sha256" / digest
    os.mkfifo(path)
    assert victim.served().release == "toy/1"
    assert path.is_file()


@in_bucket
@pytest.mark.parametrize("folder", ["blobs/sha256", "partial"])
def test_refuses_folder_in_place_of_a_blob(victim: Victim, digest: str, folder: str) -> None:
    path = victim.cache / folder / digest
    path.mkdir()
    victim.refused(StoreError, "in it: Is a directory")
    path.rmdir()
    for left in (victim.cache / "partial").iterdir():
        left.unlink()


@in_bucket
def test_other_users_cannot_hold_a_lock(victim: Victim, digest: str) -> None:
    """flock(2) needs no right to write: whoever can open a file could block every load."""
    lock = victim.cache / "lock"
    lock.touch(mode=0o644)
    modes = []
    served = victim.bucket

    def watched(root: Path) -> S3Store:
        assert served is not None
        opened = served(root)
        modes.extend(path.stat().st_mode & 0o777 for path in (lock, *(victim.cache / "users").iterdir()))
        return opened

    victim.bucket = watched
    assert victim.served().release == "toy/1"
    assert modes == [0o600, 0o600]
    assert {path.stat().st_mode & 0o777 for path in (victim.cache / "blobs" / "sha256").iterdir()} == {0o644}


@in_bucket
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user: run as root")
def test_refuses_cache_of_another_user(victim: Victim, digest: str) -> None:
    """Root reads all files, and their owner could change one between its check and its use."""
    os.chown(victim.cache, 12345, 12345)
    victim.refused(StoreError, "it belongs to user 12345")
    os.chown(victim.cache, 0, 0)
