"""Blobs that an attacker changed: in a store, in a shared cache folder, or after the load."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_builder.stores.local import WritableLocalStore
from engine_builder.stores.store import WritableStore
from model.api.resolve import resolve
from model.cold_start import ColdStart
from model.errors import CorruptBlob, StoreError
from model.loading.target import detect_targets
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from model.store.keys import blob_key
from model.store.local import LocalStore
from model.store.manifest import Blob, Manifest
from model.store.sink import Sink
from model.store.store import Store
from tests.attacks.conftest import AttackedRelease, from_bucket
from tests.model.store.processes import finish, python
from tests.support.deployments import deployed, load_release

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


def refuse_changed_blob(attacked: AttackedRelease, blob: str, kind: str) -> None:
    damage, words = DAMAGE[kind]
    digest = BLOBS[blob](attacked.manifest).sha256
    path = attacked.blob_path(digest)
    data = path.read_bytes()
    path.write_bytes(damage(data))
    assert digest[:12] in attacked.assert_refused(CorruptBlob, words)
    path.write_bytes(data)


@pytest.mark.parametrize("blob", BLOBS)
def test_refuses_changed_blob(attacked: AttackedRelease, blob: str) -> None:
    for kind in DAMAGE:
        refuse_changed_blob(attacked, blob, kind)
    assert attacked.load().release == attacked.manifest.name


@from_bucket
def test_refuses_changed_blob_in_a_bucket(attacked: AttackedRelease) -> None:
    for blob, kind in (("engine", "one bit"), ("engine", "longer"), ("weights", "zeros"), ("tokenizer", "empty")):
        shutil.rmtree(attacked.cache, ignore_errors=True)  # it has correct blobs
        refuse_changed_blob(attacked, blob, kind)
    assert attacked.load().release == attacked.manifest.name


def make_sparse_terabyte(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


SUBSTITUTES: tuple[tuple[Callable[[Path], object], type[StoreError], str], ...] = (
    (os.mkfifo, StoreError, "it is not a regular file"),
    (Path.mkdir, StoreError, "it is not a regular file"),
    (lambda path: path.symlink_to("/dev/zero"), StoreError, "it is not a regular file"),
    (lambda path: path.symlink_to(path), StoreError, "Too many levels of symbolic links"),
    (make_sparse_terabyte, CorruptBlob, "1099511627776"),
)


@pytest.mark.parametrize("blob", BLOBS)
def test_refuses_substitute_for_a_file(attacked: AttackedRelease, blob: str) -> None:
    """None of them may block the load or fill the memory."""
    path = attacked.blob_path(BLOBS[blob](attacked.manifest).sha256)
    for make, kind, words in SUBSTITUTES:
        (Path.rmdir if path.is_dir() else Path.unlink)(path)
        make(path)
        assert path.name[:12] in attacked.assert_refused(kind, words)


# -- links and pipes in a shared cache folder, under the names that a server will use ---------------------------------


@pytest.fixture
def digest(attacked: AttackedRelease) -> str:
    """The digest of a blob that is not in the cache yet. The folders of the cache exist."""
    for folder in ("blobs/sha256", "partial", "users"):
        (attacked.cache / folder).mkdir(parents=True)
    return attacked.manifest.weights[0].blobs[0].sha256


@from_bucket
def test_writes_through_no_link_and_no_pipe(attacked: AttackedRelease, digest: str, outside: Path) -> None:
    partial, lock = attacked.cache / "partial" / digest, attacked.cache / "lock"
    partial.symlink_to(outside)
    attacked.assert_refused(StoreError, f"{digest} in it: Too many levels of symbolic links")
    assert outside.read_bytes() == b"precious"
    partial.unlink()
    lock.unlink()
    lock.symlink_to(outside.with_name("created"))
    attacked.assert_refused(StoreError, "lock in it: Too many levels of symbolic links")
    lock.unlink()
    os.mkfifo(lock)
    message = attacked.assert_refused(StoreError, "lock in it: Not a regular file")
    assert "Remove that entry" in message


@from_bucket
@pytest.mark.parametrize("make", [lambda path, outside: path.symlink_to(outside), lambda path, _: os.mkfifo(path)])
def test_replaces_substitute_for_a_blob(
    attacked: AttackedRelease, digest: str, outside: Path, make: Callable[[Path, Path], object]
) -> None:
    path = attacked.cache / "blobs" / "sha256" / digest
    make(path, outside)
    assert attacked.load().release == "toy/1"
    assert path.is_file() and not path.is_symlink() and outside.read_bytes() == b"precious"


@from_bucket
def test_refuses_folder_in_place_of_a_blob(attacked: AttackedRelease, digest: str) -> None:
    for folder in ("blobs/sha256", "partial"):
        path = attacked.cache / folder / digest
        path.mkdir()
        attacked.assert_refused(StoreError, "in it: Is a directory")
        path.rmdir()
        for partial in (attacked.cache / "partial").iterdir():
            partial.unlink()


@from_bucket
def test_other_users_cannot_hold_a_lock(attacked: AttackedRelease, digest: str) -> None:
    """flock(2) needs no right to write: a user who may open the file could block every load."""
    lock = attacked.cache / "lock"
    lock.touch(mode=0o644)
    store = attacked.open_store()
    assert {path.stat().st_mode & 0o777 for path in (lock, *(attacked.cache / "users").iterdir())} == {0o600}
    store.close()  # type: ignore[attr-defined]
    assert attacked.load().release == "toy/1"
    assert {path.stat().st_mode & 0o777 for path in (attacked.cache / "blobs" / "sha256").iterdir()} == {0o644}


@from_bucket
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user: run as root")
def test_refuses_cache_of_another_user(attacked: AttackedRelease, digest: str) -> None:
    """Root reads all files, and their owner could change one between its check and its use."""
    os.chown(attacked.cache, 12345, 12345)
    attacked.assert_refused(StoreError, "it belongs to user 12345")
    os.chown(attacked.cache, 0, 0)


# -- files of a store that change after they were verified -------------------------------------------------------------

GENERATE_BEFORE_AND_AFTER_CHANGES = """
import os, sys
from pathlib import Path
from model.request_fields import GenerationRequest
from model.api.resolve import resolve
from model.cold_start import ColdStart
from model.deployment import Deployment
from model.loading.releases import Releases
from model.loading.target import detect_targets
from model.pipeline.text_to_image import generate
from model.store.store import open_store

