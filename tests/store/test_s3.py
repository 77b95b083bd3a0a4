"""A store in a bucket of a real object store: it keeps what it is given, and says in a sentence what is wrong."""

import hashlib
import http.client
import os
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from engine_builder.releases.gc import BadAge, delete_garbage, find_garbage, read_age
from engine_builder.releases.mirror import copy_release
from model.errors import CorruptBlob, ManifestError, ReleaseExists, ReleaseNotFound, StoreError
from model.store import s3 as s3_module
from model.store import s3_bucket
from model.store.manifest import Blob
from model.store.s3 import S3Store, split_url
from model.store.store import (
    Store,
    StoreOptions,
    open_store,
)
from tests.conftest import Opener
from tests.stand_ins import object_store as ceph
from tests.stand_ins import releases
from tests.stand_ins.faulty_proxy import Fault, FaultyProxy
from tests.stand_ins.object_store import ObjectStore

REPOSITORY = Path(__file__).resolve().parents[2]


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def keys(s3: Any, bucket: str) -> list[str]:
    return [entry["Key"] for entry in s3.list_objects_v2(Bucket=bucket).get("Contents", [])]


# -- what every store promises ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 1000, s3_bucket.UPLOAD_PART, 2 * s3_bucket.UPLOAD_PART + 1])
def test_a_blob_comes_back(open_bucket: Opener, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_module, "PART", 5 * 2**20)  # several ranges, the last one short
    store, data = open_bucket("a/prefix"), noise(size)
    file = tmp_path / "file"
    file.write_bytes(data)
    digest = store.put(file)
    assert digest == sha256(data) and store.has(digest)
    assert list(store.blobs())[0][:2] == (digest, size)
    path = store.get(digest, size)
    assert path == tmp_path / "cache" / "blobs" / "sha256" / digest and path.read_bytes() == data
    buffer = bytearray(size)
    open_bucket("a/prefix", cache_dir=tmp_path / "other").read(digest, memoryview(buffer))
    assert buffer == data
    store.check(digest, size)


def test_bytes_are_put_as_files_are(open_bucket: Opener, s3: Any, bucket: str) -> None:
    store = open_bucket("p")
    large = noise(s3_bucket.UPLOAD_PART + 5)
    for data in (b"", b"small", large):
        assert store.put_bytes(data) == store.put_bytes(data) == sha256(data)
        assert s3.get_object(Bucket=bucket, Key=f"p/blobs/sha256/{sha256(data)}")["Body"].read() == data


def test_the_cache_is_the_layout_of_a_local_store(open_bucket: Opener, tmp_path: Path) -> None:
    store = open_bucket()
    digest = store.put_bytes(b"bytes")
    store.get(digest, 5)
    assert open_store(tmp_path / "cache").get(digest, 5).read_bytes() == b"bytes"


def test_a_cached_blob_is_not_asked_for_again(open_bucket: Opener, proxy: FaultyProxy) -> None:
    store = open_bucket(endpoint=proxy.url)
    digest = store.put_bytes(b"bytes")
    store.get(digest, 5)
    proxy.clear()
    assert open_bucket(endpoint=proxy.url).get(digest, 5).read_bytes() == b"bytes" and not proxy.seen


