"""The prefetch fetches exactly the blobs that a load reads, nothing of an untrusted release, and imports no torch."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine_builder.releases import signing
from engine_builder.stores.local import WritableLocalStore
from model.cold_start import ColdStart
from model.engines.tensorrt.libraries import TENSORRT_RTX
from model.errors import ConfigError, StoreError
from model.loading.load import load_release
from model.loading.prefetch import Prefetch
from model.loading.select import select
from model.settings import ServedBucket, read_settings
from model.store.local import LocalStore
from model.store.manifest import Blob, Manifest, TensorRTPlan
from model.store.precision import INT8
from model.store.sink import Sink
from tests.support import releases
from tests.support.fake_tensorrt import RTX_VERSION, install_distribution
from tests.support.releases import RELEASE_NAME, cpu_target


@pytest.fixture
def store(tmp_path: Path) -> WritableLocalStore:
    store = WritableLocalStore(tmp_path / "store")
    store.write_release(releases.draft_release(store, releases.compiled_toy()))
    return store


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREHEAT_STORE", "PREHEAT_RELEASE", "PREHEAT_PUBLIC_KEY", "PREHEAT_RUNTIME"):
        monkeypatch.delenv(name, raising=False)


class RecordingStore(LocalStore):
    """Records the digests of the blobs that it fetches, and of those that it reads."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.fetched: set[str] = set()
        self.blobs_read: set[str] = set()

    def fetch(self, blobs: Iterable[Blob]) -> None:
        blobs = list(blobs)
        self.fetched |= {blob.sha256 for blob in blobs}
        super().fetch(blobs)

    def get(self, digest: str, size: int) -> Path:
        self.blobs_read.add(digest)
        return super().get(digest, size)

    def read(self, digest: str, into: memoryview) -> None:
        self.blobs_read.add(digest)
        super().read(digest, into)

    def stream(self, digest: str, size: int, sink: Sink) -> None:
        self.blobs_read.add(digest)
        super().stream(digest, size, sink)


def run_prefetch(store: LocalStore, **settings: Any) -> Prefetch:
    """Start a prefetch from `store`, wait for its end, and return it."""
    prefetch = Prefetch(read_settings({"store": store.url, "release": RELEASE_NAME} | settings), {}, lambda *_: store)
    prefetch.wait()
    return prefetch


def add_unused_records(manifest: Manifest) -> Manifest:
    """Add engines of another target and precision, and weights of another precision and layout. All are unused."""

    def copy(record: Any, number: int, **changes: Any) -> Any:
        blob = Blob(sha256=f"{number:064d}", bytes=1)
        return record.model_copy(update=changes | ({"blobs": (blob,)} if hasattr(record, "blobs") else {"blob": blob}))

    engines = [*manifest.engines]
    engines += [copy(e, 100 + n, target="cuda-h200", key=f"{n:064d}") for n, e in enumerate(manifest.engines)]
    engines += [copy(e, 200 + n, precision=INT8, key=f"{n + 50:064d}") for n, e in enumerate(manifest.engines)]
    weights = [*manifest.weights]
    weights += [copy(w, 300 + n, precision=INT8) for n, w in enumerate(manifest.weights)]
    weights += [copy(w, 400 + n, layout="other") for n, w in enumerate(manifest.weights)]
    return manifest.model_copy(update={"engines": tuple(engines), "weights": tuple(weights)})


@pytest.mark.parametrize("buckets", [[], [ServedBucket(height=64, width=64, rows=2)]])
def test_selects_exactly_the_blobs_that_a_load_reads(store: WritableLocalStore, buckets: list[ServedBucket]) -> None:
    manifest = add_unused_records(store.read_release(RELEASE_NAME))
    recording = RecordingStore(store.root)
    releases.write_manifest(store.root, json.loads(manifest.to_json()))
    load_release(recording, RELEASE_NAME, [cpu_target()], buckets, ColdStart())
    unknown = replace(cpu_target(), product="x86_64_v9")
    selection = select(manifest, [unknown, cpu_target()], buckets)
    assert {blob.sha256 for blob in selection.blobs()} == recording.blobs_read
    sizes = [blob.bytes for blob in selection.blobs()]
    assert sizes == sorted(sizes, reverse=True)


def test_fetches_all_blobs_and_reads_none(store: WritableLocalStore) -> None:
    recording = RecordingStore(store.root)
    opened = run_prefetch(recording).store()
    assert opened is recording
    assert recording.fetched == store.read_release(RELEASE_NAME).blobs().keys() and not recording.blobs_read
    assert load_release(opened, RELEASE_NAME, [cpu_target()], [], ColdStart()).release == RELEASE_NAME


def test_fetches_no_weights_for_a_plan_that_holds_them(
    store: WritableLocalStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_distribution(monkeypatch, tmp_path, RTX_VERSION, TENSORRT_RTX)
    manifest = store.read_release(RELEASE_NAME)
    [unet] = [record for record in manifest.weights if record.component == "unet"]
    literals, onnx = releases.put_blob(store, b"literals"), releases.put_blob(store, b"graph")
    plan = TensorRTPlan(profile=0, literals=literals, onnx=onnx, refit="none", weights=unet.identity)
    changes = {"runtime": "tensorrt-rtx", "runtime_version": RTX_VERSION, "tensorrt": plan, "accuracy": None}
    engines = tuple(e.model_copy(update=changes) if e.component == "unet" else e for e in manifest.engines)
    store.write_release(manifest.model_copy(update={"version": "2", "engines": engines}))
    recording = RecordingStore(store.root)
    run_prefetch(recording, release="toy/2")
    named = store.read_release("toy/2").blobs().keys()
    assert recording.fetched == named - {*unet.identity, onnx.sha256}


def test_fetches_nothing_of_an_untrusted_release(store: WritableLocalStore) -> None:
    key = Ed25519PrivateKey.generate()
    store.write_release(signing.sign(store.read_release(RELEASE_NAME).model_copy(update={"version": "2"}), key))
    recording = RecordingStore(store.root)
    run_prefetch(recording, public_key=str(signing.public_key(key)))
    assert not recording.fetched
    run_prefetch(recording, public_key=str(signing.public_key(key)), release="toy/2")
    assert recording.fetched


def test_leaves_errors_to_the_load(store: WritableLocalStore) -> None:
    """Without a GPU no plan can run, so a library of plans fetches nothing."""
    for settings in ({"release": "toy/9"}, {"release": "../x"}, {"release": ""}, {"runtime": "tensorrt"}):
        recording = RecordingStore(store.root)
        opened = run_prefetch(recording, **settings).store()
        assert opened is recording and not recording.fetched


@pytest.mark.parametrize(
    ("url", "kind", "words"),
    [("", ConfigError, "No store is configured"), ("ftp://nowhere", StoreError, "ftp://nowhere")],
)
def test_every_call_reports_an_invalid_store(url: str, kind: type[Exception], words: str) -> None:
    prefetch = Prefetch(read_settings({"store": url, "release": RELEASE_NAME}), {})
    for _ in range(2):
        with pytest.raises(kind, match=words):
            prefetch.store()
