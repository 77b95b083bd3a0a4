"""The prefetch fetches exactly the blobs that a load reads. That of a bucket runs in a process."""

import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import save

from engine_builder.releases import signing
from engine_builder.stores.local import WritableLocalStore
from model.cold_start import ColdStart
from model.deployment import Deployment
from model.engines.tensorrt.libraries import TENSORRT_RTX
from model.errors import ConfigError, StoreError
from model.loading.prefetch import Prefetch
from model.loading.releases import Releases
from model.loading.select import select
from model.settings import ServedBucket, read_settings
from model.store.local import LocalStore
from model.store.manifest import Blob, Fp16Steps, Manifest, TensorRTPlan
from model.store.precision import FP8, FP16, INT8, Precision
from tests.conftest import Opener
from tests.model.store.processes import python
from tests.support import object_store as ceph
from tests.support import releases
from tests.support.cached_blobs import file_names
from tests.support.deployments import deployed, load_release
from tests.support.fake_tensorrt import RTX_VERSION, install_distribution
from tests.support.faulty_proxy import FaultyProxy, RecordedRequest
from tests.support.processes import children_that_run
from tests.support.recording_store import RecordingStore
from tests.support.releases import RELEASE_NAME, cpu_target
from tests.support.waiting import eventually


@pytest.fixture
def store(tmp_path: Path) -> WritableLocalStore:
    store = WritableLocalStore(tmp_path / "store")
    store.write_release(releases.draft_release(store, releases.compiled_toy()))
    return store


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


@pytest.mark.parametrize("buckets", [(), (ServedBucket(height=64, width=64, rows=2),)])
def test_selects_exactly_the_blobs_that_a_load_reads(
    store: WritableLocalStore, buckets: tuple[ServedBucket, ...]
) -> None:
    manifest, deployment = add_unused_records(store.read_release(RELEASE_NAME)), deployed(buckets=buckets)
    recording = RecordingStore(store.root)
    releases.write_manifest(store.root, json.loads(manifest.to_json()))
    load_release(recording, deployment, [cpu_target()], ColdStart())
    unknown = replace(cpu_target(), product="x86_64_v9")
    selection = select(manifest, [unknown, cpu_target()], deployment)
    assert {blob.sha256 for blob in selection.blobs()} == recording.blobs_read
    sizes = [blob.bytes for blob in selection.blobs()]
    assert sizes == sorted(sizes, reverse=True)


def test_fetches_all_blobs_and_reads_none(store: WritableLocalStore) -> None:
    recording = RecordingStore(store.root)
    opened = run_prefetch(recording).store()
    assert opened is recording
    assert recording.fetched == store.read_release(RELEASE_NAME).blobs().keys() and not recording.blobs_read
    assert load_release(opened, deployed(RELEASE_NAME), [cpu_target()], ColdStart()).release == RELEASE_NAME


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


WAIT_SECONDS = 60  # enough for any machine
SECRETS = {"aws_access_key_id": ceph.ACCESS_KEY, "aws_secret_access_key": ceph.SECRET_KEY}


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove variables that could configure the process instead of the settings."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "PREHEAT_", "XDG_")):
            monkeypatch.delenv(name)