loaded = Releases(open_store(sys.argv[1]), Deployment((sys.argv[2],)), detect_targets(), ColdStart()).open(0)
request = GenerationRequest(prompt="a circle", seed=1, num_inference_steps=2, width=64, height=64)
params = resolve(request, loaded.served)
before = generate(loaded.model, [params])[0][0].copy()
for path in Path(sys.argv[1], "blobs", "sha256").iterdir():
    os.truncate(path, 0)
print((before == generate(loaded.model, [params])[0][0]).all(), flush=True)
"""


def copy_release(store: WritableStore, release: str, folder: Path) -> WritableLocalStore:
    copy = WritableLocalStore(folder)
    manifest = store.read_release(release)
    for digest, blob in manifest.blobs().items():
        copy.put(store.get(digest, blob.bytes))
    copy.write_release(manifest)
    return copy


def test_changes_after_the_load_have_no_effect(store: WritableStore, release: str, tmp_path: Path) -> None:
    """A mapped file that is truncated would end the process with SIGBUS."""
    copy_release(store, release, tmp_path / "store")
    output = finish(python(GENERATE_BEFORE_AND_AFTER_CHANGES, tmp_path / "store", release))
    assert output == "True\n"


class StoreThatEmptiesBlobs(LocalStore):
    """Empties each blob's file as soon as it is verified, as another process could."""

    def get(self, digest: str, size: int) -> Path:
        path = super().get(digest, size)
        os.truncate(path, 0)
        return path

    def read(self, digest: str, into: memoryview) -> None:
        super().read(digest, into)
        os.truncate(self.root / blob_key(digest), 0)

    def stream(self, digest: str, size: int, sink: Sink) -> None:
        super().stream(digest, size, sink)
        os.truncate(self.root / blob_key(digest), 0)


def test_uses_only_bytes_that_were_verified(toy_store: WritableStore, tmp_path: Path) -> None:
    copy_release(toy_store, "toy-sdxl/1", tmp_path)

    def generate_image(store: Store) -> bytes:
        loaded = load_release(store, deployed("toy-sdxl/1"), detect_targets(), ColdStart())
        params = resolve(GenerationRequest(prompt="a circle", seed=1, num_inference_steps=2), loaded.served)
        [pixels], _, _ = generate(loaded.model, [params])
        return bytes(pixels.tobytes())

    assert generate_image(toy_store) == generate_image(StoreThatEmptiesBlobs(tmp_path))
    emptied = [path for path in (tmp_path / "blobs" / "sha256").iterdir() if not path.stat().st_size]
    assert len(emptied) == len(toy_store.read_release("toy-sdxl/1").blobs())
