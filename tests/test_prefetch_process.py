"""A bucket's blobs come in a process of their own: it is trusted with nothing, and may end at any moment."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine_builder.releases import signing
from model.cold_start import ColdStart
from model.errors import ManifestError, ReleaseNotFound, StoreError, UntrustedRelease
from model.loading.load import load_release
from model.loading.prefetch import Prefetch
from model.settings import read_settings
from model.store.manifest import Manifest
from model.store.s3 import S3Store
from tests.conftest import Opener
from tests.support.cached_blobs import file_names
from tests.support import object_store as ceph
from tests.support import releases
from tests.support.faulty_proxy import FaultyProxy, RecordedRequest
from tests.support.releases import NAME, cpu_target

REPOSITORY = Path(__file__).resolve().parents[1]
SECRETS = {"aws_access_key_id": ceph.ACCESS_KEY, "aws_secret_access_key": ceph.SECRET_KEY}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that says nothing: what is configured must reach the process."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "PREHEAT_", "XDG_")):
            monkeypatch.delenv(name)


@pytest.fixture
def manifest(open_bucket: Opener, tmp_path: Path) -> Manifest:
    there = open_bucket(cache_dir=tmp_path / "unused")
    made = releases.draft(there, releases.compiled_toy())
    there.write_release(made)
    return made


Start = Callable[..., Prefetch]


@pytest.fixture
def settings(manifest: Manifest, proxy: FaultyProxy, bucket: str, tmp_path: Path) -> dict[str, Any]:
    cache = str(tmp_path / "cache")
    return {"store": f"s3://{bucket}", "release": NAME, "cache_dir": cache, "endpoint": proxy.url}


@pytest.fixture
def start(settings: dict[str, Any]) -> Iterator[Start]:
    """Starts a prefetch; keywords are settings. Ends it."""
    started: list[Prefetch] = []

    def start_it(**changes: Any) -> Prefetch:
        started.append(Prefetch(read_settings(settings | changes), SECRETS))
        return started[-1]

    yield start_it
    for made in started:
        made.close()


@pytest.fixture
def gate(proxy: FaultyProxy) -> Iterator[threading.Event]:
    """No request for a blob is passed on until it is opened."""
    opened = threading.Event()

    def hold(request: RecordedRequest) -> None:
        if "/blobs/" in request.path:
            opened.wait(60)

    proxy.on_request = hold
    yield opened
    opened.set()


def load(made: Prefetch, settings: dict[str, Any]) -> str:
    keys = read_settings(settings).public_key
    return load_release(made.store(), NAME, [cpu_target()], [], ColdStart(), keys).release


def pid_of(made: Prefetch) -> int:
    assert made._process is not None
    return made._process._process.pid


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_all_that_loading_reads_is_here_before_it_asks(
    start: Start, settings: dict[str, Any], manifest: Manifest, proxy: FaultyProxy, tmp_path: Path
) -> None:
    made = start()
    made.wait()
    assert file_names(tmp_path / "cache") == manifest.blobs().keys() and not file_names(tmp_path / "cache", "partial")
    assert len(proxy.requested_ranges(f"/releases/{NAME}.json")) == 1
    proxy.requests.clear()
    assert load(made, settings) == NAME
    assert not proxy.requests, "neither the manifest nor a blob was asked for again"


def test_who_loads_imports_no_boto3(settings: dict[str, Any], manifest: Manifest) -> None:
    script = """
        import json, sys
        from model.loading.prefetch import Prefetch
        from model.loading.select import select
        from model.loading.target import detect_targets
        from model.settings import read_settings

        section, secrets = map(json.loads, sys.stdin)
        settings = read_settings(section)
        made = Prefetch(settings, secrets)
        made.wait()
        store = made.store()
        blobs = select(store.read_release(settings.release), detect_targets(), []).blobs()
        store.fetch(blobs)
        for blob in blobs:
            store.read(blob.sha256, memoryview(bytearray(blob.bytes)))
        made.close()
        print(len(blobs), sorted(name for name in ("torch", "boto3", "botocore", "urllib3") if name in sys.modules))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], input=f"{json.dumps(settings)}\n{json.dumps(SECRETS)}",
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.split(maxsplit=1) == [str(len(manifest.blobs())), "[]\n"]


def test_what_is_on_its_way_is_waited_for_and_comes_once(
    start: Start,
    settings: dict[str, Any],
    manifest: Manifest,
    proxy: FaultyProxy,
    gate: threading.Event,
    tmp_path: Path,
) -> None:
    made = start()
    until(lambda: len(proxy.requested_ranges("/blobs/")) > 0)
    loaded: list[str] = []
    loading = threading.Thread(target=lambda: loaded.append(load(made, settings)))
    loading.start()
    users = tmp_path / "cache" / "users"
    until(lambda: sum(path.stat().st_size > 0 for path in users.iterdir()) == 2)  # loading asks for blobs, too
    assert loading.is_alive() and not file_names(tmp_path / "cache")
    gate.set()
    loading.join()
    assert loaded == [NAME]
    for digest in manifest.blobs():
        assert len(proxy.requested_ranges(digest)) == 1


def test_secrets_are_in_no_list_of_processes(
    start: Start, proxy: FaultyProxy, gate: threading.Event, manifest: Manifest
) -> None:
    made = start()
    until(lambda: len(proxy.requested_ranges("/blobs/")) > 0)  # so they have reached it
    for name in ("cmdline", "environ"):
        seen = Path(f"/proc/{pid_of(made)}/{name}").read_bytes()
        assert seen and not [secret for secret in SECRETS.values() if secret.encode() in seen]