class Taking:
    """A sink that keeps what it is given, through a buffer of an odd size."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.begun = 0
        self._buffer = memoryview(bytearray(100_003))

    def buffer(self) -> memoryview:
        return self._buffer

    def filled(self, at: int, data: memoryview) -> None:
        self.begun += at == 0
        self.data[at : at + len(data)] = data


def test_a_blob_is_streamed_and_cached_at_once(
    open_bucket: Opener, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_module, "PART", 256 * 2**10)
    data = random.Random(5).randbytes(1_200_000)
    digest = open_bucket(cache_dir=tmp_path / "unused").put_bytes(data)
    hashed = 0
    sha256 = hashlib.sha256

    class Counting:
        def __init__(self) -> None:
            self._inner = sha256()

        def update(self, piece: memoryview) -> None:
            nonlocal hashed
            hashed += len(piece)
            self._inner.update(piece)

        def hexdigest(self) -> str:
            return self._inner.hexdigest()

    monkeypatch.setattr(hashlib, "sha256", lambda *data: sha256(*data) if data else Counting())
    for asked in (5, 0):  # from the bucket, and then from the cache
        proxy.clear()
        proxy.seen.clear()
        sink, hashed = Taking(len(data)), 0
        open_bucket(endpoint=proxy.url).stream(digest, len(data), sink)
        assert sink.data == data and sink.begun == 1 and hashed == len(data)
        assert len(proxy.bytes_asked(digest)) == asked
    cached = tmp_path / "cache" / "blobs" / "sha256" / digest
    assert cached.read_bytes() == data

    cached.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    sink = Taking(len(data))
    open_bucket(endpoint=proxy.url).stream(digest, len(data), sink)
    assert sink.data == data and sink.begun == 2, "a damaged copy is fetched again"
    assert cached.read_bytes() == data


def test_a_damaged_blob_is_streamed_again_and_then_refused(
    open_bucket: Opener, s3: Any, bucket: str, tmp_path: Path
) -> None:
    data = random.Random(6).randbytes(300_000)
    store = open_bucket()
    digest = store.put_bytes(data)
    s3.put_object(Bucket=bucket, Key=f"blobs/sha256/{digest}", Body=data[:-1] + bytes([data[-1] ^ 1]))
    sink = Taking(len(data))
    with pytest.raises(CorruptBlob, match="its bytes have changed"):
        store.stream(digest, len(data), sink)
    assert sink.begun == 2
    for folder in ("blobs/sha256", "partial"):
        assert not list((tmp_path / "cache" / folder).iterdir())


def test_blobs_are_fetched_side_by_side(open_bucket: Opener, proxy: FaultyProxy, tmp_path: Path) -> None:
    """Each answer waits until three are asked for, so one after the other would never end."""
    store = open_bucket()
    blobs = [Blob(sha256=store.put_bytes(bytes([i]) * 10), bytes=10) for i in range(3)]
    together = threading.Barrier(3)

    class Meeting(FaultyProxy):
        def take(self, method: str, path: str) -> Fault | None:
            together.wait(timeout=60)
            return None

    with Meeting(proxy.upstream) as meeting:
        other = open_bucket(endpoint=meeting.url, cache_dir=tmp_path / "other")
        other.fetch(blobs)
    assert all((tmp_path / "other" / "blobs" / "sha256" / blob.sha256).exists() for blob in blobs)


def test_a_missing_blob_is_named(open_bucket: Opener) -> None:
    store = open_bucket()
    digest = sha256(b"never put")
    assert not store.has(digest)
    blob = Blob(sha256=digest, bytes=9)
    for ask in (lambda: store.get(digest, 9), lambda: store.check(digest, 9), lambda: store.fetch([blob])):
        with pytest.raises(CorruptBlob, match=rf"Blob {digest[:12]} is missing from s3://.*preheat publish"):
            ask()
    with pytest.raises(ManifestError, match="no SHA-256"):
        store.get("../../etc/passwd", 9)


@pytest.mark.parametrize(
    "found, said", [(b"byteS", "its bytes have changed"), (b"byt", "has 3 bytes"), (b"bytes more", "has 10 bytes")]
)
def test_a_blob_that_is_damaged_in_the_bucket_is_refused(
    open_bucket: Opener, s3: Any, bucket: str, tmp_path: Path, found: bytes, said: str
) -> None:
    store = open_bucket()
    digest = store.put_bytes(b"bytes")
    s3.put_object(Bucket=bucket, Key=f"blobs/sha256/{digest}", Body=found)
    with pytest.raises(CorruptBlob, match=said):
        store.get(digest, 5)
    with pytest.raises(CorruptBlob, match=said):
        store.check(digest, 5)
    with pytest.raises(CorruptBlob, match=said):
        store.read(digest, memoryview(bytearray(5)))
    assert not [
        path for name in ("blobs", "partial") for path in (tmp_path / "cache" / name).rglob("*") if path.is_file()
    ]


def test_damage_in_the_bucket_is_found_though_the_cache_has_the_blob(open_bucket: Opener, s3: Any, bucket: str) -> None:
    store = open_bucket()
    digest = store.put_bytes(b"bytes")
    store.get(digest, 5)
    s3.put_object(Bucket=bucket, Key=f"blobs/sha256/{digest}", Body=b"other")
    with pytest.raises(CorruptBlob, match="changed"):
        store.check(digest, 5)


def test_a_damaged_blob_in_the_cache_is_fetched_again(open_bucket: Opener, tmp_path: Path) -> None:
    digest = open_bucket().put_bytes(b"bytes")
    path = open_bucket().get(digest, 5)
    path.write_bytes(b"other")
    assert open_bucket().get(digest, 5).read_bytes() == b"bytes"


def test_records_are_kept_rewritten_and_listed(open_bucket: Opener) -> None:
    store = open_bucket("pre")
    assert store.read_record("drafts", "x") is None and store.records("drafts") == []
    store.write_record("drafts", "x", b"one")
    store.write_record("drafts", "x", b"two")
    store.write_record("engines", "y", b"")
    assert store.read_record("drafts", "x") == b"two" and store.read_record("engines", "y") == b""
    assert store.records("drafts") == ["x"] and store.records("engines") == ["y"]
    with pytest.raises(StoreError, match="no name for a record"):
        store.write_record("drafts", "../x", b"")


def test_two_prefixes_of_a_bucket_are_two_stores(open_bucket: Opener) -> None:
    one, other = open_bucket("a"), open_bucket("a/b")
    digest = one.put_bytes(b"bytes")
    one.write_release(releases.draft(one))
    assert not other.has(digest) and other.releases() == [] and one.releases() == [releases.NAME]


def test_more_releases_than_a_page_are_all_listed(
    open_bucket: Opener, s3: Any, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_bucket, "LIST_PAGE", 3)
    names = [f"toy/{i}" for i in range(8)]
    for name in names:
        s3.put_object(Bucket=bucket, Key=f"releases/{name}.json", Body=b"")
    for stranger in ("releases/README.json", "releases/a/b/c.json", "releases/toy/x.txt", "releases/toy/.json"):
        s3.put_object(Bucket=bucket, Key=stranger, Body=b"")
    assert open_bucket().releases() == sorted(names)


# -- releases -----------------------------------------------------------------------------------------------------


def test_a_release_is_written_once(open_bucket: Opener) -> None:
    store = open_bucket()
    manifest = releases.draft(store)
    store.write_release(manifest)
    assert open_bucket().read_release(releases.NAME) == manifest
    with pytest.raises(ReleaseExists, match="toy/1 is published already"):
        open_bucket().write_release(manifest)
    with pytest.raises(ReleaseNotFound, match=r"No release toy/2 in s3://\S+ \(releases there: toy/1\)"):
        store.read_release("toy/2")


def test_a_release_of_which_a_blob_is_missing_or_short_is_not_published(
    open_bucket: Opener, s3: Any, bucket: str
) -> None:
    store = open_bucket()
    manifest = releases.draft(store)
    digest = manifest.weights[2].blobs[0].sha256
    key = f"blobs/sha256/{digest}"
    s3.put_object(Bucket=bucket, Key=key, Body=b"short")
    with pytest.raises(CorruptBlob, match="has 5 bytes instead of"):
        store.write_release(manifest)
    s3.delete_object(Bucket=bucket, Key=key)
    with pytest.raises(CorruptBlob, match=f"Blob {digest[:12]} is missing"):
        store.write_release(manifest)
    assert store.releases() == []


def test_a_publisher_whose_answer_was_lost_has_won(open_bucket: Opener, proxy: FaultyProxy) -> None:
    """The request is sent again, and then finds the name taken: by itself."""
    store = open_bucket(endpoint=proxy.url)
    manifest = releases.draft(store)
    proxy.order(Fault("drop_answer", method="PUT", path="/releases/"))
    store.write_release(manifest)
    assert not proxy.pending and sum(seen.method == "PUT" and "/releases/" in seen.path for seen in proxy.seen) == 2
    with pytest.raises(ReleaseExists):
        store.write_release(manifest)


PUBLISH = """
    import sys
    from pathlib import Path
    from model.errors import ReleaseExists
    from model.store import open_store
    from model.store.manifest import Manifest

    url, draft, versions, me = sys.argv[1:]
    store = open_store(url)
    manifest = Manifest.model_validate_json(Path(draft).read_bytes())
    store.releases()
    print("ready", flush=True)
    sys.stdin.readline()
    for version in versions.split():
        try:
            store.write_release(manifest.model_copy(update={"version": version, "created": me}))
            print(version)
        except ReleaseExists:
            pass
