"""A store in a bucket of a real object store."""

import hashlib
import itertools
import os
import random
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from engine_builder.stores.s3_uploads import UPLOAD_PART_BYTES
from engine_builder.stores.store import open_writable_store
from model.errors import CorruptBlob, ManifestError, ReleaseExists, ReleaseNotFound, StoreError, Unavailable
from model.store.manifest import Blob
from model.store.s3 import S3Store, split_url
from model.store.s3_bucket import fits_etag
from tests.conftest import Opener
from tests.model.store.processes import assert_one_publisher_wins
from tests.support import object_store as ceph
from tests.support import releases
from tests.support.cached_blobs import bytes_read, file_names
from tests.support.faulty_proxy import Fault, FaultyProxy, RecordedRequest
from tests.support.object_store import PAGE_KEYS, ObjectStore


def random_bytes(size: int) -> bytes:
    return random.Random(0).randbytes(size)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# -- blobs and records --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1000, 2 * UPLOAD_PART_BYTES + 1])
def test_put_then_get(open_bucket: Opener, tmp_path: Path, size: int) -> None:
    part_bytes = 5 * 2**20  # several ranges, the last one short
    store, data = open_bucket("a/prefix", part_bytes=part_bytes), random_bytes(size)
    file = tmp_path / "file"
    file.write_bytes(data)
    digest = store.put(file)
    assert digest == store.put_bytes(memoryview(data)) == sha256(data) and store.has(digest)
    assert list(store.blobs())[0][:2] == (digest, size)
    path = store.get(digest, size)
    assert path == tmp_path / "cache" / "blobs" / "sha256" / digest and path.read_bytes() == data
    buffer = bytearray(size)
    open_bucket("a/prefix", part_bytes=part_bytes, cache_dir=tmp_path / "other").read(digest, memoryview(buffer))
    assert buffer == data
    store.check(digest, size)
    assert open_writable_store(tmp_path / "cache").get(digest, size).read_bytes() == data, "the layout of a folder"


class KeepingSink:
    """A sink that keeps all bytes, through a buffer of an odd size."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.starts = 0
        """Number of times that the blob was received from its first byte on."""
        self._buffer = memoryview(bytearray(100_003))

    def buffer(self, at: int) -> memoryview:
        return self._buffer

    def filled(self, at: int, data: memoryview) -> None:
        self.starts += at == 0
        self.data[at : at + len(data)] = data


@pytest.mark.parametrize("into", ["sink", "buffer"])
def test_caches_and_hashes_in_one_pass(
    into: str, open_bucket: Opener, proxy: FaultyProxy, s3: Any, bucket: str, tmp_path: Path
) -> None:
    """The calling thread reads the bytes of the cached file once, while other threads fetch them.

    A buffer is used for a plan with weights, which has gigabytes: a second pass would take seconds of each start.
    """
    data = random_bytes(1_200_000)
    digest = sha256(data)
    s3.put_object(Bucket=bucket, Key=f"blobs/sha256/{digest}", Body=data)
    for requests in (5, 0):  # from the bucket, then from the cache
        proxy.clear()
        store = open_bucket(endpoint=proxy.url, part_bytes=256 * 2**10)
        sink, buffer = KeepingSink(len(data)), bytearray(len(data))
        before = bytes_read()
        if into == "sink":
            store.stream(digest, len(data), sink)
        else:
            store.read(digest, memoryview(buffer))
        assert len(data) <= bytes_read() - before < 1.5 * len(data)
        assert (sink.data if into == "sink" else buffer) == data
        assert sink.starts == (into == "sink")
        assert len(proxy.requested_ranges(digest)) == requests
    assert (tmp_path / "cache" / "blobs" / "sha256" / digest).read_bytes() == data


def test_read_fetches_damaged_copies_again(open_bucket: Opener, proxy: FaultyProxy) -> None:
    """The cached copy is damaged, and so is the first copy that the bucket sends."""
    data = random_bytes(2_500_000)
    digest = open_bucket().put_bytes(data)
    cached = open_bucket().get(digest, len(data))
    cached.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    proxy.inject(Fault("corrupt", at=2_000_000))
    buffer = bytearray(len(data))
    open_bucket(endpoint=proxy.url).read(digest, memoryview(buffer))
    assert buffer == data and cached.read_bytes() == data and not proxy.pending


def test_read_hashes_a_blob_that_was_verified_before(open_bucket: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code reads these bytes, so a change of the file that its times do not show must be found."""
    monkeypatch.setattr("model.store.local.fingerprint", lambda digest, status: (digest, 0, 0, 0, 0, 0))
    monkeypatch.setattr("model.store.blob_cache.fingerprint", lambda digest, status: (digest, 0, 0, 0, 0, 0))
    store = open_bucket()
    digest = store.put_bytes(b"verified")
    store.get(digest, 8).write_bytes(b"replaced")
    assert store.get(digest, 8).read_bytes() == b"replaced", "the fingerprint shows no change"
    buffer = bytearray(8)
    store.read(digest, memoryview(buffer))
    assert buffer == b"verified"


