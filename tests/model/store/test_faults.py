"""Faults of networks and disks, and kill -9, during a fetch. It succeeds after retries or is refused with an error.

The cache never holds wrong bytes.
"""

import hashlib
import itertools
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine_builder.releases.mirror import copy_release
from engine_builder.stores.local import WritableLocalStore
from engine_builder.stores.s3_uploads import UPLOAD_PART_BYTES
from model.errors import CorruptBlob, ManifestError, StoreError
from model.store.manifest import Blob
from model.store.store import Store
from preheat.local_server.client import generate
from preheat.local_server.demo import cold_start_phases
from preheat.local_server.server import Layout, Server, ServerFailed, build_context, lay_out
from tests.conftest import READY_SECONDS, Opener
from tests.model.store.processes import python
from tests.support import object_store as ceph
from tests.support import releases
from tests.support.cached_blobs import file_names
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.object_store import ObjectStore
from tests.support.repository import REPOSITORY

PART = 256 * 2**10
SIZE = 4 * PART + 1000
FOREVER = 10_000  # more requests than any test sends
KILLS = int(os.environ.get("PREHEAT_SOAK_KILLS", "3"))


def upload(s3: Any, bucket: str, data: bytes) -> Blob:
    """Put a blob into the bucket, around the proxy."""
    digest = hashlib.sha256(data).hexdigest()
    s3.put_object(Bucket=bucket, Key=f"blobs/sha256/{digest}", Body=data)
    return Blob(sha256=digest, bytes=len(data))


def timeout_for(fault: Fault) -> float:
    """Return a timeout in seconds. It is short only if the fault needs that, because the machine may be busy."""
    return 0.5 if fault.kind == "stall" else 20.0


@pytest.fixture
def data() -> bytes:
    return random.Random(0).randbytes(SIZE)


@pytest.fixture
def blob(s3: Any, bucket: str, data: bytes) -> Blob:
    """A blob of five parts in the bucket."""
    return upload(s3, bucket, data)


@pytest.fixture
def open_proxied(open_bucket: Opener, proxy: FaultyProxy) -> Opener:
    """Return a function that opens the bucket through the proxy, with small parts and without pauses."""
    return partial(open_bucket, endpoint=proxy.url, part_bytes=PART, retry_pause=0.0)