"""


def python(script: str, *arguments: object, environment: Mapping[str, str]) -> "subprocess.Popen[str]":
    """Run a script in this repository, with nothing of this machine's own credentials."""
    return subprocess.Popen(
        [sys.executable, "-W", "error::ResourceWarning", "-c", textwrap.dedent(script), *map(str, arguments)],
        cwd=REPOSITORY,
        env={**{k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "PREHEAT_"))}, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def test_of_racing_publishers_exactly_one_wins(
    open_bucket: Opener, object_store: ObjectStore, bucket: str, tmp_path: Path
) -> None:
    store = open_bucket()
    draft = tmp_path / "draft.json"
    draft.write_bytes(releases.draft(store).to_json())
    versions = " ".join(map(str, range(12)))
    environment = object_store.environment | {"PREHEAT_CACHE_DIR": str(tmp_path / "publishers")}
    publishers = {me: python(PUBLISH, f"s3://{bucket}", draft, versions, me, environment=environment) for me in "abc"}
    for publisher in publishers.values():
        assert publisher.stdout is not None and publisher.stdout.readline() == "ready\n", publisher.communicate()[1]
    for publisher in publishers.values():
        assert publisher.stdin is not None
        publisher.stdin.write("go\n")
        publisher.stdin.flush()
    won = {me: finish(publisher).split() for me, publisher in publishers.items()}
    assert sorted(version for mine in won.values() for version in mine) == sorted(versions.split())
    for me, mine in won.items():
        for version in mine:
            assert store.read_release(f"toy/{version}").created == me


