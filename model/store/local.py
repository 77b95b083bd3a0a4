"""A store in a folder: a disk, a mounted bucket, a read-only image layer. Promises what `Store` promises.

Writes go to a temporary name beside the target and are moved into place, so a reader, or a crash, never meets half a
file. Several processes may share the folder. Links are followed, for what a blob is called says what it must hold;
what is neither file nor link to one (a pipe, a device) is never opened.
"""

import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from model.errors import CorruptBlob, ManifestError, PreheatError, ReleaseExists, StoreError
from model.store.keys import (
    BLOBS,
    RECORDS,
    RELEASES,
    blob_key,
    is_digest,
    is_release_name,
    record_key,
    release_key,
    release_not_found,
)
from model.store.manifest import MANIFEST_LIMIT, Blob, Manifest
from model.store.manifest_json import parse_manifest
from model.store.sink import Sink, Whole

_CHUNK = 4 * 2**20  # bytes read at a time while hashing
_INCOMING = ".incoming-"
_ABANDONED = 24 * 3600  # seconds; no writer is silent for so long, so what it left was left by one that died
REFRESH_AGE = 3600  # seconds; a blob that is found instead of written must soon look new to `preheat gc`


class LocalStore:
    """`file://` store. Verified blobs are remembered by what the file system says of them, for the life of the process.

    That includes the time of the last change, which nobody can set back, so a change is seen unless it happens between
    the check and the use. Publishing takes a file system that has hard links.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root).absolute()
        self.url = self.root.as_uri()
        self._verified: set[tuple[str, int, int, int, int, int]] = set()
        self._swept: set[Path] = set()

    # -- blobs ---------------------------------------------------------------------------------------------------

    def _blob_path(self, digest: str) -> Path:
        return self.root / blob_key(digest)

    def has(self, digest: str) -> bool:
        path = self._blob_path(digest)
        with self._reading(f"Blob {digest[:12]}"):
            try:
                return stat.S_ISREG(path.stat().st_mode)
            except (FileNotFoundError, NotADirectoryError):
                return False

    def get(self, digest: str, size: int) -> Path:
        path = self._blob_path(digest)
        with self._opened_blob(digest, size) as file:
            found = os.fstat(file.fileno())
            if (seen := seen_as(digest, found)) not in self._verified:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise self._damaged(digest, "its bytes have changed")
                self._verified.add(seen)
        return path

    def read(self, digest: str, into: memoryview) -> None:
        """Always hashes: what is read into memory whole is small."""
        self._stream(digest, len(into), Whole(into, _CHUNK), trusting=False)

    def stream(self, digest: str, size: int, sink: Sink) -> None:
        """Hashes what this process has not verified yet."""
        self._stream(digest, size, sink, trusting=True)

    def _stream(self, digest: str, size: int, sink: Sink, trusting: bool) -> None:
        with self._opened_blob(digest, size) as file:
            seen = seen_as(digest, os.fstat(file.fileno()))
            known, at = trusting and seen in self._verified, 0
            hasher = hashlib.sha256()
            while at < size:
                buffer = sink.buffer()[: size - at]
                got = _fill(file, buffer)
                if not known:
                    hasher.update(buffer[:got])
                if got < len(buffer):
                    raise self._damaged(digest, f"it ends after {at + got} of {size} bytes")
                sink.filled(at, buffer)
                at += got
            if known:
                if seen_as(digest, os.fstat(file.fileno())) != seen:
                    # Its times have changed meanwhile, as by another process's use of it, or its bytes.
                    self._stream(digest, size, sink, trusting=False)
                return
        if hasher.hexdigest() != digest:
            raise self._damaged(digest, "its bytes have changed")
        self._verified.add(seen)

    @contextmanager
    def _opened_blob(self, digest: str, size: int) -> Iterator[BufferedReader]:
        """A blob's file, known to have `size` bytes. Raises CorruptBlob, or StoreError where it cannot be read."""
        try:
            with self._reading(f"Blob {digest[:12]}"), _open_file(self._blob_path(digest)) as file:
                have = os.fstat(file.fileno()).st_size
                if have != size:
                    raise self._damaged(digest, f"it has {have} bytes instead of {size}")
                yield file
        except _NotThere as error:
            raise CorruptBlob(
                f"Blob {digest[:12]} is missing from {self.url}: build and publish the release again "
                "(`preheat build`, `preheat publish`)."
            ) from error

    def _damaged(self, digest: str, what: str) -> CorruptBlob:
        """The remedy names the file: a build trusts the names that are there, so the damaged one must go first."""
        return CorruptBlob(
            f"Blob {digest[:12]} in {self.url} is damaged: {what}. Find all damage with `preheat verify`, delete it "
            f"(blobs/sha256/{digest}), then build again (`preheat build`)."
        )

    def fetch(self, blobs: Iterable[Blob]) -> None:
        """Blobs are used where they are; the system is only asked to read what of them is not in memory."""
        for blob in blobs:
            with suppress(PreheatError, OSError), _open_file(self._blob_path(blob.sha256)) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def check(self, digest: str, size: int) -> None:
        self.get(digest, size)

    def put(self, path: Path) -> str:
        try:
            with self._reading(str(path)), _open_file(path) as source:
                size = os.fstat(source.fileno()).st_size
                digest = hashlib.file_digest(source, "sha256").hexdigest()
                if not self._holds(digest, size):
                    source.seek(0)
                    self._place(digest, iter(lambda: source.read(_CHUNK), b""), str(path))
        except _NotThere as error:
            raise StoreError(f"{path} is not there to be stored.") from error
        return digest

    def put_bytes(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        if not self._holds(digest, len(data)):
            self._place(digest, [data], "The data")
        return digest

    def _holds(self, digest: str, size: int) -> bool:
        try:
            path = self.get(digest, size)
        except CorruptBlob:
            return False
        with suppress(OSError):  # another user's file, or one on a disk that can only be read
            if time.time() - path.stat().st_mtime > REFRESH_AGE:
                os.utime(path)
        return True

    def _place(self, digest: str, chunks: Iterable[bytes], source: str) -> None:
        target = self._blob_path(digest)
        with self._writing(target) as temporary:
            if _write_through(temporary, chunks) != digest:
                raise StoreError(f"{source} changed while it was stored: do it again.")
            os.replace(temporary, target)
            _flush_folder(target.parent)

    # -- releases ------------------------------------------------------------------------------------------------

    def _release_path(self, name: str) -> Path:
        return self.root / release_key(name)

    def read_release(self, name: str) -> Manifest:
        try:
            with self._reading(f"Release {name}"), _open_file(self._release_path(name)) as file:
                data = file.read(MANIFEST_LIMIT + 1)
        except _NotThere as error:
            raise release_not_found(name, self.url, self.releases()) from error
        return parse_manifest(data, name)

    def write_release(self, manifest: Manifest) -> None:
        data = manifest.to_json()
        if parse_manifest(data, manifest.name) != manifest:
            raise ManifestError(f"The manifest of {manifest.name} would be read as another one: build it again.")
        for digest, blob in manifest.blobs().items():
            self.get(digest, blob.bytes)
        target = self._release_path(manifest.name)
        with self._writing(target) as temporary:
            _write_through(temporary, [data])
            try:
                os.link(temporary, target)  # fails where the name is taken: of two racing publishers one wins
            except FileExistsError as error:
                raise ReleaseExists(
                    f"{manifest.name} is published already and releases are written once: choose another version."
                ) from error
            _flush_folder(target.parent)

    def releases(self) -> list[str]:
        paths = (self.root / RELEASES).glob("*/*.json")
        return sorted(name for path in paths if is_release_name(name := f"{path.parent.name}/{path.stem}"))

    # -- the builder's records -----------------------------------------------------------------------------------

    def _record_path(self, kind: str, name: str) -> Path:
        return self.root / record_key(kind, name)

    def read_record(self, kind: str, name: str) -> bytes | None:
        try:
            with self._reading(f"Record {kind}/{name}"), _open_file(self._record_path(kind, name)) as file:
                return file.read()
        except _NotThere:
            return None

    def write_record(self, kind: str, name: str, record: bytes) -> None:
        target = self._record_path(kind, name)
        with self._writing(target) as temporary:
            _write_through(temporary, [record])
            os.replace(temporary, target)

    def records(self, kind: str) -> list[str]:
        return sorted(path.stem for path in (self.root / RECORDS / kind).glob("*.json"))

    # -- what `preheat gc` needs ---------------------------------------------------------------------------------

    def blobs(self) -> Iterator[tuple[str, int, float]]:
        with self._reading("The list of blobs"), suppress(FileNotFoundError):
            for entry in list((self.root / BLOBS).iterdir()):
                if is_digest(entry.name):
                    with suppress(FileNotFoundError):
                        found = entry.stat()
                        yield entry.name, found.st_size, found.st_mtime

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
                f"Blob {digest[:12]} cannot be deleted ({self.url}): {error.strerror or error}. Make the folder one "
                "that can be written."
            ) from error
        return True

    def delete_unfinished(self, begun_before: float) -> int:
        count = 0
        for path in (self.root / BLOBS).glob(f"{_INCOMING}*"):
            with suppress(OSError):
                if path.lstat().st_mtime < begun_before:
                    path.unlink()
                    count += 1
        return count

    # -- the file system -----------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"{what} cannot be read ({self.url}): {error.strerror or error}. Mend the folder's permissions or disk."
            ) from error

    @contextmanager
    def _writing(self, target: Path) -> Iterator[Path]:
        """A temporary path beside `target`, gone afterwards whatever happens."""
        temporary: Path | None = None
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._sweep(target.parent)
            handle, name = tempfile.mkstemp(prefix=_INCOMING, dir=target.parent)
            os.close(handle)
            temporary = Path(name)
            temporary.chmod(0o644)
            yield temporary
        except OSError as error:
            raise StoreError(
                f"{self.url} cannot be written: {error.strerror or error}. Nothing in it was changed; make room, make "
                "it writable, or name another store (`--store`)."
            ) from error
        finally:
            if temporary is not None:
                temporary.unlink(missing_ok=True)

    def _sweep(self, folder: Path) -> None:
        """Once a folder, delete what writers that died long ago have left in it; a failure to is nobody's concern."""
        if folder in self._swept:
            return
        self._swept.add(folder)
        for path in folder.glob(f"{_INCOMING}*"):
            try:
                if time.time() - path.lstat().st_mtime > _ABANDONED:
                    path.unlink()
            except OSError:
                continue


class _NotThere(PreheatError):
    """No such file. Never leaves this module: callers say what is missing."""


def _open_file(path: Path) -> BufferedReader:
    """Open a regular file. Raises _NotThere, or OSError for what is none: opening a pipe would hang."""
    try:
        # O_NONBLOCK means nothing for a file, and lets a pipe be opened to be refused.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _NotThere(str(path)) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError("it is no file")
    return os.fdopen(handle, "rb")


def seen_as(digest: str, found: os.stat_result) -> tuple[str, int, int, int, int, int]:
    """What the file system says of a blob's file; the same again where nothing was changed."""
    return digest, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _fill(file: BufferedReader, buffer: memoryview) -> int:
    """Read until `buffer` is full or the file ends; returns how many bytes there were."""
    at = 0
    while at < len(buffer) and (got := file.raw.readinto(buffer[at:])):
        at += got
    return at


def _write_through(path: Path, chunks: Iterable[bytes]) -> str:
    """Write to the disk itself; returns the SHA-256 of what was written."""
    hasher = hashlib.sha256()
    with path.open("wb") as file:
        for chunk in chunks:
            hasher.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return hasher.hexdigest()


def _flush_folder(folder: Path) -> None:
    """Make a new name survive a power cut, where the file system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