def test_fetches_blobs_in_parallel(open_bucket: Opener, proxy: FaultyProxy, tmp_path: Path) -> None:
    """Each response waits for the requests of all three blobs, so sequential requests would time out."""
    store = open_bucket()
    blobs = [Blob(sha256=store.put_bytes(bytes([i]) * 10), bytes=10) for i in range(3)]
    requested: set[str] = set()
    all_requested = threading.Event()

    def wait_for_others(request: RecordedRequest) -> None:
        requested.add(request.path)
        if len(requested) == len(blobs):
            all_requested.set()
        all_requested.wait(60)

    proxy.on_request = wait_for_others
    open_bucket(endpoint=proxy.url, cache_dir=tmp_path / "other", attempts=1).fetch(blobs)
    assert file_names(tmp_path / "other") == {blob.sha256 for blob in blobs}


def test_a_fetch_can_be_stopped(open_bucket: Opener, tmp_path: Path) -> None:
    """It keeps the parts that have arrived."""
    store = open_bucket()
    data = bytes(3 * 2**20)
    blob = Blob(sha256=store.put_bytes(data), bytes=len(data))
    other = open_bucket(cache_dir=tmp_path / "other")
    asked = itertools.count()
    with pytest.raises(Unavailable, match="stopped"):
        other.fetch([blob], lambda: next(asked) == 2)
    assert not file_names(tmp_path / "other")
    other.fetch([blob])
    assert file_names(tmp_path / "other") == {blob.sha256}


def test_missing_blob_is_named(open_bucket: Opener) -> None:
    store = open_bucket()
    digest = sha256(b"never put")
    assert not store.has(digest)
    blob = Blob(sha256=digest, bytes=9)
    for request in (lambda: store.get(digest, 9), lambda: store.check(digest, 9), lambda: store.fetch([blob])):
        with pytest.raises(CorruptBlob, match=rf"Blob {digest[:12]} is missing from s3://.*preheat publish"):
            request()
    with pytest.raises(ManifestError, match="not a SHA-256"):
        store.get("../../etc/passwd", 9)


def test_refuses_damage_in_the_bucket(open_bucket: Opener, s3: Any, bucket: str, tmp_path: Path) -> None:
    """`check` ignores the cache, which has the correct bytes until they are deleted."""
    store = open_bucket()
    digest = store.put_bytes(b"bytes")
    cached = store.get(digest, 5)
    s3.put_object(Bucket=bucket, Key=f"blobs/sha256/{digest}", Body=b"other")
    with pytest.raises(CorruptBlob, match="changed"):
        store.check(digest, 5)
    cached.unlink()
    for found, words in ((b"byteS", "its bytes have changed"), (b"byt", "has 3 bytes"), (b"bytes more", "10 bytes")):
        s3.put_object(Bucket=bucket, Key=f"blobs/sha256/{digest}", Body=found)
        for request in (store.get, store.check, lambda digest, size: store.read(digest, memoryview(bytearray(size)))):
            with pytest.raises(CorruptBlob, match=words):
                request(digest, 5)
    assert not file_names(tmp_path / "cache") and not file_names(tmp_path / "cache", "partial")


def test_lists_releases_of_several_pages(open_bucket: Opener, s3: Any, bucket: str) -> None:
    names = [f"toy/{i}" for i in range(2 * PAGE_KEYS)]
    for name in names:
        s3.put_object(Bucket=bucket, Key=f"releases/{name}.json", Body=b"")
    for other in ("releases/README.json", "releases/a/b/c.json", "releases/toy/x.txt", "releases/toy/.json"):
        s3.put_object(Bucket=bucket, Key=other, Body=b"")
    assert s3.list_objects_v2(Bucket=bucket, MaxKeys=1000)["KeyCount"] == PAGE_KEYS
    assert open_bucket().releases() == sorted(names)


# -- releases -----------------------------------------------------------------------------------------------------


def test_missing_release_lists_available_ones(open_bucket: Opener) -> None:
    store = open_bucket()
    store.write_release(releases.draft_release(store))
    with pytest.raises(ReleaseNotFound, match=r"Release toy/2 was not found in s3://\S+\. Available: toy/1\."):
        store.read_release("toy/2")


def test_publisher_with_lost_answer_wins(open_bucket: Opener, proxy: FaultyProxy) -> None:
    """botocore repeats the request, which then finds the name taken by itself."""
    store = open_bucket(endpoint=proxy.url)
    manifest = releases.draft_release(store)
    proxy.inject(Fault("drop_answer", method="PUT", path="/releases/"))
    store.write_release(manifest)
    puts = [request for request in proxy.requests if request.method == "PUT" and "/releases/" in request.path]
    assert not proxy.pending and len(puts) == 2
    with pytest.raises(ReleaseExists):
        store.write_release(manifest)