def test_a_release_is_copied_from_a_folder_to_a_bucket_and_back(open_bucket: Opener, tmp_path: Path) -> None:
    folder, there, back = open_store(tmp_path / "folder"), open_bucket(), open_store(tmp_path / "back")
    manifest = releases.draft(folder)
    folder.write_release(manifest)
    assert copy_release(folder, there, "toy/1") == (manifest, True)
    assert copy_release(there, back, "toy/1") == (manifest, True)
    assert copy_release(folder, there, "toy/1") == (manifest, False)
    for digest, blob in manifest.blobs().items():
        assert back.get(digest, blob.bytes).read_bytes() == folder.get(digest, blob.bytes).read_bytes()
    other = open_store(tmp_path / "other")
    other.write_release(releases.draft(other).model_copy(update={"created": "2027-01-01T00:00:00+00:00"}))
    with pytest.raises(ReleaseExists, match="has another release toy/1"):
        copy_release(other, there, "toy/1")


def test_a_damaged_blob_is_not_copied(open_bucket: Opener, tmp_path: Path) -> None:
    folder, there = open_store(tmp_path / "folder"), open_bucket()
    manifest = releases.draft(folder)
    folder.write_release(manifest)
    path = folder.get(manifest.weights[0].blobs[0].sha256, manifest.weights[0].blobs[0].bytes)
    path.write_bytes(bytes(len(path.read_bytes())))
    with pytest.raises(CorruptBlob):
        copy_release(folder, there, "toy/1")
    assert there.releases() == []


# -- gc -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["folder", "bucket"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store of either kind; only the one in a bucket needs the object store."""
    if request.param == "folder":
        return open_store(tmp_path / "folder")
    return request.getfixturevalue("open_bucket")("gc")


def test_gc_deletes_what_nothing_names_and_nothing_else(any_store: Store) -> None:
    manifest = releases.draft(any_store)
    any_store.write_release(manifest)
    named = set(manifest.blobs())
    drafted, noted, lost = (any_store.put_bytes(data) for data in (b"drafted", b"noted", b"lost"))
    draft = manifest.model_copy(update={"model": "other"}).to_json()
    spare = manifest.tokenizers["tokenizer"].blob.sha256
    any_store.write_record("drafts", "other", draft.replace(spare.encode(), drafted.encode()))
    any_store.write_record("engines", "key", f'{{"blob": {{"sha256": "{noted}"}}, "a newer": "field"}}'.encode())
    young = find_garbage(any_store, 3600)
    assert (young.blobs, young.young, young.kept) == ({}, 1, len(named) + 2)
    assert delete_garbage(any_store, young) == 0 and any_store.has(lost)
    old = find_garbage(any_store, 3600, now=datetime.now(UTC).timestamp() + 3601)
    assert old.blobs == {lost: 4} and any_store.has(lost)
    assert delete_garbage(any_store, old) == 4
    assert {digest for digest, _, _ in any_store.blobs()} == named | {drafted, noted}


