"""Files of a store that change after a release was loaded: a server must neither crash nor use them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine_builder.stores.local import WritableLocalStore
from engine_builder.stores.store import WritableStore, open_writable_store
from model.api.request import GenerationRequest, resolve
from model.cold_start import ColdStart
from model.loading.load import Loaded, load_release
from model.loading.target import detect_targets
from model.pipeline.text_to_image import generate
from model.store.local import LocalStore
from model.store.sink import Sink
from model.store.store import Store
from tests.support import stub_truss

_GENERATE_TWICE = """
import hashlib, os, sys
from pathlib import Path
from model.api.request import GenerationRequest, resolve
from model.cold_start import ColdStart
from model.loading.load import load_release
from model.loading.target import detect_targets
from model.pipeline.text_to_image import generate
from model.store.store import open_store

store, change = Path(sys.argv[1]), sys.argv[2]
loaded = load_release(open_store(store), "toy-sdxl/1", detect_targets(), [], ColdStart())
params = resolve(GenerationRequest(prompt="a circle", seed=1, num_inference_steps=2), loaded.served)

def image():
    [pixels], _, _ = generate(loaded.model, [params])
    return hashlib.sha256(pixels.tobytes()).hexdigest()

before = image()
for path in (store / "blobs" / "sha256").iterdir():
    if change == "truncate":
        os.truncate(path, 0)
    elif change == "overwrite":
        path.write_bytes(bytes(path.stat().st_size))
    else:
        path.unlink()
print(before == image())
"""


def copy_release(toy_store: WritableStore, copy: WritableStore) -> None:
    manifest = toy_store.read_release("toy-sdxl/1")
    for digest, blob in manifest.blobs().items():
        copy.put(toy_store.get(digest, blob.bytes))
    copy.write_release(manifest)


@pytest.mark.parametrize("change", ["truncate", "overwrite", "delete"])
def test_files_that_change_after_the_load_do_no_harm(change: str, toy_store: WritableStore, tmp_path: Path) -> None:
    copy_release(toy_store, open_writable_store(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", _GENERATE_TWICE, str(tmp_path), change],
        cwd=stub_truss.REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"  # -7: killed by SIGBUS
    assert done.stdout.strip() == "True"


class Attacked(LocalStore):
    """Each blob's file is emptied as soon as it was verified, which another process could do at that moment."""

    def get(self, digest: str, size: int) -> Path:
        path = super().get(digest, size)
        os.truncate(path, 0)
        return path

    def read(self, digest: str, into: memoryview) -> None:
        super().read(digest, into)
        os.truncate(self._blob_path(digest), 0)

    def stream(self, digest: str, size: int, sink: Sink) -> None:
        super().stream(digest, size, sink)
        os.truncate(self._blob_path(digest), 0)


def test_uses_only_bytes_that_were_verified(toy_store: WritableStore, tmp_path: Path) -> None:
    copy_release(toy_store, WritableLocalStore(tmp_path))

    def image(store: Store) -> bytes:
        loaded: Loaded = load_release(store, "toy-sdxl/1", detect_targets(), [], ColdStart())
        params = resolve(GenerationRequest(prompt="a circle", seed=1, num_inference_steps=2), loaded.served)
        [pixels], _, _ = generate(loaded.model, [params])
        return bytes(pixels.tobytes())

    assert image(toy_store) == image(Attacked(tmp_path))
    emptied = [path for path in (tmp_path / "blobs" / "sha256").iterdir() if not path.stat().st_size]
    assert len(emptied) == len(toy_store.read_release("toy-sdxl/1").blobs())