def test_it_ends_with_a_parent_that_is_killed_and_the_next_start_succeeds(
    start: Start,
    settings: dict[str, Any],
    manifest: Manifest,
    proxy: FaultyProxy,
    gate: threading.Event,
    tmp_path: Path,
) -> None:
    script = """
        import json, sys, time
        from model.loading.prefetch import Prefetch
        from model.settings import read_settings

        section, secrets = map(json.loads, (sys.stdin.readline(), sys.stdin.readline()))
        made = Prefetch(read_settings(section), secrets)
        print(made._process._process.pid, flush=True)
        time.sleep(600)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as parent:  # fmt: skip
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdin.write(f"{json.dumps(settings)}\n{json.dumps(SECRETS)}\n")
        parent.stdin.flush()
        pid = int(parent.stdout.readline())
        until(lambda: len(proxy.requested_ranges("/blobs/")) > 0)
        assert runs(pid)
        parent.kill()
    until(lambda: not runs(pid))
    assert not file_names(tmp_path / "cache") and file_names(tmp_path / "cache", "partial")
    gate.set()
    made = start()
    assert load(made, settings) == NAME
    made.wait()
    assert file_names(tmp_path / "cache") == manifest.blobs().keys() and not file_names(tmp_path / "cache", "partial")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.95])
def test_loading_goes_on_where_it_was_killed(
    start: Start,
    settings: dict[str, Any],
    manifest: Manifest,
    proxy: FaultyProxy,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    share: float,
) -> None:
    total = sum(blob.bytes for blob in manifest.blobs().values()) + len(manifest.to_json())
    started: list[Prefetch] = []
    ready = threading.Event()

    def kill(passed: int) -> None:
        if passed >= share * total and not ready.is_set():
            until(lambda: bool(started))
            os.kill(pid_of(started[0]), signal.SIGKILL)
            ready.set()

    proxy.on_bytes = kill
    started.append(start())
    assert load(started[0], settings) == NAME
    assert ready.is_set()
    until(lambda: "prefetch ended with exit code -9; the load continues without it" in caplog.text)
    assert file_names(tmp_path / "cache") == manifest.blobs().keys()
    # Killed between opening a partial file and finding its blob here, it leaves an empty one, which the cache sweeps.
    partials = [path for path in (tmp_path / "cache" / "partial").iterdir() if path.stat().st_size]
    assert not partials


def test_it_ends_once_all_is_loaded_and_what_was_guessed_wrong_comes_no_further(
    start: Start, proxy: FaultyProxy, manifest: Manifest, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    made = start()
    until(lambda: len(proxy.requested_ranges("/blobs/")) > 0)
    pid = pid_of(made)
    made.close()
    until(lambda: not runs(pid))
    made.wait()
    assert not caplog.records


def test_what_it_brought_is_in_use_until_all_is_loaded(start: Start, manifest: Manifest, tmp_path: Path) -> None:
    made = start()
    made.wait()
    noted = {word for path in (tmp_path / "cache" / "users").iterdir() for word in path.read_text().split()}
    assert noted == manifest.blobs().keys() and runs(pid_of(made))


def test_nothing_of_a_release_that_is_not_trusted_is_brought(
    start: Start, settings: dict[str, Any], proxy: FaultyProxy, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings["public_key"] = str(signing.public_key(Ed25519PrivateKey.generate()))
    made = start(public_key=settings["public_key"])
    made.wait()
    assert not proxy.requested_ranges("/blobs/") and not file_names(tmp_path / "cache")
    with pytest.raises(UntrustedRelease, match="is not signed"):
        load(made, settings)
    assert capfd.readouterr().err == "", "the process leaves it to loading to say"


@pytest.mark.parametrize(
    "changes, error, said",
    [
        ({"release": "toy/9"}, ReleaseNotFound, "Release toy/9 was not found"),
        ({"cache_bytes": 1000}, StoreError, "cache_bytes"),
        ({"endpoint": "nonsense"}, StoreError, "endpoint"),
        ({"store": "s3://UPPER"}, StoreError, "is not the URL of a bucket"),
    ],
)
def test_what_fails_is_left_for_loading_to_say(
    start: Start,
    settings: dict[str, Any],
    changes: dict[str, Any],
    error: type[Exception],
    said: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    made = start(**changes)
    made.wait()
    release = changes.get("release", NAME)
    for _ in range(2):
        with pytest.raises(error, match=said):
            load_release(made.store(), release, [cpu_target()], [], ColdStart())
    assert not caplog.records and capfd.readouterr().err == ""


def test_loading_fetches_by_itself_where_the_process_fails_at_once(
    start: Start, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert load(start(), settings) == NAME
    until(lambda: "prefetch ended with exit code 1" in caplog.text)


def test_without_a_process_a_thread_brings_the_blobs(
    start: Start, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    start().wait()
    assert file_names(tmp_path / "cache") == manifest.blobs().keys()
    assert "prefetch runs in the server's process" in caplog.text


def test_a_manifest_that_was_handed_over_is_read_as_strictly_and_once(
    open_bucket: Opener, manifest: Manifest, settings: dict[str, Any]
) -> None:
    store: S3Store = open_bucket()
    store.preset_manifest(NAME, manifest.to_json()[:-1])
    with pytest.raises(ManifestError, match="is not JSON"):
        store.read_release(NAME)
    assert store.read_release(NAME) == manifest