def test_gc_keeps_what_was_put_or_named_since_it_looked(any_store: Store) -> None:
    drafted, put = any_store.put_bytes(b"drafted"), any_store.put_bytes(b"put")
    now = datetime.now(UTC).timestamp()
    garbage = find_garbage(any_store, 0, now=now + 60)
    assert set(garbage.blobs) == {drafted, put}
    any_store.write_record("drafts", "x", f'"{drafted}"'.encode())
    since = replace(garbage, limit=now - 60)  # as if both had been there for long, and put again
    assert delete_garbage(any_store, since) == 0
    assert any_store.has(drafted) and any_store.has(put)
    assert delete_garbage(any_store, garbage) == len(b"put")
    assert any_store.has(drafted) and not any_store.has(put)


def test_gc_deletes_nothing_where_a_manifest_cannot_be_read(any_store: Store, tmp_path: Path) -> None:
    lost = any_store.put_bytes(b"lost")
    manifest = releases.draft(any_store)
    any_store.write_release(manifest)
    newer = manifest.to_json().replace(b'"schema_version": 1', b'"schema_version": 2')
    if isinstance(any_store, S3Store):
        any_store._bucket.client.put_object(Bucket=any_store.bucket, Key="gc/releases/toy/1.json", Body=newer)
    else:
        (tmp_path / "folder" / "releases" / "toy" / "1.json").write_bytes(newer)
    with pytest.raises(ManifestError, match="schema"):
        find_garbage(any_store, 0, now=datetime.now(UTC).timestamp() + 60)
    assert any_store.has(lost)


