"""Read a store in a folder: a disk, a mounted bucket, a read-only image layer. Implements `Store`.

Links are followed, because the digest in a blob's name decides whether its bytes are right. Other files (a pipe, a
device) are never opened. Writers move finished files into place, so a reader never sees half a file.
"""

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from model.errors import PreheatError, StoreError
from model.store.adapter_record import ADAPTER_LIMIT, AdapterRecord, parse_adapter
from model.store.keys import (
    ADAPTERS,
    RELEASES,
    adapter_key,
    adapter_not_found,
    blob_damaged,
    blob_key,
    blob_missing,
    is_adapter_name,
    is_release_name,
    release_key,
    release_not_found,
)
from model.store.manifest import MANIFEST_LIMIT, Blob, Manifest
from model.store.manifest_json import parse_manifest
from model.store.sink import BufferSink, Sink

CHUNK_BYTES = 4 * 2**20  # read at a time while hashing


class FileMissing(PreheatError):
    """A file does not exist. Stores catch this error and name the missing blob or release."""


class LocalStore:
    """`file://` store. It remembers the fingerprints of verified blobs for the life of the process.

    A fingerprint includes the time of the last change, which no user can set back. So a change is detected unless it
    happens between the check and the use.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root).absolute()
        self.url = self.root.as_uri()
        self._verified: set[tuple[str, int, int, int, int, int]] = set()

    # -- blobs ---------------------------------------------------------------------------------------------------

    def _blob_path(self, digest: str) -> Path:
        return self.root / blob_key(digest)

    def has(self, digest: str) -> bool:
        """True if the blob's file exists. Its bytes are not checked."""
        path = self._blob_path(digest)
        with self._reading(f"Blob {digest[:12]}"):
            try:
                return stat.S_ISREG(path.stat().st_mode)
            except (FileNotFoundError, NotADirectoryError):
                return False

    def get(self, digest: str, size: int) -> Path:
        path = self._blob_path(digest)
        with self._opened_blob(digest, size) as file:
            current = fingerprint(digest, os.fstat(file.fileno()))
            if current not in self._verified:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise blob_damaged(digest, self.url, "its bytes have changed")
                self._verified.add(current)
        return path

    def read(self, digest: str, into: memoryview) -> None:
        """Like `Store.read`. Always hashes the bytes in memory: native code reads some of them."""
        self._stream(digest, len(into), BufferSink(into, CHUNK_BYTES), trust_verified=False)

    def stream(self, digest: str, size: int, sink: Sink) -> None:
        """Like `Store.stream`. Hashes only a blob that this process has not verified."""
        self._stream(digest, size, sink, trust_verified=True)

    def _stream(self, digest: str, size: int, sink: Sink, trust_verified: bool) -> None:
        with self._opened_blob(digest, size) as file:
            before = fingerprint(digest, os.fstat(file.fileno()))
            verified = trust_verified and before in self._verified
            hasher, at = hashlib.sha256(), 0
            while at < size:
                buffer = sink.buffer(at)[: size - at]
                count = _fill(file, buffer)
                if not verified:
                    hasher.update(buffer[:count])
                if count < len(buffer):
                    raise blob_damaged(digest, self.url, f"it ends after {at + count} of {size} bytes")
                sink.filled(at, buffer)
                at += count
            if verified:
                if fingerprint(digest, os.fstat(file.fileno())) != before:
                    # The file's times changed, and perhaps its bytes. A use by another process changes the times too.
                    self._stream(digest, size, sink, trust_verified=False)
                return
        if hasher.hexdigest() != digest:
            raise blob_damaged(digest, self.url, "its bytes have changed")
        self._verified.add(before)

    @contextmanager
    def _opened_blob(self, digest: str, size: int) -> Iterator[BufferedReader]:
        """Open a blob's file of `size` bytes. Raises CorruptBlob, or StoreError if it cannot be read."""
        try:
            with self._reading(f"Blob {digest[:12]}"), open_regular_file(self._blob_path(digest)) as file:
                actual = os.fstat(file.fileno()).st_size
                if actual != size:
                    raise blob_damaged(digest, self.url, f"it has {actual} bytes instead of {size}")
                yield file
        except FileMissing as error:
            raise blob_missing(digest, self.url) from error

    def unpin(self, blobs: Iterable[Blob]) -> None:
        """Do nothing: nothing is evicted from a folder."""

    def fetch(self, blobs: Iterable[Blob], is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Start reading the blobs into the page cache. Blobs are used in place, so nothing is copied."""
        for blob in blobs:
            with self._opened_blob(blob.sha256, blob.bytes) as file, suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    # -- releases ------------------------------------------------------------------------------------------------

    def read_release(self, name: str) -> Manifest:
        try:
            with self._opened_entry(release_key(name), f"Release {name}") as file:
                data = file.read(MANIFEST_LIMIT + 1)
        except FileMissing as error:
            raise release_not_found(name, self.url, _list_if_readable(self.releases)) from error
        return parse_manifest(data, name)

    def releases(self, model: str | None = None) -> list[str]:
        names = []
        with self._reading("The list of releases"):
            models = list_folder(self.root / RELEASES) if model is None else [model]
        for listed in models:
            # Other files may lie among the folders of models. A folder with another name contains no release.
            if is_release_name(f"{listed}/1"):
                with self._reading(f"The list of releases of {listed}"), suppress(NotADirectoryError):
                    names += [f"{listed}/{version}" for version in list_json(self.root / RELEASES / listed)]
        return sorted(name for name in names if is_release_name(name))

    # -- adapters ------------------------------------------------------------------------------------------------

    def read_adapter(self, name: str) -> AdapterRecord:
        try:
            with self._opened_entry(adapter_key(name), f"Adapter {name}") as file:
                data = file.read(ADAPTER_LIMIT + 1)
        except FileMissing as error:
            raise adapter_not_found(name, self.url, _list_if_readable(lambda: [*self.adapters()])) from error
        return parse_adapter(data, name)

    def adapters(self) -> dict[str, str]:
        marks: dict[str, str] = {}
        with self._reading("The list of adapters"):
            for name in sorted(filter(is_adapter_name, list_json(self.root / ADAPTERS))):
                path = self.root / adapter_key(name)
                with suppress(FileNotFoundError):  # it was removed meanwhile
                    status = path.lstat()
                    with suppress(FileNotFoundError):  # it is a link to a missing file
                        status = path.stat()
                    marks[name] = f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"
        return marks

    @contextmanager
    def _opened_entry(self, key: str, what: str) -> Iterator[BufferedReader]:
        """Open the file of a release, an adapter or a record. Raises FileMissing, or StoreError if it cannot be read.

        A link to a missing file cannot be read. As a missing file, it would let `preheat gc` delete what it names.
        """
        path = self.root / key
        with self._reading(what):
            try:
                file = open_regular_file(path)
            except FileMissing:
                if path.is_symlink():
                    raise OSError(f"{path} is a link to a missing file") from None
                raise
            with file:
                yield file

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"{what} cannot be read ({self.url}): {error.strerror or error}.",
                "Fix the permissions, the links or the disk of that folder.",
            ) from error


def open_regular_file(path: Path) -> BufferedReader:
    """Open a regular file. Raises FileMissing, or OSError for any other kind: opening a pipe would block."""
    try:
        # O_NONBLOCK has no effect on a file. It lets a pipe be opened and then refused.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileMissing(str(path)) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError("it is not a regular file")
    return os.fdopen(handle, "rb")


def _list_if_readable(list_names: Callable[[], list[str]]) -> list[str] | None:
    """Return the names for a message, or None if a folder with entries of others cannot be listed."""
    try:
        return list_names()
    except StoreError:
        return None


def list_folder(folder: Path) -> list[str]:
    """Return the names of a folder's entries, or an empty list if the folder does not exist.

    Raises OSError for a folder that cannot be listed, and for a link to a missing folder. `Path.glob` would return
    nothing for both, and `preheat gc` would delete the blobs that the unlisted files name.
    """
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        if not existing.exists():
            raise OSError(f"{existing} is a link to a missing folder") from None
        return []


def list_json(folder: Path) -> list[str]:
    """Return the names of a folder's JSON files, without ".json". See `list_folder`."""
    return [name.removesuffix(".json") for name in list_folder(folder) if name.endswith(".json")]


def fingerprint(digest: str, status: os.stat_result) -> tuple[str, int, int, int, int, int]:
    """Return a blob's digest and its file's device, inode, size and times, which are equal until the file changes."""
    return digest, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _fill(file: BufferedReader, buffer: memoryview) -> int:
    """Read until `buffer` is full or the file ends. Return the number of bytes read."""
    at = 0
    while at < len(buffer) and (count := file.raw.readinto(buffer[at:])):
        at += count
    return at
