"""The prefetch fetches what the load reads, while torch is imported, and nothing that is not trusted."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine_builder.releases import signing
from engine_builder.stores.local import WritableLocalStore
from model.cold_start import ColdStart
from model.errors import ConfigError, ReleaseNotFound, StoreError
from model.loading.load import load_release
from model.loading.prefetch import Prefetch
from model.loading.select import select
from model.settings import ServedBucket, read_settings
from model.store.local import LocalStore
from model.store.manifest import Blob, Manifest
from model.store.precision import INT8
from tests.support import releases
from tests.support.releases import NAME, cpu_target

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture
def store(tmp_path: Path) -> WritableLocalStore:
    store = WritableLocalStore(tmp_path / "store")
    store.write_release(releases.draft(store, releases.compiled_toy()))
    return store


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREHEAT_STORE", "PREHEAT_RELEASE", "PREHEAT_PUBLIC_KEY", "PREHEAT_RUNTIME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> list[Blob]:
    """What a store is asked to bring is noted here, too."""
    found: list[Blob] = []
    fetch = LocalStore.fetch

    def note(self: LocalStore, blobs: Iterable[Blob]) -> None:
        found.extend(blobs)
        fetch(self, blobs)

    monkeypatch.setattr(LocalStore, "fetch", note)
    return found


def started(here: WritableLocalStore, /, **settings: Any) -> Prefetch:
    made = Prefetch(read_settings({"store": here.url, "release": NAME} | settings), {})
    made.wait()
    return made


class RecordingStore(WritableLocalStore):
    """Records which blobs are requested."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.requested: set[str] = set()

    def _blob_path(self, digest: str) -> Path:
        self.requested.add(digest)
        return super()._blob_path(digest)


def rich(manifest: Manifest) -> Manifest:
    """With another target's engines, and a second precision of this one's, whose weights are all blobs of their own."""

    def other(record: Any, number: int, **changes: Any) -> Any:
        blob = Blob(sha256=f"{number:064d}", bytes=1)
        return record.model_copy(update=changes | ({"blobs": (blob,)} if hasattr(record, "blobs") else {"blob": blob}))

    engines = [*manifest.engines]
    engines += [other(e, 100 + n, target="cuda-h200", key=f"{n:064d}") for n, e in enumerate(manifest.engines)]
    engines += [other(e, 200 + n, precision=INT8, key=f"{n + 50:064d}") for n, e in enumerate(manifest.engines)]
    weights = [*manifest.weights]
    weights += [other(w, 300 + n, precision=INT8) for n, w in enumerate(manifest.weights)]
    weights += [other(w, 400 + n, layout="other") for n, w in enumerate(manifest.weights)]
    return manifest.model_copy(update={"engines": tuple(engines), "weights": tuple(weights)})


@pytest.mark.parametrize("buckets", [[], [ServedBucket(height=64, width=64, rows=2)]])
def test_selects_exactly_the_blobs_that_a_load_reads(store: WritableLocalStore, buckets: list[ServedBucket]) -> None:
    manifest = rich(store.read_release(NAME))
    recording = RecordingStore(store.root)
    releases.write_manifest(store.root, json.loads(manifest.to_json()))
    load_release(recording, NAME, [cpu_target()], buckets, ColdStart())
    unknown = replace(cpu_target(), product="x86_64_v9")
    selection = select(manifest, [unknown, cpu_target()], buckets)
    assert {blob.sha256 for blob in selection.blobs()} == recording.requested
    sizes = [blob.bytes for blob in selection.blobs()]
    assert sizes == sorted(sizes, reverse=True)


def test_what_lies_here_is_asked_of_the_disk_and_left_unopened(
    store: WritableLocalStore, brought: list[Blob], monkeypatch: pytest.MonkeyPatch
) -> None:
    advised: list[int] = []
    advise = os.posix_fadvise

    def note(file: int, *rest: int) -> None:
        advised.append(os.fstat(file).st_size)
        advise(file, *rest)

    monkeypatch.setattr(os, "posix_fadvise", note)
    opened = started(store).store()
    blobs = store.read_release(NAME).blobs()
    assert {blob.sha256 for blob in brought} == blobs.keys()
    assert sorted(advised) == sorted(blob.bytes for blob in blobs.values())
    assert isinstance(opened, LocalStore) and not opened._verified
    assert load_release(opened, NAME, [cpu_target()], [], ColdStart()).release == NAME


@pytest.mark.parametrize("runtime", ["aot_inductor", "tensorrt", "fastest"])
def test_fetches_what_the_configured_runtime_serves(
    store: WritableLocalStore, brought: list[Blob], runtime: str
) -> None:
    """Without a GPU only AOTInductor serves; a request for TensorRT fails, and the load reports it."""
    started(store, runtime=runtime)
    assert bool(brought) == (runtime != "tensorrt")


def test_nothing_of_a_release_that_is_not_trusted_is_brought(store: WritableLocalStore, brought: list[Blob]) -> None:
    key = Ed25519PrivateKey.generate()
    started(store, public_key=str(signing.public_key(key)))
    assert not brought
    store.write_release(signing.sign(store.read_release(NAME).model_copy(update={"version": "2"}), key))
    started(store, public_key=str(signing.public_key(key)), release="toy/2")
    assert brought


@pytest.mark.parametrize("settings", [{"release": "toy/9"}, {"release": "../x"}, {"release": ""}])
def test_leaves_errors_to_the_load(store: WritableLocalStore, settings: dict[str, str], brought: list[Blob]) -> None:
    opened = started(store, **settings).store()
    assert not brought
    with pytest.raises(ReleaseNotFound):
        opened.read_release("toy/9")


def test_names_a_store_that_is_not_configured(store: WritableLocalStore) -> None:
    with pytest.raises(ConfigError, match="No store is configured"):
        started(store, store="").store()


def test_a_damaged_blob_is_left_for_loading_to_refuse(store: WritableLocalStore) -> None:
    blob = store.read_release(NAME).weights[0].blobs[0]
    path = store.root / "blobs" / "sha256" / blob.sha256
    path.write_bytes(path.read_bytes()[:-1])
    opened = started(store).store()
    with pytest.raises(StoreError, match=blob.sha256[:12]):
        load_release(opened, NAME, [cpu_target()], [], ColdStart())


def test_a_store_that_cannot_be_opened_says_so_each_time(store: WritableLocalStore) -> None:
    made = started(store, store="ftp://nowhere")
    for _ in range(2):
        with pytest.raises(StoreError, match="ftp://nowhere"):
            made.store()


def test_it_imports_no_torch(store: WritableLocalStore) -> None:
    script = """
        import sys
        from model.loading.prefetch import Prefetch

        from model.settings import read_settings

        made = Prefetch(read_settings({"store": sys.argv[1], "release": "toy/1"}), {})
        made.wait()
        made.store().read_release("toy/1")
        print(sorted(name for name in ("torch", "numpy", "boto3") if name in sys.modules))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), store.url],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
