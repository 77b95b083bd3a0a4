"""The protocol of a writable store, which only the builder has."""

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from engine_builder.stores.local import WritableLocalStore
from model.errors import StoreError
from model.store.adapter_record import AdapterRecord
from model.store.manifest import Manifest
from model.store.options import StoreOptions
from model.store.store import Store, local_store_folder


class WritableStore(Store, Protocol):
    """Reads and writes blobs, releases and the builder's records."""

    def has(self, digest: str) -> bool:
        """True if the blob exists. Its bytes are not checked."""

    def check(self, digest: str, size: int) -> None:
        """Verify all bytes of a blob in the store itself, not in a cache. Raises CorruptBlob or StoreError."""

    def put(self, path: Path) -> str:
        """Store a file's bytes and return their digest. It can be repeated, also after the process was killed."""

    def put_bytes(self, data: bytes | memoryview) -> str:
        """Store bytes and return their digest."""

    def write_release(self, manifest: Manifest) -> None:
        """Publish a release.

        Raises ReleaseExists if the name is taken, also in a race; CorruptBlob for a missing or damaged blob;
        ManifestError for a manifest that could not be read again.
        """

    def write_adapter(self, record: AdapterRecord) -> None:
        """Write the record of an adapter. Raises AdapterExists, or CorruptBlob for a missing or damaged blob."""

    def delete_adapter(self, name: str) -> None:
        """Delete the record of an adapter. Its blobs stay until `preheat gc`. Raises AdapterNotFound or StoreError."""

    def read_record(self, kind: str, name: str) -> bytes | None:
        """Return a record, or None.

        Kinds: engines (named by engine key), drafts, comparisons, onnx, timing, calibrations, validations.
        """

    def write_record(self, kind: str, name: str, record: bytes) -> None:
        """Write a record. The last writer wins."""

    def records(self, kind: str) -> list[str]:
        """Return the names of all records of a kind, sorted."""

    def blobs(self) -> Iterator[tuple[str, int, float]]:
        """Yield the digest, size in bytes and time of the last `put` (seconds since 1970) of every blob."""

    def delete_blob(self, digest: str, unless_changed_after: float) -> bool:
        """Delete a blob, for `preheat gc` only.

        Returns False if it is missing, or was put after that time (seconds since 1970).
        """

    def delete_unfinished(self, begun_before: float) -> int:
        """Delete unfinished blobs begun before that time (seconds since 1970). Returns their number."""


def check_local_folder(url: str | Path) -> None:
    """Check that a local store's folder exists, for commands that only read. A bucket is not checked.

    Writers create the folder of a store. Raises StoreError.
    """
    folder = local_store_folder(url)
    if folder is None:
        return
    try:
        cause = None if stat.S_ISDIR(folder.stat().st_mode) else "it is not a folder"
    except OSError as error:
        cause = error.strerror or str(error)
    if cause is not None:
        raise StoreError(
            f"{folder} is not a store: {cause}.",
            "Check --store, --from, PREHEAT_STORE and `store` in the config. `preheat build` makes a store.",
        )


def open_writable_store(url: str | Path, options: StoreOptions | None = None) -> WritableStore:
    """Open the store at `url`, as `model.store.store.open_store` does, for reading and writing."""
    folder = local_store_folder(url)
    if folder is not None:
        return WritableLocalStore(folder)
    from engine_builder.stores.s3 import WritableS3Store  # imports boto3, which a local store does not need

    return WritableS3Store(str(url), options)
