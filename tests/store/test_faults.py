"""Faults of networks and disks, and kill -9, during a fetch. It succeeds after retries or is refused with an error.

The cache never holds wrong bytes.
"""

import hashlib
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_builder.stores.s3 import WritableS3Store
from engine_builder.stores.s3_uploads import UPLOAD_PART_BYTES
from model.errors import CorruptBlob, ManifestError, StoreError
from model.store import s3 as s3_module
from model.store import s3_bucket
from model.store.manifest import Blob
from tests.conftest import Opener
from tests.store.processes import finish, own_mounts, python
from tests.store.test_cache import here
from tests.support import releases
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.object_store import ObjectStore

PART = 256 * 2**10
SIZE = 4 * PART + 1000
KILLS = int(os.environ.get("PREHEAT_SOAK_KILLS", "5"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small parts, so that a blob has several, and no pauses between retries."""
    monkeypatch.setattr(s3_module, "PART_BYTES", PART)
    monkeypatch.setattr(s3_bucket, "FIRST_PAUSE_SECONDS", 0.0)


@pytest.fixture
def data() -> bytes:
    return random.Random(0).randbytes(SIZE)


@pytest.fixture
def blob(open_bucket: Opener, data: bytes, tmp_path: Path) -> Blob:
    """A blob of five parts in the bucket."""
    return Blob(sha256=open_bucket(cache_dir=tmp_path / "unused").put_bytes(data), bytes=SIZE)


@pytest.fixture
def store(open_bucket: Opener, proxy: FaultyProxy) -> WritableS3Store:
    """The bucket, through the proxy."""
    return open_bucket(endpoint=proxy.url, attempts=4, timeout=1.0)


@pytest.fixture
def patient(open_bucket: Opener, proxy: FaultyProxy) -> WritableS3Store:
    """The same with a long timeout, for tests that count requests on a busy machine."""
    return open_bucket(endpoint=proxy.url, attempts=4)


@pytest.fixture(autouse=True)
def sound(tmp_path: Path) -> Iterator[None]:
    """After each test, all cached bytes match their digest."""
    yield
    for path in (tmp_path / "cache" / "blobs" / "sha256").glob("*"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name


PASSING_FAULTS = [
    Fault("drop", at=0),
    Fault("drop", at=100_000),
    Fault("drop", at=PART - 1, times=3),
    Fault("reset", at=100_000, times=3),
    Fault("truncate", at=100_000, times=3),
    Fault("truncate", at=0),
    Fault("stall", at=100_000),
    Fault("corrupt", at=0),
    Fault("corrupt", at=PART - 1),
    Fault("status", status=500, code="InternalError", times=2),
    Fault("status", status=503, code="SlowDown", times=2),
    Fault("status", status=429, code="TooManyRequests", times=2),
]


@pytest.mark.parametrize(
    "fault", PASSING_FAULTS, ids=lambda fault: f"{fault.kind}-{fault.status}-{fault.at}-{fault.times}"
)
def test_passing_fault_is_overcome(
    store: WritableS3Store, proxy: FaultyProxy, blob: Blob, data: bytes, tmp_path: Path, fault: Fault
) -> None:
    proxy.order(Fault(**vars(fault)))
    assert store.get(blob.sha256, blob.bytes).read_bytes() == data
    assert not proxy.pending, "the fault did not happen"
    assert here(tmp_path / "cache") == {blob.sha256} and not here(tmp_path / "cache", "partial")


LASTING_FAULTS = [
    (Fault("drop", at=10), "breaks off at byte 20 of"),
    (Fault("reset", at=0), "breaks off at byte 0 of"),
    (Fault("truncate", at=0), "breaks off at byte 0 of"),
    (Fault("stall", at=0), "breaks off at byte 0 of"),
    (Fault("corrupt", at=5), "is damaged: its bytes have changed"),
    (Fault("status", status=500, code="InternalError"), r"fails, also after several tries \(500 InternalError\)"),
    (Fault("status", status=503, code="SlowDown"), r"is too busy, also after several tries \(SlowDown\)"),
]


@pytest.mark.parametrize("fault, words", LASTING_FAULTS, ids=lambda value: getattr(value, "kind", None))
def test_lasting_fault_is_reported(
    open_bucket: Opener, proxy: FaultyProxy, blob: Blob, tmp_path: Path, fault: Fault, words: str
) -> None:
    store = open_bucket(endpoint=proxy.url, attempts=2, timeout=0.3)
    proxy.order(Fault(**vars(fault) | {"times": 10_000}))
    with pytest.raises(StoreError, match=words) as caught:
        store.get(blob.sha256, blob.bytes)
    assert "\n" not in str(caught.value)
    assert not here(tmp_path / "cache")
    assert isinstance(caught.value, CorruptBlob) == (fault.kind == "corrupt")
    proxy.clear()
    assert len(store.get(blob.sha256, blob.bytes).read_bytes()) == SIZE


def test_broken_body_is_resumed(patient: WritableS3Store, proxy: FaultyProxy, blob: Blob) -> None:
    proxy.order(Fault("truncate", at=500))  # of the part that is requested first; the last has 1,000 bytes
    patient.get(blob.sha256, blob.bytes)
    ranges = proxy.bytes_asked(blob.sha256)
    assert len(ranges) == 6
    starts = {int(one.removeprefix("bytes=").partition("-")[0]) for one in ranges}
    again = starts - set(range(0, SIZE, PART))
    assert len(again) == 1 and (again.pop() - 500) % PART == 0


def test_finished_parts_are_kept_between_starts(
    open_bucket: Opener, proxy: FaultyProxy, blob: Blob, data: bytes
) -> None:
    last = f"bytes={4 * PART}-{SIZE - 1}"

    class LastFails(FaultyProxy):
        failing = True

        def take(self, method: str, path: str) -> Fault | None:
            return Fault("drop") if self.failing and self.seen[-1].headers.get("Range") == last else None

    with LastFails(proxy.upstream) as failing:
        with pytest.raises(StoreError, match="bytes received are kept"):
            open_bucket(endpoint=failing.url, attempts=1).get(blob.sha256, blob.bytes)
        failing.clear()
        failing.failing = False
        assert open_bucket(endpoint=failing.url).get(blob.sha256, blob.bytes).read_bytes() == data
        assert failing.bytes_asked(blob.sha256) == [last]


def test_wrong_byte_is_refused_after_one_retry(patient: WritableS3Store, proxy: FaultyProxy, blob: Blob) -> None:
    proxy.order(Fault("corrupt", times=10_000))
    with pytest.raises(CorruptBlob):
        patient.get(blob.sha256, blob.bytes)
    assert len(proxy.bytes_asked(blob.sha256)) == 10


@pytest.mark.parametrize("fault", [Fault("drop", at=10, times=2), Fault("corrupt", at=40, times=2), Fault("truncate")])
def test_damaged_manifest_is_requested_again(store: WritableS3Store, proxy: FaultyProxy, fault: Fault) -> None:
    manifest = releases.draft(store)
    store.write_release(manifest)
    store.write_record("drafts", "x", manifest.to_json())
    for read in (lambda: store.read_release("toy/1"), lambda: store.read_record("drafts", "x")):
        proxy.order(Fault(**vars(fault)))
        assert read() in (manifest, manifest.to_json())
        assert not proxy.pending
        proxy.order(Fault(**vars(fault) | {"times": 10_000}))
        with pytest.raises((StoreError, ManifestError), match="arrives damaged"):
            read()
        proxy.clear()


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", status=503, times=2, method="PUT"),
        Fault("status", status=400, code="BadDigest", times=2, method="PUT"),
        Fault("drop_answer", method="PUT"),
        Fault("drop_answer", method="POST", path="uploads"),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.code}-{fault.method}",
)
def test_upload_is_retried(
    store: WritableS3Store, proxy: FaultyProxy, fault: Fault, s3: Any, bucket: str, tmp_path: Path
) -> None:
    size = UPLOAD_PART_BYTES + 1000
    file = tmp_path / "file"
    file.write_bytes(bytes(size))
    proxy.order(Fault(**vars(fault)))
    digest = store.put(file)
    assert not proxy.pending
    assert s3.get_object(Bucket=bucket, Key=f"blobs/sha256/{digest}")["Body"].read() == bytes(size)


# -- kill -9 ------------------------------------------------------------------------------------------------------

FETCH = """
    import hashlib, sys
    from model.settings import read_settings
    from model.store import s3
    from model.store.manifest import Blob
    from model.store.store import open_store

    s3.PART_BYTES = int(sys.argv[2])
    store = open_store(sys.argv[1], read_settings().store_options())
    blobs = [Blob(sha256=name, bytes=int(size)) for name, size in (each.split(":") for each in sys.argv[3:])]
    store.fetch(blobs)
    for blob in blobs:
        path = store.get(blob.sha256, blob.bytes)
        assert hashlib.sha256(path.read_bytes()).hexdigest() == blob.sha256
    store.close()
    print("fetched")
"""


def test_start_after_kill_9_at_any_moment(
    open_bucket: Opener, object_store: ObjectStore, proxy: FaultyProxy, bucket: str, tmp_path: Path
) -> None:
    """The proxy kills the process after a random number of bytes."""
    maker = open_bucket(cache_dir=tmp_path / "unused")
    contents = [random.Random(i).randbytes(3 * PART + 1000 * i) for i in range(4)]
    blobs = [Blob(sha256=maker.put_bytes(content), bytes=len(content)) for content in contents]
    total = sum(blob.bytes for blob in blobs)
    arguments = [f"s3://{bucket}", PART, *(f"{blob.sha256}:{blob.bytes}" for blob in blobs)]
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}")
    moments = random.Random(seed)
    killed = 0
    for number in range(KILLS):
        cache = tmp_path / "cache" if number % 2 else tmp_path / f"cache{number}"
        environment = object_store.environment | {"AWS_ENDPOINT_URL": proxy.url, "PREHEAT_CACHE_DIR": str(cache)}
        proxy.clear()
        process = python(FETCH, *arguments, environment=environment)
        moment = moments.randrange(total)

        def kill(passed: int, process: "subprocess.Popen[str]" = process, moment: int = moment) -> None:
            if passed > moment and process.poll() is None:
                process.send_signal(signal.SIGKILL)

        proxy.on_bytes = kill
        _, err = process.communicate(timeout=120)
        assert process.returncode in (-signal.SIGKILL, 0), err
        killed += process.returncode == -signal.SIGKILL
        proxy.on_bytes = lambda passed: None
        again = python(FETCH, *arguments, environment=environment)
        assert finish(again) == "fetched\n"
        assert here(cache) == {blob.sha256 for blob in blobs} and not here(cache, "partial")
        for path in (cache / "blobs" / "sha256").iterdir():
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
            if number % 2:
                path.unlink()  # for the next round
    assert killed, "every fetch ended before it was killed"


def test_waiting_process_replaces_killed_fetcher(
    open_bucket: Opener, object_store: ObjectStore, proxy: FaultyProxy, blob: Blob, bucket: str, tmp_path: Path
) -> None:
    """The first one's body stalls. The second waits for its lock, and continues when it is killed."""
    environment = object_store.environment | {"PREHEAT_CACHE_DIR": str(tmp_path / "cache")}
    arguments = [f"s3://{bucket}", PART, f"{blob.sha256}:{blob.bytes}"]
    proxy.order(Fault("stall", at=1000, times=10_000))
    first = python(FETCH, *arguments, environment=environment | {"AWS_ENDPOINT_URL": proxy.url})
    while not proxy.bytes_asked(blob.sha256):
        assert first.poll() is None, first.communicate()[1]
    second = python(FETCH, *arguments, environment=environment)
    while len(here(tmp_path / "cache", "users")) < 2:
        assert second.poll() is None, second.communicate()[1]
    assert second.poll() is None
    first.kill()
    first.communicate()
    assert finish(second) == "fetched\n"


def test_concurrent_processes_fetch_each_blob_once(
    open_bucket: Opener, object_store: ObjectStore, proxy: FaultyProxy, bucket: str, tmp_path: Path
) -> None:
    maker = open_bucket(cache_dir=tmp_path / "unused")
    blobs = [Blob(sha256=maker.put_bytes(bytes([i]) * 1000), bytes=1000) for i in range(6)]
    arguments = [f"s3://{bucket}", PART, *(f"{blob.sha256}:{blob.bytes}" for blob in blobs)]
    environment = object_store.environment | {
        "AWS_ENDPOINT_URL": proxy.url,
        "PREHEAT_CACHE_DIR": str(tmp_path / "cache"),
    }
    for process in [python(FETCH, *arguments, environment=environment) for _ in range(3)]:
        assert finish(process) == "fetched\n"
    for blob in blobs:
        assert len(proxy.bytes_asked(blob.sha256)) == 1


# -- a full disk --------------------------------------------------------------------------------------------------

FULL = """
    import os, subprocess, sys
    from pathlib import Path
    from model.errors import StoreError
    from model.settings import read_settings
    from model.store.store import open_store
    from tests.store.test_cache import here

    root = Path(sys.argv[1])
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "none", str(root)], check=True)
    store = open_store(os.environ["URL"], read_settings().store_options())
    digest, size = os.environ["BLOB"].split(":")
    small = os.environ["SMALL"]
    store.get(small, 5)
    (root / "ballast").write_bytes(bytes(1_000_000))
    try:
        store.get(digest, int(size))
    except StoreError as error:
        print(error)
    print(here(root) == {small}, here(root, "partial"))
    (root / "ballast").unlink()
    print(store.get(digest, int(size)).stat().st_size)
"""


def test_cache_on_full_disk_stays_valid(
    open_bucket: Opener, object_store: ObjectStore, bucket: str, blob: Blob, tmp_path: Path
) -> None:
    small = open_bucket(cache_dir=tmp_path / "unused").put_bytes(b"small")
    root = tmp_path / "full"
    variables = {"URL": f"s3://{bucket}", "BLOB": f"{blob.sha256}:{blob.bytes}", "SMALL": small}
    environment = object_store.environment | variables | {"PREHEAT_CACHE_DIR": str(root)}
    message, state, size = finish(python(FULL, root, prefix=own_mounts(), environment=environment)).splitlines()
    assert message.startswith(f"The cache {root} is full (No space left on device). Free space on that disk")
    assert state == "True set()" and int(size) == SIZE
