"""Garbage collection and copies of releases, in stores of both kinds."""

import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from engine_builder.releases.gc import BadAge, delete_garbage, find_garbage, read_age
from engine_builder.releases.mirror import copy_release
from engine_builder.stores import s3_uploads
from engine_builder.stores.store import WritableStore, open_writable_store
from model.errors import CorruptBlob, ManifestError, ReleaseExists, ReleaseNotFound, StoreError
from tests.conftest import Opener
from tests.support import commands, odd_files, releases
from tests.support.commands import Invocation
from tests.support.faulty_proxy import Fault, FaultyProxy


@pytest.fixture(params=["folder", "bucket"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> WritableStore:
    """A store of either kind. Only the S3 bucket needs Ceph, so only its case requests `open_bucket`."""
    if request.param == "folder":
        return open_writable_store(tmp_path / "folder")
    return request.getfixturevalue("open_bucket")("gc")


def test_deletes_only_unnamed_blobs(any_store: WritableStore) -> None:
    manifest = releases.draft_release(any_store)
    any_store.write_release(manifest)
    named = set(manifest.blobs())
    drafted, recorded, unnamed = (any_store.put_bytes(data) for data in (b"drafted", b"recorded", b"unnamed"))
    draft = manifest.model_copy(update={"model": "other"}).to_json()
    tokenizer = manifest.tokenizers["tokenizer"].blob.sha256
    any_store.write_record("drafts", "other", draft.replace(tokenizer.encode(), drafted.encode()))
    any_store.write_record("engines", "key", f'{{"blob": {{"sha256": "{recorded}"}}, "a newer": "field"}}'.encode())
    young = find_garbage(any_store, 3600)
    assert (young.blobs, young.young_count, young.named_count) == ({}, 1, len(named) + 2)
    assert delete_garbage(any_store, young) == 0 and any_store.has(unnamed)
    old = find_garbage(any_store, 3600, now=datetime.now(UTC).timestamp() + 3601)
    assert old.blobs == {unnamed: len(b"unnamed")} and any_store.has(unnamed)
    assert delete_garbage(any_store, old) == len(b"unnamed")
    assert {digest for digest, _, _ in any_store.blobs()} == named | {drafted, recorded}


def test_keeps_blobs_put_or_named_since_the_search(any_store: WritableStore) -> None:
    drafted, put = any_store.put_bytes(b"drafted"), any_store.put_bytes(b"put")
    now = datetime.now(UTC).timestamp()
    garbage = find_garbage(any_store, 0, now=now + 60)
    assert set(garbage.blobs) == {drafted, put}
    any_store.write_record("drafts", "x", f'"{drafted}"'.encode())
    put_again = replace(garbage, keep_after=now - 60)  # as if both blobs were put again after the search
    assert delete_garbage(any_store, put_again) == 0
    assert any_store.has(drafted) and any_store.has(put)
    assert delete_garbage(any_store, garbage) == len(b"put")
    assert any_store.has(drafted) and not any_store.has(put)


def test_deletes_nothing_if_a_manifest_is_unreadable(
    any_store: WritableStore, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    unnamed = any_store.put_bytes(b"unnamed")
    manifest = releases.draft_release(any_store)
    any_store.write_release(manifest)
    newer = manifest.to_json().replace(b'"schema_version": 1', b'"schema_version": 99')
    if any_store.url.startswith("s3:"):
        client, bucket = request.getfixturevalue("s3"), request.getfixturevalue("bucket")
        client.put_object(Bucket=bucket, Key="gc/releases/toy/1.json", Body=newer)
    else:
        (tmp_path / "folder" / "releases" / "toy" / "1.json").write_bytes(newer)
    with pytest.raises(ManifestError, match="schema"):
        find_garbage(any_store, 0, now=datetime.now(UTC).timestamp() + 60)
    assert any_store.has(unnamed)


def unlistable_stores(folder: Path) -> dict[str, Path]:
    """Write stores with old blobs, in each of which one folder cannot be listed. Returns that folder -> store."""
    cases = (
        ("locked", "releases"), ("link", "releases/toy"), ("locked", "adapters"), ("file", "adapters"),
        ("link", "records"), ("file", "records/engines"),
    )  # fmt: skip
    stores = {}
    for number, (kind, entry) in enumerate(cases):
        root = folder / str(number)
        store = open_writable_store(root)
        store.write_release(releases.draft_release(store))
        store.write_record("engines", "key", f'"{store.put_bytes(b"recorded")}"'.encode())
        (root / "adapters").mkdir()
        for digest, _, _ in store.blobs():
            os.utime(root / "blobs" / "sha256" / digest, (0, 0))
        if kind == "locked":
            (root / entry).chmod(0)
        else:
            (root / entry).rename(root / "moved")
            (root / entry).symlink_to(folder / "unmounted") if kind == "link" else (root / entry).touch()
        stores[f"{kind} {entry}"] = root
    return stores


def test_unlistable_folder_is_not_empty(tmp_path: Path) -> None:
    """Otherwise the blobs that its files name would be deleted."""
    sandbox = commands.make_sandbox(tmp_path)
    stores = unlistable_stores(sandbox / "files")
    blobs = {root: sorted((root / "blobs" / "sha256").iterdir()) for root in stores.values()}
    cases = [Invocation(["gc", "--delete", f"--store={root}"]) for root in stores.values()]
    results = dict(zip(stores, commands.run(sandbox, cases), strict=True))
    listed = {entry: root for entry, root in stores.items() if "records" not in entry}
    cases = [Invocation([name, f"--store={root}"]) for root in listed.values() for name in ("releases", "verify")]
    results |= {f"{number}": result for number, result in enumerate(commands.run(sandbox, cases))}
    odd_files.unlock(tmp_path)
    for entry, result in results.items():
        assert result["status"] == 1, (entry, result)
        assert "preheat: The list of " in result["stderr"] and "cannot be read (file://" in result["stderr"], entry
    assert {root: sorted((root / "blobs" / "sha256").iterdir()) for root in stores.values()} == blobs


def test_folder_of_another_model_may_be_unlistable(tmp_path: Path) -> None:
    source, store = (open_writable_store(tmp_path / name) for name in ("source", "store"))
    manifest = releases.draft_release(source)
    for model in ("toy", "toy-2"):
        source.write_release(manifest.model_copy(update={"model": model}))
    assert source.releases() == ["toy-2/1", "toy/1"] and source.releases("other") == []
    (tmp_path / "store" / "releases").mkdir(parents=True)
    (tmp_path / "store" / "releases" / "other").symlink_to(tmp_path / "unmounted")
    assert copy_release(source, store, "toy/1")[1] and store.releases("toy") == ["toy/1"]
    with pytest.raises(ReleaseNotFound, match="Release toy/2 was not found in file://.*/store. Check the name"):
        store.read_release("toy/2")
    with pytest.raises(StoreError, match="cannot be read"):
        store.releases()


def test_deletes_nothing_if_an_entry_is_a_dangling_link(tmp_path: Path) -> None:
    store = open_writable_store(tmp_path / "folder")
    for entry in ("releases/toy/1.json", "adapters/style.json", "records/drafts/toy.json"):
        path = tmp_path / "folder" / entry
        path.parent.mkdir(parents=True)
        path.symlink_to(tmp_path / "unmounted" / "1.json")
        with pytest.raises(StoreError, match="cannot be read.*is a link to a missing file"):
            find_garbage(store)
        path.unlink()


def put_time(store: WritableStore) -> float:
    """Return the time of the last put of the only blob."""
    [(_, _, put_at)] = store.blobs()
    return put_at


def test_put_refreshes_an_old_blob_in_a_folder(tmp_path: Path) -> None:
    store = open_writable_store(tmp_path / "folder")
    path = store.get(store.put_bytes(b"bytes"), 5)
    for age, refreshed in ((1800, False), (7200, True)):
        old = int(path.stat().st_mtime) - age
        os.utime(path, (old, old))
        store.put_bytes(b"bytes")
        assert (put_time(store) > old) == refreshed


def test_put_refreshes_an_old_blob_in_a_bucket(open_bucket: Opener, proxy: FaultyProxy) -> None:
    store = open_bucket("gc", endpoint=proxy.url)
    digest = store.put_bytes(b"bytes")
    before = put_time(store)
    store.put_bytes(b"bytes")
    assert put_time(store) == before, "it is not old"
    proxy.inject(Fault("old", method="HEAD"))
    store.put_bytes(b"bytes")
    assert not proxy.pending and put_time(store) > before
    store.check(digest, 5)


def test_deletes_unfinished_uploads(open_bucket: Opener, s3: Any, bucket: str) -> None:
    store = open_bucket("gc")
    digest = "0" * 64
    for key in (f"gc/blobs/sha256/{digest}", f"other/blobs/sha256/{digest}"):
        s3.create_multipart_upload(Bucket=bucket, Key=key)
    now = datetime.now(UTC).timestamp()
    delete_garbage(store, find_garbage(store, 3600))
    assert len(s3.list_multipart_uploads(Bucket=bucket)["Uploads"]) == 2, "they may be in progress"
    assert store.delete_unfinished(now + 60) == 1
    assert [u["Key"] for u in s3.list_multipart_uploads(Bucket=bucket)["Uploads"]] == [f"other/blobs/sha256/{digest}"]


def test_refuses_short_and_invalid_ages() -> None:
    assert (read_age("2h"), read_age("7d")) == (7200, 7 * 86400)
    for age in ("0s", "119m", "7", "d", "-1d"):
        with pytest.raises(BadAge):
            read_age(age)


def test_copies_release_to_bucket_and_back(open_bucket: Opener, tmp_path: Path) -> None:
    folder, back = (open_writable_store(tmp_path / name) for name in ("folder", "back"))
    remote = open_bucket()
    manifest = releases.draft_release(folder)
    folder.write_release(manifest)
    assert copy_release(folder, remote, "toy/1") == (manifest, True)
    assert copy_release(remote, back, "toy/1") == (manifest, True)
    assert copy_release(folder, remote, "toy/1") == (manifest, False)
    for digest, blob in manifest.blobs().items():
        assert back.get(digest, blob.bytes).read_bytes() == folder.get(digest, blob.bytes).read_bytes()
    other = open_writable_store(tmp_path / "other")
    other.write_release(releases.draft_release(other).model_copy(update={"created": "2027-01-01T00:00:00+00:00"}))
    with pytest.raises(ReleaseExists, match="has another release toy/1"):
        copy_release(other, remote, "toy/1")
    empty = open_writable_store(tmp_path / "empty")
    path = folder.get(manifest.weights[0].blobs[0].sha256, manifest.weights[0].blobs[0].bytes)
    path.write_bytes(bytes(len(path.read_bytes())))
    with pytest.raises(CorruptBlob):
        copy_release(folder, empty, "toy/1")
    assert empty.releases() == []


def test_put_refreshes_a_large_blob_in_parts(
    open_bucket: Opener, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 copies at most 5 GB in one request. Here the limit is 6 MiB, and a part has 5 MiB, the least that S3 takes."""
    monkeypatch.setattr(s3_uploads, "COPY_LIMIT_BYTES", 6 * 2**20)
    monkeypatch.setattr(s3_uploads, "COPY_PART_BYTES", 5 * 2**20)
    store = open_bucket(endpoint=proxy.url)
    for size, copied_ranges in ((6 * 2**20, [None]), (6 * 2**20 + 1, ["bytes=0-5242879", "bytes=5242880-6291456"])):
        data = bytes(size)
        digest = store.put_bytes(data)
        [before] = [changed for blob, _, changed in store.blobs() if blob == digest]
        proxy.clear()
        proxy.inject(Fault("old", method="HEAD"))
        store.put_bytes(data)
        copies = [request.headers for request in proxy.requests if "x-amz-copy-source" in request.headers]
        ranges = [headers.get("x-amz-copy-source-range") for headers in copies]
        assert sorted(ranges, key=str) == copied_ranges
        [after] = [changed for blob, _, changed in store.blobs() if blob == digest]
        assert after > before
        store.check(digest, size)