def test_a_blob_that_a_build_finds_looks_new_to_gc(any_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it had lain there for two hours: the clock runs ahead instead of the blob's being old."""
    digest = any_store.put_bytes(b"bytes")
    before = next(put for _, _, put in any_store.blobs())
    monkeypatch.setattr("model.store.local.REFRESH_AGE", -1)
    monkeypatch.setattr("model.store.s3.REFRESH_AGE", -1)
    assert any_store.put_bytes(b"bytes") == digest
    assert next(put for _, _, put in any_store.blobs()) > before
    any_store.check(digest, 5)


def test_gc_clears_away_uploads_whose_writer_died(open_bucket: Opener, s3: Any, bucket: str) -> None:
    store = open_bucket("gc")
    digest = sha256(b"x")
    for key in (f"gc/blobs/sha256/{digest}", f"other/blobs/sha256/{digest}"):
        s3.create_multipart_upload(Bucket=bucket, Key=key)
    now = datetime.now(UTC).timestamp()
    delete_garbage(store, find_garbage(store, 3600))
    assert len(s3.list_multipart_uploads(Bucket=bucket)["Uploads"]) == 2, "one may be going on"
    assert store.delete_unfinished(now + 60) == 1
    assert [u["Key"] for u in s3.list_multipart_uploads(Bucket=bucket)["Uploads"]] == [f"other/blobs/sha256/{digest}"]


def test_a_failed_upload_leaves_nothing(open_bucket: Opener, s3: Any, bucket: str, proxy: FaultyProxy) -> None:
    store = open_bucket(endpoint=proxy.url, attempts=2)
    proxy.order(Fault("status", times=99, status=500, code="InternalError", method="PUT", path="partNumber=2"))
    with pytest.raises(StoreError, match=r"fails, also after several tries \(500 InternalError\)"):
        store.put_bytes(noise(2 * s3_bucket.UPLOAD_PART))
    assert keys(s3, bucket) == [] and not s3.list_multipart_uploads(Bucket=bucket).get("Uploads")


# -- sentences ----------------------------------------------------------------------------------------------------


def say(store: S3Store) -> str:
    with pytest.raises(StoreError) as caught:
        store.read_release("toy/1")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_wrong_credentials_are_said(open_bucket: Opener) -> None:
    assert "does not accept the credentials" in say(open_bucket(secret_access_key="wrong"))
    assert "(InvalidAccessKeyId): set AWS_ACCESS_KEY_ID" in say(open_bucket(access_key_id="nobody"))


def test_no_credentials_are_said(open_bucket: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name in ("AWS_EC2_METADATA_DISABLED", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, ceph.credentials()[name])
    said = say(open_bucket(access_key_id=None, secret_access_key=None))
    assert said.startswith("There are no credentials for s3://") and "aws_access_key_id" in said
    said = say(open_bucket(access_key_id=None, secret_access_key=None, profile="nobody"))
    assert said.startswith("There is no profile for s3://")


def test_a_missing_bucket_is_said(open_bucket: Opener) -> None:
    store = open_bucket(name="preheat-no-such-bucket")
    assert say(store).startswith("There is no bucket for s3://preheat-no-such-bucket at http://127.0.0.1:")
    for ask in (store.releases, lambda: store.has(sha256(b"")), lambda: store.put_bytes(b"x")):
        with pytest.raises(StoreError, match="There is no bucket"):
            ask()


def test_an_endpoint_that_is_not_there_is_said(open_bucket: Opener) -> None:
    said = say(open_bucket(endpoint="http://127.0.0.1:1", attempts=1))
    assert "at http://127.0.0.1:1 cannot be reached (EndpointConnectionError): check the endpoint" in said
    for wrong in ("127.0.0.1:1", "http://"):
        assert "is no endpoint: give a URL" in say(open_bucket(endpoint=wrong))


def test_a_clock_that_is_wrong_is_said(open_bucket: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    import botocore.auth

    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_: datetime(2020, 1, 1, tzinfo=UTC))
    assert "refuses this machine's clock (RequestTimeTooSkewed): set the clock" in say(open_bucket())


@pytest.mark.parametrize(
    "status, code, said",
    [
        (503, "SlowDown", "is too busy, also after several tries (SlowDown)"),
        (500, "InternalError", "fails, also after several tries (500 InternalError)"),
        (403, "AccessDenied", "Release toy/1 may not be touched in s3://"),
        (400, "ExpiredToken", "have expired (ExpiredToken): get new ones"),
        (400, "AuthorizationHeaderMalformed", "lies in another region"),
        (501, "NotImplemented", "use a service with conditional PutObject"),
        (418, "Teapot", "Release toy/1 was refused by s3://"),
    ],
)
def test_what_a_service_answers_is_said(
    open_bucket: Opener, proxy: FaultyProxy, status: int, code: str, said: str
) -> None:
    proxy.order(Fault("status", times=99, status=status, code=code))
    assert said in say(open_bucket(endpoint=proxy.url, attempts=2))


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///x", "s3://UPPER", "s3://b", "s3://bucket?x", "s3://bucket/a/../b", "s3://bucket/a//b"]
)
def test_a_url_that_names_no_bucket_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match="is no store in a bucket: give s3://bucket"):
        split_url(url)


def test_a_url_s_parts() -> None:
    assert split_url("s3://bucket") == split_url("s3://bucket/") == ("bucket", "")
    assert split_url("s3://my.bucket-1/a/b/") == ("my.bucket-1", "a/b")


# -- settings -----------------------------------------------------------------------------------------------------


class SecretNotFound(Exception):
    """As the server's."""


class Secrets(Mapping[str, str]):
    """As Truss's: a missing one raises a class of its own, and the whole cannot be listed."""

    def __init__(self, **secrets: str) -> None:
        self._secrets = secrets

    def __getitem__(self, key: str) -> str:
        if not self._secrets.get(key):
            raise SecretNotFound(key)
        return self._secrets[key]

    def __iter__(self) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        return 2


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that says nothing."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "PREHEAT_", "XDG_")):
            monkeypatch.delenv(name)


