"""Write a store in a bucket of any S3-compatible service. Implements `WritableStore`.

A release is published by one conditional PutObject, so the service accepts only one of several concurrent publishers.
Blobs are named by their digest, so writing one twice is harmless.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from engine_builder.stores.s3_uploads import BytesSource, WritableBucket
from engine_builder.stores.writing import adapter_exists, checked_json, needs_refresh, record_key, release_exists
from model.errors import StoreError
from model.store.adapter_record import AdapterRecord
from model.store.keys import (
    BLOBS,
    adapter_key,
    adapter_not_found,
    blob_damaged,
    blob_key,
    blob_missing,
    is_digest,
    release_key,
)
from model.store.manifest import Blob, Manifest
from model.store.s3 import CONNECTIONS, S3Store


class WritableS3Store(S3Store):
    """`s3://bucket[/prefix]` store for the builder. Thread-safe."""

    def _connect(self) -> WritableBucket:
        return WritableBucket(self._bucket_name, self._prefix, self.url, self._options, CONNECTIONS)

    @property
    def _writable(self) -> WritableBucket:
        return cast(WritableBucket, self._bucket)

    # -- blobs ---------------------------------------------------------------------------------------------------

    def has(self, digest: str) -> bool:
        return self._writable.head(digest) is not None

    def check(self, digest: str, size: int) -> None:
        hasher = hashlib.sha256()

        def update(data: bytes) -> None:
            hasher.update(data)
            self._options.report(len(data))

        part_bytes = self._options.part_bytes
        for start in range(0, max(1, size), part_bytes):
            self._bucket.fetch_range(digest, start, min(size, start + part_bytes), size, update)
        if hasher.hexdigest() != digest:
            raise blob_damaged(digest, self.url, "its bytes have changed")

    def put(self, path: Path) -> str:
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                size = file.tell()
                if self._holds(digest, size):
                    self._options.report(size)
                else:
                    file.seek(0)
                    self._writable.put(digest, file, size, str(path))
        except OSError as error:
            raise StoreError(f"{path} cannot be read, so it cannot be stored: {error.strerror or error}.") from error
        return digest

    def put_bytes(self, data: bytes | memoryview) -> str:
        digest = hashlib.sha256(data).hexdigest()
        if self._holds(digest, len(data)):
            self._options.report(len(data))
        else:
            self._writable.put(digest, BytesSource(data), len(data), "The data")
        return digest

    def _holds(self, digest: str, size: int) -> bool:
        """True if the bucket has a blob of that size. An old blob is refreshed, so that `preheat gc` keeps it."""
        head = self._writable.head(digest)
        if head is None or head["ContentLength"] != size:
            return False
        if needs_refresh(head["LastModified"].timestamp()):
            self._writable.refresh(digest, size)
        return True

    def blobs(self) -> Iterator[tuple[str, int, float]]:
        for found in self._bucket.list_objects(f"{BLOBS}/"):
            if is_digest(digest := found.key.removeprefix(f"{BLOBS}/")):
                yield digest, found.bytes, found.changed

    def delete_blob(self, digest: str, unless_changed_after: float) -> bool:
        head = self._writable.head(digest)
        if head is None or head["LastModified"].timestamp() > unless_changed_after:
            return False
        self._writable.delete(blob_key(digest), f"Blob {digest[:12]}")
        return True

    def delete_unfinished(self, begun_before: float) -> int:
        return self._writable.abort_uploads(begun_before)

    # -- releases and records ------------------------------------------------------------------------------------

    def write_release(self, manifest: Manifest) -> None:
        """Publish a release. Checks only the length of each blob; `preheat verify` checks the bytes."""
        data = checked_json(manifest)
        self._check_lengths(list(manifest.blobs().values()))
        if not self._writable.create_small(release_key(manifest.name), data, f"Release {manifest.name}"):
            raise release_exists(manifest.name)

    def write_adapter(self, record: AdapterRecord) -> None:
        """Write the record of an adapter. Checks only the length of each blob."""
        self._check_lengths(record.blobs)
        if not self._writable.create_small(adapter_key(record.name), record.to_json(), f"Adapter {record.name}"):
            raise adapter_exists(self.read_adapter(record.name), record)

    def delete_adapter(self, name: str) -> None:
        key = adapter_key(name)  # refuses an unsafe name
        if name not in (names := self.adapters()):
            raise adapter_not_found(name, self.url, [*names])
        self._writable.delete(key, f"Adapter {name}")

    def _check_lengths(self, blobs: Sequence[Blob]) -> None:
        """Raise CorruptBlob unless the bucket has all of these blobs with their lengths."""
        for blob, head in zip(blobs, self._writable.heads(blob.sha256 for blob in blobs), strict=True):
            if head is None:
                raise blob_missing(blob.sha256, self.url)
            if head["ContentLength"] != blob.bytes:
                cause = f"it has {head['ContentLength']} bytes instead of {blob.bytes}"
                raise blob_damaged(blob.sha256, self.url, cause)

    def read_record(self, kind: str, name: str) -> bytes | None:
        return self._bucket.read_small(record_key(kind, name), f"Record {kind}/{name}")

    def write_record(self, kind: str, name: str, record: bytes) -> None:
        self._writable.write_small(record_key(kind, name), record, f"Record {kind}/{name}")

    def records(self, kind: str) -> list[str]:
        folder = record_key(kind, "x").removesuffix("x.json")
        names = (found.key.removeprefix(folder) for found in self._bucket.list_objects(folder))
        return sorted(name.removesuffix(".json") for name in names if name.endswith(".json") and "/" not in name)