def test_exactly_one_racing_publisher_wins(
    open_bucket: Opener, object_store: ObjectStore, bucket: str, tmp_path: Path
) -> None:
    environment = object_store.environment | {"PREHEAT_CACHE_DIR": str(tmp_path / "publishers")}
    assert_one_publisher_wins(open_bucket(), f"s3://{bucket}", tmp_path / "draft.json", environment)


# -- requests and URLs --------------------------------------------------------------------------------------------


def test_failed_upload_leaves_nothing(open_bucket: Opener, s3: Any, bucket: str, proxy: FaultyProxy) -> None:
    store = open_bucket(endpoint=proxy.url, attempts=2)
    proxy.inject(Fault("status", times=99, status=500, code="InternalError", method="PUT", path="partNumber=2"))
    with pytest.raises(StoreError, match=r"fails, also after several tries \(500 InternalError\)"):
        store.put_bytes(random_bytes(2 * UPLOAD_PART_BYTES))
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0
    assert not s3.list_multipart_uploads(Bucket=bucket).get("Uploads")


def test_splits_url() -> None:
    assert split_url("s3://bucket") == split_url("s3://bucket/") == ("bucket", "")
    assert split_url("s3://my.bucket-1/a/b/") == ("my.bucket-1", "a/b")
    for url in ("s3://", "s3:///x", "s3://UPPER", "s3://b", "s3://bucket?x", "s3://bucket/a/../b", "s3://bucket/a//b"):
        with pytest.raises(StoreError, match="is not the URL of a bucket. Give s3://bucket"):
            split_url(url)


def test_etag_is_md5_unless_encrypted_with_own_keys() -> None:
    other = {"ETag": '"00000000000000000000000000000000"'}
    assert fits_etag(b"hello", {"ETag": '"5d41402abc4b2a76b9719d911017c592"'})
    assert not fits_etag(b"hello", other) and not fits_etag(b"hello", other | {"ServerSideEncryption": "AES256"})
    assert fits_etag(b"hello", other | {"ServerSideEncryption": "aws:kms"})
    assert fits_etag(b"hello", other | {"SSECustomerAlgorithm": "AES256"})
    assert fits_etag(b"hello", {"ETag": '"00000000000000000000000000000000-2"'})


def refusal(store: S3Store) -> str:
    """Return the error of reading a release, which must fail."""
    with pytest.raises(StoreError) as caught:
        store.read_release("toy/1")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_reports_wrong_credentials(open_bucket: Opener) -> None:
    assert "does not accept the credentials" in refusal(open_bucket(secret_access_key="wrong"))
    assert "(InvalidAccessKeyId). Set AWS_ACCESS_KEY_ID" in refusal(open_bucket(access_key_id="unknown"))


def test_reports_missing_credentials(open_bucket: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name in ("AWS_EC2_METADATA_DISABLED", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, ceph.credentials()[name])
    message = refusal(open_bucket(access_key_id=None, secret_access_key=None))
    assert message.startswith("No credentials were found for s3://") and "aws_access_key_id" in message
    message = refusal(open_bucket(access_key_id=None, secret_access_key=None, profile="unknown"))
    assert message.startswith("No profile was found for s3://")


def test_reports_missing_bucket(open_bucket: Opener) -> None:
    store = open_bucket(name="preheat-no-such-bucket")
    assert refusal(store).startswith("The bucket of s3://preheat-no-such-bucket does not exist at http://127.0.0.1:")
    for request in (store.releases, lambda: store.has(sha256(b"")), lambda: store.put_bytes(b"x")):
        with pytest.raises(StoreError, match="The bucket of .* does not exist"):
            request()


def test_reports_wrong_endpoint(open_bucket: Opener) -> None:
    message = refusal(open_bucket(endpoint="http://127.0.0.1:1", attempts=1))
    assert "at http://127.0.0.1:1 cannot be reached (EndpointConnectionError). Check the endpoint" in message
    for wrong in ("127.0.0.1:1", "http://"):
        assert "is not a valid endpoint. Give a URL" in refusal(open_bucket(endpoint=wrong))


def test_reports_wrong_clock(open_bucket: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    import botocore.auth

    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_: datetime(2020, 1, 1, tzinfo=UTC))
    assert "refuses this machine's clock (RequestTimeTooSkewed). Set the clock" in refusal(open_bucket())


@pytest.mark.parametrize(
    "status, code, words",
    [
        (503, "SlowDown", "is too busy, also after several tries (SlowDown)"),
        (500, "InternalError", "fails, also after several tries (500 InternalError)"),
        (403, "AccessDenied", "Release toy/1 cannot be accessed in s3://"),
        (400, "ExpiredToken", "have expired (ExpiredToken). Get new ones"),
        (400, "AuthorizationHeaderMalformed", "is in another region"),
        (501, "NotImplemented", "Use a service with conditional PutObject"),
        (418, "Teapot", "Release toy/1 was refused by s3://"),
    ],
)
def test_reports_service_error(open_bucket: Opener, proxy: FaultyProxy, status: int, code: str, words: str) -> None:
    proxy.inject(Fault("status", times=99, status=status, code=code))
    assert words in refusal(open_bucket(endpoint=proxy.url, attempts=2))