def test_credentials_come_from_the_secrets_unless_the_environment_has_some(
    bare: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = Secrets(aws_access_key_id="id\n", aws_secret_access_key="key\n")
    options = StoreOptions.from_deployment({"profile": "p"}, secrets)
    assert (options.access_key_id, options.secret_access_key, options.session_token) == ("id", "key", None)
    assert options.profile is None
    for lacking in (None, {}, Secrets(aws_access_key_id="id"), Secrets()):
        options = StoreOptions.from_deployment({"profile": "p"}, lacking)
        assert (options.access_key_id, options.secret_access_key, options.profile) == (None, None, "p")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    assert StoreOptions.from_deployment({}, secrets).access_key_id is None


def test_a_secret_that_fails_otherwise_is_not_taken_for_a_missing_one(bare: None) -> None:
    class Broken(Secrets):
        def __getitem__(self, key: str) -> str:
            raise PermissionError(key)

    with pytest.raises(PermissionError):
        StoreOptions.from_deployment({}, Broken())


def test_the_environment_comes_before_the_config(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"cache_dir": "/config", "cache_bytes": "2GiB", "endpoint": "http://config", "region": "config"}
    options = StoreOptions.from_deployment(settings)
    assert options.cache_folder == Path("/config") and options.cache_bytes == 2 * 2**30
    assert (options.endpoint, options.region) == ("http://config", "config")
    monkeypatch.setenv("PREHEAT_CACHE_DIR", "/environment")
    monkeypatch.setenv("PREHEAT_CACHE_BYTES", "1000")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://environment")
    monkeypatch.setenv("AWS_REGION", "environment")
    options = StoreOptions.from_deployment(settings)
    assert options.cache_folder == Path("/environment") and options.cache_bytes == 1000
    assert (options.endpoint, options.region) == ("http://environment", "environment")


@pytest.mark.parametrize("size", ["many", "-1", "0", 1.5, True, "1 GB", "2GiBGiB"])
def test_a_size_of_the_cache_that_is_none_is_refused(bare: None, size: object) -> None:
    with pytest.raises(ManifestError, match="cache_bytes is a whole number of bytes or one like 20GiB"):
        StoreOptions.from_deployment({"cache_bytes": size})


def test_a_local_store_does_not_import_boto3(tmp_path: Path) -> None:
    script = "import sys, model.store; model.store.store.open_store(sys.argv[1]); print('boto3' in sys.modules)"
    assert finish(python(script, tmp_path, environment={})) == "False\n"


def test_boto3_sends_checksums_that_the_gateway_checks(object_store: ObjectStore, bucket: str, s3: Any) -> None:
    """What the store relies on: a body that is not what its Content-MD5 says is refused, over plain HTTP too."""
    url = s3.generate_presigned_url(
        "put_object", {"Bucket": bucket, "Key": "x", "ContentMD5": "1B2M2Y8AsgTpgAmY7PhCfg=="}
    )
    connection = http.client.HTTPConnection(object_store.url.removeprefix("http://"))
    connection.request("PUT", url.removeprefix(object_store.url), b"other", {"Content-MD5": "1B2M2Y8AsgTpgAmY7PhCfg=="})
    assert connection.getresponse().status == 400
    connection.close()


@pytest.mark.parametrize(
    "answer, fits",
    [
        ({"ETag": '"5d41402abc4b2a76b9719d911017c592"'}, True),
        ({"ETag": '"00000000000000000000000000000000"'}, False),
        ({"ETag": '"00000000000000000000000000000000"', "ServerSideEncryption": "AES256"}, False),
        ({"ETag": '"00000000000000000000000000000000"', "ServerSideEncryption": "aws:kms"}, True),
        ({"ETag": '"00000000000000000000000000000000"', "SSECustomerAlgorithm": "AES256"}, True),
        ({"ETag": '"00000000000000000000000000000000-2"'}, True),
    ],
)
def test_an_etag_is_a_digest_only_where_no_key_of_others_encrypts(answer: dict[str, str], fits: bool) -> None:
    assert s3_bucket._fits_etag(b"hello", answer) is fits


def test_an_age_that_a_running_build_may_have_is_refused() -> None:
    assert (read_age("2h"), read_age("7d")) == (7200, 7 * 86400)
    for age in ("0s", "119m", "7", "d", "-1d"):
        with pytest.raises(BadAge):
            read_age(age)