@pytest.fixture(autouse=True)
def _check_cache(tmp_path: Path) -> Iterator[None]:
    """Check after each test that all cached bytes match their digest."""
    yield
    for path in tmp_path.glob("cache*/blobs/sha256/*"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name


PASSING_FAULTS = [
    Fault("drop", at=0),
    Fault("drop", at=PART - 1, times=3),
    Fault("reset", at=100_000, times=3),
    Fault("truncate", at=100_000, times=3),
    Fault("truncate", at=0),
    Fault("stall", at=100_000),
    Fault("corrupt", at=0),
    Fault("corrupt", at=PART - 1),
    *(Fault("status", status=status, code=code, times=2)
      for status, code in ((500, "InternalError"), (503, "SlowDown"), (429, "TooManyRequests"))),
]  # fmt: skip


def test_passing_faults_are_overcome(
    open_proxied: Opener, proxy: FaultyProxy, blob: Blob, data: bytes, tmp_path: Path
) -> None:
    for number, fault in enumerate(PASSING_FAULTS):
        cache = tmp_path / f"cache{number}"
        store = open_proxied(attempts=4, timeout=timeout_for(fault), cache_dir=cache)
        proxy.inject(replace(fault))
        assert store.get(blob.sha256, blob.bytes).read_bytes() == data, fault
        assert not proxy.pending, "the fault did not happen"
        assert file_names(cache) == {blob.sha256} and not file_names(cache, "partial")


LASTING_FAULTS = [
    (Fault("drop", at=10), "breaks off at byte 20 of"),
    (Fault("reset", at=0), "breaks off at byte 0 of"),
    (Fault("truncate", at=0), "breaks off at byte 0 of"),
    (Fault("stall", at=0), "breaks off at byte 0 of"),
    (Fault("corrupt", at=5), "is damaged: its bytes have changed"),
    (Fault("status", status=500, code="InternalError"), r"fails, also after several tries \(500 InternalError\)"),
    (Fault("status", status=503, code="SlowDown"), r"is too busy, also after several tries \(SlowDown\)"),
]


def test_lasting_faults_are_reported(open_proxied: Opener, proxy: FaultyProxy, blob: Blob, tmp_path: Path) -> None:
    for number, (fault, words) in enumerate(LASTING_FAULTS):
        cache = tmp_path / f"cache{number}"
        store = open_proxied(attempts=2, timeout=timeout_for(fault), cache_dir=cache)
        proxy.inject(replace(fault, times=FOREVER))
        with pytest.raises(StoreError, match=words) as caught:
            store.get(blob.sha256, blob.bytes)
        assert "\n" not in str(caught.value)
        assert not file_names(cache)
        assert isinstance(caught.value, CorruptBlob) == (fault.kind == "corrupt")
        proxy.clear()
        assert len(store.get(blob.sha256, blob.bytes).read_bytes()) == SIZE


def test_finished_parts_are_kept_between_starts(
    open_proxied: Opener, proxy: FaultyProxy, blob: Blob, data: bytes
) -> None:
    last = f"bytes={4 * PART}-{SIZE - 1}"
    proxy.inject(Fault("drop", range=last))
    with pytest.raises(StoreError, match="bytes received are kept"):
        open_proxied(attempts=1).get(blob.sha256, blob.bytes)
    proxy.clear()
    assert open_proxied().get(blob.sha256, blob.bytes).read_bytes() == data
    assert proxy.requested_ranges(blob.sha256) == [last]


def test_damaged_manifest_is_requested_again(
    open_proxied: Opener, proxy: FaultyProxy, s3: Any, bucket: str, tmp_path: Path
) -> None:
    store = open_proxied(attempts=4)
    manifest = releases.draft_release(WritableLocalStore(tmp_path / "local"))
    for key in ("releases/toy/1.json", "records/drafts/x.json"):
        s3.put_object(Bucket=bucket, Key=key, Body=manifest.to_json())
    faults = Fault("drop", at=10, times=2), Fault("corrupt", at=40, times=2), Fault("truncate")
    for fault, read in itertools.product(
        faults, (lambda: store.read_release("toy/1"), lambda: store.read_record("drafts", "x"))
    ):
        proxy.inject(replace(fault))
        assert read() in (manifest, manifest.to_json())
        assert not proxy.pending
        proxy.inject(replace(fault, times=FOREVER))
        with pytest.raises((StoreError, ManifestError), match="arrives damaged"):
            read()
        proxy.clear()


def test_upload_is_retried(open_proxied: Opener, proxy: FaultyProxy, s3: Any, bucket: str, tmp_path: Path) -> None:
    store, file = open_proxied(attempts=4), tmp_path / "file"
    faults = [
        Fault("status", status=503, times=2, method="PUT"),
        Fault("status", status=400, code="BadDigest", times=2, method="PUT"),
        Fault("drop_answer", method="PUT"),
        Fault("drop_answer", method="POST", path="uploads"),
    ]
    for number, fault in enumerate(faults):
        content = bytes(UPLOAD_PART_BYTES) + bytes([number]) * 1000
        file.write_bytes(content)
        proxy.inject(replace(fault))
        digest = store.put(file)
        assert not proxy.pending
        assert s3.get_object(Bucket=bucket, Key=f"blobs/sha256/{digest}")["Body"].read() == content


# -- kill -9 ------------------------------------------------------------------------------------------------------

FETCH = """
    import hashlib, sys
    from dataclasses import replace
    from model.settings import read_settings
    from model.store.manifest import Blob
    from model.store.store import open_store

    options = replace(read_settings().store_options(), part_bytes=int(sys.argv[2]))
    store = open_store(sys.argv[1], options)
    print("opened", flush=True)
    blobs = [Blob(sha256=name, bytes=int(size)) for name, size in (entry.split(":") for entry in sys.argv[3:])]
    store.fetch(blobs)
    for blob in blobs:
        path = store.get(blob.sha256, blob.bytes)
        assert hashlib.sha256(path.read_bytes()).hexdigest() == blob.sha256
    store.close()
    print("fetched")
"""


def start_fetch(bucket: str, blobs: list[Blob], environment: dict[str, str]) -> "subprocess.Popen[str]":
    """Start a process that opens the bucket and fetches the blobs. It prints "opened", then "fetched"."""
    return python(
        FETCH, f"s3://{bucket}", PART, *(f"{blob.sha256}:{blob.bytes}" for blob in blobs), environment=environment
    )


@pytest.fixture
def environment(object_store: ObjectStore, tmp_path: Path) -> dict[str, str]:
    """The environment of a process that uses the object store and the test's cache."""
    return object_store.environment | {"PREHEAT_CACHE_DIR": str(tmp_path / "cache")}


def test_start_after_kill_9_at_any_moment(
    open_proxied: Opener, environment: dict[str, str], proxy: FaultyProxy, s3: Any, bucket: str, tmp_path: Path
) -> None:
    """The proxy kills the process after a random number of bytes. Every second one continues in the same cache."""
    blobs = [upload(s3, bucket, random.Random(i).randbytes(3 * PART + 1000 * i)) for i in range(4)]
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}")
    moments = random.Random(seed)
    exit_codes = []
    for number in range(KILLS):
        cache = tmp_path / f"cache{number // 2}"
        process = start_fetch(
            bucket, blobs, environment | {"AWS_ENDPOINT_URL": proxy.url, "PREHEAT_CACHE_DIR": str(cache)}
        )
        moment = moments.randrange(sum(blob.bytes for blob in blobs))

        def kill(passed: int, process: "subprocess.Popen[str]" = process, moment: int = moment) -> None:
            if passed > moment and process.poll() is None:
                process.send_signal(signal.SIGKILL)

        proxy.on_bytes = kill
        _, err = process.communicate(timeout=120)
        exit_codes.append(process.returncode)
        proxy.clear()
        store = open_proxied(cache_dir=cache)
        store.fetch(blobs)
        assert file_names(cache) == {blob.sha256 for blob in blobs} and not file_names(cache, "partial")
        for blob in blobs:
            path = store.get(blob.sha256, blob.bytes)
            assert hashlib.sha256(path.read_bytes()).hexdigest() == blob.sha256
            path.unlink()  # for the next round
        store.close()
    assert -signal.SIGKILL in exit_codes and {*exit_codes} <= {-signal.SIGKILL, 0}, err


