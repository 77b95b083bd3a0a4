"""What networks, disks and kill -9 do to a fetch. Each time it succeeds by trying again, or is refused with a sentence,
and nothing that is wrong is ever in the cache."""

import hashlib
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from model.errors import CorruptBlob, ManifestError, StoreError
from model.store import s3 as s3_module
from model.store import s3_bucket
from model.store.manifest import Blob
from model.store.s3 import S3Store
from tests.conftest import Opener
from tests.stand_ins import releases
from tests.stand_ins.faulty_proxy import Fault, FaultyProxy
from tests.stand_ins.object_store import ObjectStore
from tests.store.test_cache import here
from tests.store.test_cache import run as run_alone
from tests.store.test_local import own_mounts
from tests.store.test_s3 import finish, python

PART = 256 * 2**10
SIZE = 4 * PART + 1000
KILLS = int(os.environ.get("PREHEAT_SOAK_KILLS", "5"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts, so that a blob has several; and no waiting between tries, which is not what is tried here."""
    monkeypatch.setattr(s3_module, "PART", PART)
    monkeypatch.setattr(s3_bucket, "_PAUSE", 0.0)


@pytest.fixture
def data() -> bytes:
    return random.Random(0).randbytes(SIZE)


@pytest.fixture
def blob(open_bucket: Opener, data: bytes, tmp_path: Path) -> Blob:
    """A blob of five parts in the bucket."""
    return Blob(sha256=open_bucket(cache_dir=tmp_path / "unused").put_bytes(data), bytes=SIZE)


@pytest.fixture
def store(open_bucket: Opener, proxy: FaultyProxy) -> S3Store:
    """The bucket, through the proxy."""
    return open_bucket(endpoint=proxy.url, attempts=4, timeout=1.0)


@pytest.fixture
def patient(open_bucket: Opener, proxy: FaultyProxy) -> S3Store:
    """The same, for requests that are counted: a busy machine is no reason to ask again."""
    return open_bucket(endpoint=proxy.url, attempts=4)


@pytest.fixture(autouse=True)
def sound(tmp_path: Path) -> Iterator[None]:
    """Whatever a test did: what the cache has under a digest is what the digest says."""
    yield
    for path in (tmp_path / "cache" / "blobs" / "sha256").glob("*"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name


MENDED = [
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


@pytest.mark.parametrize("fault", MENDED, ids=lambda fault: f"{fault.kind}-{fault.status}-{fault.at}-{fault.times}")
def test_a_fault_that_passes_is_overcome(
    store: S3Store, proxy: FaultyProxy, blob: Blob, data: bytes, tmp_path: Path, fault: Fault
) -> None:
    proxy.order(Fault(**vars(fault)))
    assert store.get(blob.sha256, blob.bytes).read_bytes() == data
    assert not proxy.pending, "the fault did not happen"
    assert here(tmp_path / "cache") == {blob.sha256} and not here(tmp_path / "cache", "partial")


REFUSED = [
    (Fault("drop", at=10), "breaks off at byte 20 of"),
    (Fault("reset", at=0), "breaks off at byte 0 of"),
    (Fault("truncate", at=0), "breaks off at byte 0 of"),
    (Fault("stall", at=0), "breaks off at byte 0 of"),
    (Fault("corrupt", at=5), "is damaged: its bytes have changed"),
    (Fault("status", status=500, code="InternalError"), r"fails, also after several tries \(500 InternalError\)"),
    (Fault("status", status=503, code="SlowDown"), r"is too busy, also after several tries \(SlowDown\)"),
]


@pytest.mark.parametrize("fault, said", REFUSED, ids=lambda value: getattr(value, "kind", None))
def test_a_fault_that_stays_is_said(
    open_bucket: Opener, proxy: FaultyProxy, blob: Blob, tmp_path: Path, fault: Fault, said: str
) -> None:
    store = open_bucket(endpoint=proxy.url, attempts=2, timeout=0.3)
    proxy.order(Fault(**vars(fault) | {"times": 10_000}))
    with pytest.raises(StoreError, match=said) as caught:
        store.get(blob.sha256, blob.bytes)
    assert "\n" not in str(caught.value)
    assert not here(tmp_path / "cache")
    assert isinstance(caught.value, CorruptBlob) == (fault.kind == "corrupt")
    proxy.clear()
    assert len(store.get(blob.sha256, blob.bytes).read_bytes()) == SIZE


def test_a_body_that_breaks_off_is_asked_for_from_there(patient: S3Store, proxy: FaultyProxy, blob: Blob) -> None:
    proxy.order(Fault("truncate", at=500))  # of whichever part is asked for first, and the last has 1,000 bytes
    patient.get(blob.sha256, blob.bytes)
    asked = proxy.bytes_asked(blob.sha256)
    assert len(asked) == 6
    starts = {int(range_.removeprefix("bytes=").partition("-")[0]) for range_ in asked}
    again = starts - set(range(0, SIZE, PART))
    assert len(again) == 1 and (again.pop() - 500) % PART == 0


def test_finished_parts_are_kept_from_one_start_to_the_next(
    open_bucket: Opener, proxy: FaultyProxy, blob: Blob, data: bytes
) -> None:
    last = f"bytes={4 * PART}-{SIZE - 1}"

    class LastFails(FaultyProxy):
        failing = True

        def take(self, method: str, path: str) -> Fault | None:
            return Fault("drop") if self.failing and self.seen[-1].headers.get("Range") == last else None

    with LastFails(proxy.upstream) as failing:
        with pytest.raises(StoreError, match="what came is kept"):
            open_bucket(endpoint=failing.url, attempts=1).get(blob.sha256, blob.bytes)
        failing.clear()
        failing.failing = False
        assert open_bucket(endpoint=failing.url).get(blob.sha256, blob.bytes).read_bytes() == data
        assert failing.bytes_asked(blob.sha256) == [last]


def test_a_wrong_byte_costs_one_more_try_and_is_then_refused(patient: S3Store, proxy: FaultyProxy, blob: Blob) -> None:
    proxy.order(Fault("corrupt", times=10_000))
    with pytest.raises(CorruptBlob):
        patient.get(blob.sha256, blob.bytes)
    assert len(proxy.bytes_asked(blob.sha256)) == 10


@pytest.mark.parametrize("fault", [Fault("drop", at=10, times=2), Fault("corrupt", at=40, times=2), Fault("truncate")])
def test_a_manifest_that_arrives_damaged_is_asked_for_again(store: S3Store, proxy: FaultyProxy, fault: Fault) -> None:
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
def test_an_upload_is_sent_again(
    store: S3Store, proxy: FaultyProxy, fault: Fault, s3: Any, bucket: str, tmp_path: Path
) -> None:
    size = s3_bucket.UPLOAD_PART + 1000
    file = tmp_path / "file"
    file.write_bytes(bytes(size))
    proxy.order(Fault(**vars(fault)))
    digest = store.put(file)
    assert not proxy.pending
    assert s3.get_object(Bucket=bucket, Key=f"blobs/sha256/{digest}")["Body"].read() == bytes(size)


# -- kill -9 ------------------------------------------------------------------------------------------------------

FETCH = """
    import hashlib, sys
    from model.store import open_store, s3
    from model.store.manifest import Blob

    s3.PART = int(sys.argv[2])
    store = open_store(sys.argv[1])
    blobs = [Blob(sha256=name, bytes=int(size)) for name, size in (each.split(":") for each in sys.argv[3:])]
    store.fetch(blobs)
    for blob in blobs:
        path = store.get(blob.sha256, blob.bytes)
        assert hashlib.sha256(path.read_bytes()).hexdigest() == blob.sha256
    store.close()
    print("fetched")
"""


def test_after_kill_9_at_any_moment_the_next_start_succeeds(
    open_bucket: Opener, object_store: ObjectStore, proxy: FaultyProxy, bucket: str, tmp_path: Path
) -> None:
    """The moment is a number of bytes that have come, drawn anew each time; the proxy kills when they have passed."""
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
    assert killed, "every fetch was over before its end came"


def test_a_fetcher_that_is_killed_is_replaced_by_the_one_that_waits(
    open_bucket: Opener, object_store: ObjectStore, proxy: FaultyProxy, blob: Blob, bucket: str, tmp_path: Path
) -> None:
    """The first one's body stalls for good; the second waits for its lock, and goes on when it is killed."""
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


def test_processes_that_start_together_fetch_each_blob_once(
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
    from model.store import open_store
    from tests.store.test_cache import here

    root = Path(sys.argv[1])
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "none", str(root)], check=True)
    store = open_store(os.environ["URL"])
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


def test_a_cache_on_a_full_disk_is_said_and_stays_sound(
    open_bucket: Opener,
    object_store: ObjectStore,
    bucket: str,
    blob: Blob,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = open_bucket(cache_dir=tmp_path / "unused").put_bytes(b"small")
    root = tmp_path / "full"
    variables = {"URL": f"s3://{bucket}", "BLOB": f"{blob.sha256}:{blob.bytes}", "SMALL": small}
    for name, value in (object_store.environment | variables | {"PREHEAT_CACHE_DIR": str(root)}).items():
        monkeypatch.setenv(name, value)
    said, state, size = run_alone(FULL, root, *own_mounts())
    assert said.startswith(f"The cache {root} is full (No space left on device): make room on that disk")
    assert state == "True set()" and int(size) == SIZE
