"""Write a store in a folder. Implements `WritableStore`.

Each file is written under a temporary name in its final folder, and then moved into place. So a crash leaves no partial
file under a final name. Several processes may share the folder.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine_builder.stores.writing import (
    RECORDS,
    adapter_exists,
    checked_json,
    needs_refresh,
    record_key,
    release_exists,
    source_changed,
)
from model.errors import CorruptBlob, StoreError
from model.store.adapter_record import AdapterRecord
from model.store.keys import BLOBS, adapter_key, adapter_not_found, is_digest, release_key
from model.store.local import CHUNK_BYTES, FileMissing, LocalStore, list_json, open_regular_file
from model.store.manifest import MANIFEST_LIMIT, Manifest

_TEMPORARY_PREFIX = ".incoming-"
_ABANDONED_SECONDS = 24 * 3600  # no running writer pauses for so long, so its process was killed


class WritableLocalStore(LocalStore):
    """`file://` store for the builder. Publishing needs a file system with hard links."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._cleaned: set[Path] = set()  # folders without abandoned temporary files

    # -- blobs ---------------------------------------------------------------------------------------------------

    def check(self, digest: str, size: int) -> None:
        self.get(digest, size)

    def put(self, path: Path) -> str:
        try:
            with self._reading(str(path)), open_regular_file(path) as source:
                size = os.fstat(source.fileno()).st_size
                digest = hashlib.file_digest(source, "sha256").hexdigest()
                if not self._holds(digest, size):
                    source.seek(0)
                    self._place(digest, iter(lambda: source.read(CHUNK_BYTES), b""), str(path))
        except FileMissing as error:
            raise StoreError(f"{path} does not exist, so it cannot be stored.") from error
        return digest

    def put_bytes(self, data: bytes | memoryview) -> str:
        digest = hashlib.sha256(data).hexdigest()
        if not self._holds(digest, len(data)):
            self._place(digest, [data], "The data")
        return digest

    def _holds(self, digest: str, size: int) -> bool:
        try:
            path = self.get(digest, size)
        except CorruptBlob:
            return False
        with suppress(OSError):  # another user's file, or a read-only disk
            if needs_refresh(path.stat().st_mtime):
                os.utime(path)
        return True

    def _place(self, digest: str, chunks: Iterable[bytes | memoryview], source: str) -> None:
        target = self._blob_path(digest)
        with self._writing(target) as temporary:
            if _write_through(temporary, chunks) != digest:
                raise source_changed(source)
            os.replace(temporary, target)
            _flush_folder(target.parent)

    def blobs(self) -> Iterator[tuple[str, int, float]]:
        with self._reading("The list of blobs"), suppress(FileNotFoundError):
            for path in list((self.root / BLOBS).iterdir()):
                if is_digest(path.name):
                    with suppress(FileNotFoundError):
                        status = path.stat()
                        yield path.name, status.st_size, status.st_mtime

    def delete_blob(self, digest: str, unless_changed_after: float) -> bool:
        path = self._blob_path(digest)
        try:
            if path.stat().st_mtime > unless_changed_after:
                return False
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(
                f"Blob {digest[:12]} cannot be deleted ({self.url}): {error.strerror or error}.",
                "Make the folder writable.",
            ) from error
        return True

    def delete_unfinished(self, begun_before: float) -> int:
        return _delete_temporary_files(self.root / BLOBS, begun_before)

    # -- releases and records ------------------------------------------------------------------------------------

    def write_release(self, manifest: Manifest) -> None:
        data = checked_json(manifest)
        for digest, blob in manifest.blobs().items():
            self.get(digest, blob.bytes)
        if not self._create(release_key(manifest.name), data):
            raise release_exists(manifest.name)

    def write_adapter(self, record: AdapterRecord) -> None:
        for blob in record.blobs:
            self.get(blob.sha256, blob.bytes)
        if not self._create(adapter_key(record.name), record.to_json()):
            raise adapter_exists(self.read_adapter(record.name), record)

    def delete_adapter(self, name: str) -> None:
        try:
            (self.root / adapter_key(name)).unlink()
        except FileNotFoundError as error:
            raise adapter_not_found(name, self.url, [*self.adapters()]) from error
        except OSError as error:
            cause = error.strerror or str(error)
            raise StoreError(f"Adapter {name} cannot be deleted ({self.url}): {cause}.", "Make it writable.") from error

    def _create(self, key: str, data: bytes) -> bool:
        """Write a file that must not exist. Returns False if it does: exactly one of two racing writers wins."""
        target = self.root / key
        with self._writing(target) as temporary:
            _write_through(temporary, [data])
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            _flush_folder(target.parent)
        return True

    def read_record(self, kind: str, name: str) -> bytes | None:
        try:
            with self._opened_entry(record_key(kind, name), f"Record {kind}/{name}") as file:
                return file.read(MANIFEST_LIMIT + 1)
        except FileMissing:
            return None

    def write_record(self, kind: str, name: str, record: bytes) -> None:
        target = self.root / record_key(kind, name)
        with self._writing(target) as temporary:
            _write_through(temporary, [record])
            os.replace(temporary, target)

    def records(self, kind: str) -> list[str]:
        with self._reading(f"The list of {kind}"):
            return sorted(list_json(self.root / RECORDS / kind))

    # -- the file system -----------------------------------------------------------------------------------------

    @contextmanager
    def _writing(self, target: Path) -> Iterator[Path]:
        """Yield the path of a temporary file in the folder of `target`. Deletes it at the end. Raises StoreError."""
        temporary: Path | None = None
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._delete_abandoned(target.parent)
            handle, name = tempfile.mkstemp(prefix=_TEMPORARY_PREFIX, dir=target.parent)
            os.close(handle)
            temporary = Path(name)
            temporary.chmod(0o644)
            yield temporary
        except OSError as error:
            raise StoreError(
                f"{self.url} cannot be written: {error.strerror or error}. Files that were complete before are intact.",
                "Free disk space, make the folder writable, or name another store (`--store`).",
            ) from error
        finally:
            if temporary is not None:
                temporary.unlink(missing_ok=True)

    def _delete_abandoned(self, folder: Path) -> None:
        """Delete temporary files of killed writers. Does so once for each folder."""
        if folder not in self._cleaned:
            self._cleaned.add(folder)
            _delete_temporary_files(folder, time.time() - _ABANDONED_SECONDS)


def _delete_temporary_files(folder: Path, begun_before: float) -> int:
    """Delete temporary files begun before that time (seconds since 1970). Returns the number deleted."""
    count = 0
    for path in folder.glob(f"{_TEMPORARY_PREFIX}*"):
        with suppress(OSError):
            if path.lstat().st_mtime < begun_before:
                path.unlink()
                count += 1
    return count


def _write_through(path: Path, chunks: Iterable[bytes | memoryview]) -> str:
    """Write a file and flush it to the disk. Returns the SHA-256 of the written bytes."""
    hasher = hashlib.sha256()
    with path.open("wb") as file:
        for chunk in chunks:
            hasher.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return hasher.hexdigest()


def _flush_folder(folder: Path) -> None:
    """Flush a folder to the disk, so that a new name survives a power failure. Ignores file systems that cannot."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