SECRETS = {
    "TRUSS_SECRET_aws_access_key_id": ceph.ACCESS_KEY,
    "TRUSS_SECRET_aws_secret_access_key": ceph.SECRET_KEY,
}
REQUEST = {"prompt": "a red circle", "num_inference_steps": 2, "seed": 1}


@pytest.fixture
def layout(proxy: FaultyProxy, bucket: str, release: str, tmp_path: Path) -> Layout:
    """An image whose config names the bucket and its endpoint, so it needs no environment."""
    config = yaml.safe_load((REPOSITORY / "truss" / "configs" / "cpu-demo.yaml").read_text())
    config["secrets"] = {"aws_access_key_id": None, "aws_secret_access_key": None}
    config["model_metadata"]["preheat"] |= {
        "store": f"s3://{bucket}/prefix",
        "release": release,
        "endpoint": proxy.url,
        "region": "us-east-1",
        "cache_dir": str(tmp_path / "cache"),
        "cache_bytes": "2GiB",
    }
    written = tmp_path / "config.yaml"
    written.write_text(yaml.safe_dump(config))
    return lay_out(build_context(REPOSITORY, written, tmp_path / "build"), tmp_path / "root")


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove this machine's settings, so that the server does not inherit them."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "PREHEAT_", "TRUSS_SECRET_")):
            monkeypatch.delenv(name)


def test_server_starts_from_bucket_after_killed_fetch(
    store: Store,
    release: str,
    layout: Layout,
    open_bucket: Opener,
    proxy: FaultyProxy,
    clean_environment: None,
    show_progress: Callable[[str], None],
    tmp_path: Path,
) -> None:
    manifest, _ = copy_release(store, open_bucket("prefix", cache_dir=tmp_path / "unused"), release)
    half = sum(blob.bytes for blob in manifest.blobs().values()) // 2

    show_progress("starting a server that is killed")
    with Server(layout, environment=SECRETS) as server:

        def kill(passed: int) -> None:
            if passed > half:
                proxy.on_bytes = lambda passed: None
                os.kill(server.pid, signal.SIGKILL)

        proxy.on_bytes = kill
        with pytest.raises(ServerFailed, match="killed by SIGKILL"):
            server.wait_ready(READY_SECONDS)

    show_progress("starting a server from the bucket")
    with Server(layout, environment=SECRETS, log=tmp_path / "server.log") as server:
        server.wait_ready(READY_SECONDS)
        answer = generate(server.url, REQUEST, READY_SECONDS)
        assert answer["status"] == "success" and answer["engine"]["release"] == release
        assert cold_start_phases(server.url)["fetch"] > 0
    cached = {path.name for path in (tmp_path / "cache" / "blobs" / "sha256").iterdir()}
    assert "prefetch" not in (tmp_path / "server.log").read_text(), "the prefetch process failed"
    assert cached and cached <= set(manifest.blobs()) and not list((tmp_path / "cache" / "partial").iterdir())