@pytest.fixture
def manifest(open_bucket: Opener, tmp_path: Path) -> Manifest:
    """The manifest of a release in the bucket."""
    store = open_bucket(cache_dir=tmp_path / "unused")
    manifest = releases.draft_release(store, releases.compiled_toy())
    store.write_release(manifest)
    return manifest


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The cache folder of the prefetch and the load."""
    return tmp_path / "cache"


@pytest.fixture
def settings(manifest: Manifest, proxy: FaultyProxy, bucket: str, cache: Path) -> dict[str, Any]:
    return {"store": f"s3://{bucket}", "release": RELEASE_NAME, "cache_dir": str(cache), "endpoint": proxy.url}


class Start(Protocol):
    def __call__(self, python: str = sys.executable, **changes: Any) -> Prefetch:
        """Start a prefetch. `changes`: settings that differ."""


@pytest.fixture
def start(settings: dict[str, Any]) -> Iterator[Start]:
    """A function that starts a prefetch, which ends with the test."""
    started: list[Prefetch] = []

    def start_prefetch(python: str = sys.executable, **changes: Any) -> Prefetch:
        started.append(Prefetch(read_settings(settings | changes), SECRETS, python=python))
        return started[-1]

    yield start_prefetch
    for prefetch in started:
        prefetch.close()
    eventually(lambda: not prefetch_processes(), "the end of all prefetch processes")


@dataclass
class Gate:
    """Holds back the requests for blobs. `requested` is set at the first one."""

    requested: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def hold(self, request: RecordedRequest) -> None:
        if "/blobs/" in request.path:
            self.requested.set()
            self.opened.wait(WAIT_SECONDS)

    def wait_for_request(self) -> None:
        assert self.requested.wait(WAIT_SECONDS), "no blob was requested"


@pytest.fixture
def gate(proxy: FaultyProxy) -> Iterator[Gate]:
    """A gate in the proxy, which opens at the end of the test."""
    gate = Gate()
    proxy.on_request = gate.hold
    yield gate
    gate.opened.set()


def load(prefetch: Prefetch, settings: dict[str, Any]) -> str:
    deployment = Deployment.of(read_settings(settings))
    return load_release(prefetch.store(), deployment, [cpu_target()], ColdStart()).release


def prefetch_processes(parent: int | None = None) -> list[psutil.Process]:
    """Return the running prefetch processes of a process, by default this one."""
    return children_that_run("prefetch_worker", parent or os.getpid())


def test_load_finds_everything_in_the_cache(
    start: Start, settings: dict[str, Any], manifest: Manifest, proxy: FaultyProxy, cache: Path
) -> None:
    prefetch = start()
    prefetch.wait()
    assert file_names(cache) == manifest.blobs().keys() and not file_names(cache, "partial")
    in_use = {digest for path in (cache / "users").iterdir() for digest in path.read_text().split()}
    assert in_use == manifest.blobs().keys() and prefetch_processes(), "in use until the load ends"
    assert len(proxy.requested_ranges(f"/releases/{RELEASE_NAME}.json")) == 1
    proxy.requests.clear()
    assert load(prefetch, settings) == RELEASE_NAME
    assert not proxy.requests, "the manifest or a blob was requested again"


def test_fetches_several_releases(
    start: Start, settings: dict[str, Any], manifest: Manifest, open_bucket: Opener, proxy: FaultyProxy, cache: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    store = open_bucket(cache_dir=tmp_path / "unused")
    blob = releases.put_blob(store, save(releases.toy_tensors(seed=5)))
    weights = tuple(
        one.model_copy(update={"blobs": (blob,)}) if one.component == "unet" else one for one in manifest.weights
    )
    store.write_release(manifest.model_copy(update={"version": "2", "weights": weights}))
    several = settings | {"release": "", "releases": ["toy/*"]}
    prefetch = start(**several)
    prefetch.wait()
    replaced = {digest for one in manifest.weights if one.component == "unet" for digest in one.identity}
    assert file_names(cache) == (manifest.blobs().keys() | {blob.sha256}) - replaced, "weights of toy/1 are read later"
    proxy.requests.clear()
    deployment = Deployment.of(read_settings(several))
    found = Releases(prefetch.store(), deployment, [cpu_target()], ColdStart())
    loaded = [found.open(0), found.without_weights(1)]
    assert [one.release for one in loaded] == ["toy/2", RELEASE_NAME]
    assert not [request for request in proxy.requests if "/releases/toy/" in request.path or "/blobs/" in request.path]


@pytest.mark.parametrize(
    ("release_default", "configured", "precisions"),
    [
        (None, {}, {FP8}),
        (Fp16Steps(last=1), {}, {FP8, FP16}),
        (None, {"compare_every": 9}, {FP8, FP16}),
    ],
    ids=["fp8", "the release's fp16 steps", "compared"],
)
def test_precision_reaches_the_process(
    release_default: Fp16Steps | None, configured: dict[str, Any], precisions: set[Precision],
    manifest: Manifest, open_bucket: Opener, start: Start, cache: Path, tmp_path: Path,
) -> None:  # fmt: skip
    store = open_bucket(cache_dir=tmp_path / "unused")

    def in_both_precisions(record: Any) -> list[Any]:
        """Return the record of an engine or of weights of the UNet in each precision, with blobs of its own."""
        found = [record] if record.component != "unet" else []
        for precision in (FP16, FP8) if not found else ():
            blob = releases.put_blob(store, f"{type(record).__name__} {precision}".encode())
            blobs = {"blobs": (blob,)} if hasattr(record, "blobs") else {"blob": blob, "key": blob.sha256}
            found.append(record.model_copy(update={"precision": precision, **blobs}))
        return found

    changes: dict[str, Any] = {"version": "2", "schema_version": 2, "fp16_steps": release_default}
    for name in ("engines", "weights"):
        changes[name] = tuple(copy for record in getattr(manifest, name) for copy in in_both_precisions(record))
    store.write_release(manifest.model_copy(update=changes))
    configured = configured | {"precision": "fp8"}
    start(release="toy/2", **configured).wait()
    deployment = Deployment.of(read_settings(configured | {"release": "toy/2"}))
    selection = select(store.read_release("toy/2"), [cpu_target()], deployment)
    assert {engine.precision for engine in selection.engines["unet"]} == precisions
    assert file_names(cache) == {blob.sha256 for blob in selection.blobs()} and not file_names(cache, "partial")


def test_process_ends_with_a_killed_parent(
    start: Start, settings: dict[str, Any], manifest: Manifest, gate: Gate, cache: Path
) -> None:
    """The next start succeeds."""
    script = """
        import json, sys, time
        from model.loading.prefetch import Prefetch
        from model.settings import read_settings

        section, secrets = map(json.loads, (sys.stdin.readline(), sys.stdin.readline()))
        prefetch = Prefetch(read_settings(section), secrets)
        time.sleep(600)
    """
    with python(script) as parent:
        assert parent.stdin is not None
        parent.stdin.write(f"{json.dumps(settings)}\n{json.dumps(SECRETS)}\n")
        parent.stdin.flush()
        gate.wait_for_request()  # so the process has the secrets
        [worker] = prefetch_processes(parent.pid)
        for name in ("cmdline", "environ"):
            content = Path(f"/proc/{worker.pid}/{name}").read_bytes()
            assert content and not [secret for secret in SECRETS.values() if secret.encode() in content]
        parent.kill()
        worker.wait(WAIT_SECONDS)
    assert not file_names(cache) and file_names(cache, "partial")
    gate.opened.set()
    prefetch = start()
    assert load(prefetch, settings) == RELEASE_NAME
    prefetch.wait()
    assert file_names(cache) == manifest.blobs().keys() and not file_names(cache, "partial")


@pytest.mark.parametrize("share", [0.3, *(pytest.param(share, marks=pytest.mark.full) for share in (0.0, 0.7, 0.95))])
def test_load_continues_after_the_process_is_killed(
    start: Start,
    settings: dict[str, Any],
    manifest: Manifest,
    proxy: FaultyProxy,
    cache: Path,
    caplog: pytest.LogCaptureFixture,
    share: float,
) -> None:
    """The process is killed after a share of the bytes."""
    total = sum(blob.bytes for blob in manifest.blobs().values()) + len(manifest.to_json())
    killed = threading.Event()

    def kill(forwarded: int) -> None:
        if forwarded >= share * total and not killed.is_set():
            prefetch_processes()[0].kill()
            killed.set()

    proxy.on_bytes = kill
    assert load(start(), settings) == RELEASE_NAME
    assert killed.is_set()
    eventually(lambda: "prefetch ended with exit code -9; the load continues without it" in caplog.text, "the log")
    assert file_names(cache) == manifest.blobs().keys()
    # If it is killed between opening a partial file and finding the complete blob, it leaves an empty file.
    assert not [path for path in (cache / "partial").iterdir() if path.stat().st_size]


def test_process_leaves_errors_to_the_load(
    start: Start, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    prefetch = start(cache_bytes=1000)
    prefetch.wait()
    for _ in range(2):
        with pytest.raises(StoreError, match="cache_bytes"):
            load_release(prefetch.store(), deployed(RELEASE_NAME), [cpu_target()], ColdStart())
    assert not caplog.records and capfd.readouterr().err == ""


def test_load_fetches_if_the_process_fails(
    start: Start, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert load(start(python="/bin/false"), settings) == RELEASE_NAME
    eventually(lambda: "prefetch ended with exit code 1" in caplog.text, "the log")
