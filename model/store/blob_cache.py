"""A folder of fetched blobs that all processes of a node share: the layout of a local store, with a size limit.

blobs/sha256/<digest>   complete blobs, verified again by each process that opens one
partial/<digest>        an unfinished blob: its bytes, then one byte for each part, 1 once the part is complete
runtime-caches/<name>   kernels that were compiled on this machine; see model/engines/tensorrt/runtime_caches.py
users/<random>          the digests that one process has pinned; locked for as long as its `BlobCache` lives
lock                    held while space is made or a blob is pinned

One process fetches a blob and holds the lock of its partial file; the others wait for it. All locks are flock(2) locks,
which end with the process. So a killed process leaves nothing locked, and the next one keeps the complete parts.

When space is needed, the least recently used files are deleted first, but no blob that a live process has pinned. A
load pins each blob before it looks for it. The blobs of an adapter are unpinned when they have been copied, all others
when the store is closed, and may then be deleted. A server with adapters or with several releases keeps its store open.

Nothing is flushed to the disk. Every reader verifies a blob, and fetches it again if a power failure damaged it.
"""

import errno
import fcntl
import os
import shutil
import stat
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from model.errors import CorruptBlob, StoreError
from model.store.local import LocalStore, fingerprint
from model.store.manifest import Blob
from model.store.sink import Sink

RUNTIME_CACHES = "runtime-caches"
_STALE_SECONDS = 24 * 3600  # age at which an unused partial blob is deleted whenever space is made
_CREATE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
# Mode of files that are locked. Another user who could open one, even to read, could hold its lock and block all loads.
_LOCKED_FILE_MODE = 0o600
_BLOB_MODE = 0o644  # of complete blobs
_DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# An entry is a link, a pipe, a file or a folder where the cache has another kind of entry.
_WRONG_TYPE_ERRNOS = {errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.EINVAL, errno.ENXIO}


class PartialBlob:
    """An unfinished blob, locked for one fetcher: `parts` of `part_bytes` each, the last of which may be shorter."""

    def __init__(self, handle: int, size: int, part_bytes: int) -> None:
        self.handle = handle
        self.size = size
        self.part_bytes = part_bytes
        self.parts = max(1, -(-size // part_bytes))

    def span(self, part: int) -> tuple[int, int]:
        """Return the offsets of a part's first byte and of the byte after its last."""
        return part * self.part_bytes, min(self.size, (part + 1) * self.part_bytes)

    def missing(self) -> list[int]:
        """Return the parts that are not complete."""
        done = os.pread(self.handle, self.parts, self.size)
        return [part for part in range(self.parts) if done[part : part + 1] != b"\1"]

    def write(self, at: int, data: bytes) -> None:
        """Write all of `data` at offset `at`."""
        view = memoryview(data)
        while view:
            count = os.pwrite(self.handle, view, at)
            view, at = view[count:], at + count

    def read(self, at: int, into: memoryview) -> None:
        """Fill `into` with the bytes from offset `at` on, whose parts must be complete."""
        while into and (count := os.preadv(self.handle, [into], at)):
            into, at = into[count:], at + count

    def finish(self, part: int) -> None:
        """Mark a part as complete. Call it after its bytes are written."""
        self.write(self.size + part, b"\1")

    def clear(self) -> None:
        """Mark all parts as missing."""
        self.write(self.size, bytes(self.parts))


class BlobCache(LocalStore):
    """A local store whose missing blobs are fetched by `fetch_blob`. `limit` in bytes; None: the size of the disk."""

    def __init__(self, root: Path, limit: int | None = None) -> None:
        super().__init__(root)
        self.limit = limit
        self._blobs = self.root / "blobs" / "sha256"
        self._partials = self.root / "partial"
        self._users = self.root / "users"
        self._pinned: set[str] = set()
        self._in_use: Counter[str] = Counter()  # threads that fetch or read a blob
        self._touched: set[str] = set()
        self._pinning = Lock()
        with self._as_store_error():
            self.root.mkdir(parents=True, exist_ok=True)
            _check_owner(self.root)
            for folder in (self._blobs, self._partials, self._users):
                folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                # Created and locked at once, so that no other process deletes it as the file of a dead process.
                path = self._users / uuid.uuid4().hex
                self._user = os.open(path, _CREATE | os.O_EXCL, _LOCKED_FILE_MODE)
                fcntl.flock(self._user, fcntl.LOCK_EX)
        self._release = weakref.finalize(self, _unregister, self._user, path)

    def close(self) -> None:
        """Unpin all blobs."""
        self._release()

    # -- use -----------------------------------------------------------------------------------------------------

    def pin(self, digest: str) -> None:
        """Keep every process from evicting this blob until this cache is closed."""
        self._blob_path(digest)  # raises for an invalid digest
        with self._pinning:
            if digest not in self._pinned:
                with self._as_store_error(), self._locked():
                    os.pwrite(self._user, _line(digest).encode(), len(self._pinned) * len(_line(digest)))
                self._pinned.add(digest)

    def unpin(self, blobs: Iterable[Blob]) -> None:
        """Let every process evict these blobs, but for those that another thread of this process fetches or reads."""
        with self._pinning, self._as_store_error(), self._locked():
            pinned = self._pinned - {blob.sha256 for blob in blobs if not self._in_use[blob.sha256]}
            text = "".join(map(_line, pinned)).encode()
            os.pwrite(self._user, text, 0)  # before the file is cut: a full disk has no space for what was cut off
            os.ftruncate(self._user, len(text))
            self._pinned = pinned

    @contextmanager
    def _using(self, digest: str) -> Iterator[None]:
        """Pin a blob, and keep it pinned within a `with` statement."""
        with self._pinning:
            self._in_use[digest] += 1
        try:
            self.pin(digest)
            yield
        finally:
            with self._pinning:
                self._in_use[digest] -= 1

    def fetch_blob(self, digest: str, size: int, part_bytes: int, fill: Callable[[PartialBlob], None]) -> Path:
        """Return the verified file of a blob. `fill`: see `fetch_missing`."""
        self.pin(digest)
        while (path := self._cached(digest, size)) is None:
            if self.fetch_missing(digest, size, part_bytes, fill):
                return self._blob_path(digest)
        return path

    def fetch_missing(self, digest: str, size: int, part_bytes: int, fill: Callable[[PartialBlob], None]) -> bool:
        """Pin and fetch a blob. Returns False if another process may have fetched it while this one waited.

        `fill` fetches the missing parts, in one process at a time. It verifies the SHA-256 and raises CorruptBlob.
        """
        with self._using(digest), self._as_store_error(), self._partial(digest, size, part_bytes) as partial:
            if partial is None:
                return False
            fill(partial)
            os.ftruncate(partial.handle, size)
            os.fchmod(partial.handle, _BLOB_MODE)
            os.replace(self._partials / digest, self._blob_path(digest))
            self._touched.add(digest)
            # `fill` has hashed the bytes of this very file.
            self._verified.add(fingerprint(digest, os.fstat(partial.handle)))
            return True

    def stream_cached(self, digest: str, size: int, sink: Sink, trust_verified: bool = True) -> bool:
        """Stream a cached blob in one pass. Returns False if it was missing, or damaged and therefore deleted.

        `trust_verified`: do not hash a file that this process has verified before and that has not changed since.
        """
        with self._using(digest):
            if self.has(digest):
                with self._deleting_damaged(digest):
                    self._stream(digest, size, sink, trust_verified)
                    return True
        return False

    def _cached(self, digest: str, size: int) -> Path | None:
        """Return the verified file of a cached blob, or None if it is missing, or damaged and therefore deleted."""
        if self.has(digest):
            with self._deleting_damaged(digest):
                return self.get(digest, size)
        return None

    @contextmanager
    def _deleting_damaged(self, digest: str) -> Iterator[None]:
        """Record the use of a blob. On CorruptBlob, delete the file unless another process has already replaced it."""
        self._touch(digest)
        before = self._file_identity(digest)
        try:
            yield
        except CorruptBlob:
            with self._as_store_error():
                if before is not None and self._file_identity(digest) == before:
                    self._blob_path(digest).unlink(missing_ok=True)

    def _file_identity(self, digest: str) -> tuple[int, int] | None:
        """Return inode and write time of a blob's file. An inode number alone may be reused."""
        try:
            status = self._blob_path(digest).stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _touch(self, digest: str) -> None:
        """Record the use of a blob in its access time.

        Done once, before the blob is verified, because `get` hashes a file again after its times change.
        """
        if digest in self._touched:
            return
        self._touched.add(digest)
        with suppress(OSError):
            path = self._blob_path(digest)
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))

    @contextmanager
    def _partial(self, digest: str, size: int, part_bytes: int) -> Iterator[PartialBlob | None]:
        """Wait for the lock of a blob's partial file and yield the file at its full length.

        Yields None if another process finished or evicted it meanwhile.
        """
        path = self._partials / digest
        handle = _open_regular(path)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if not _same_inode(handle, path):
                yield None
                return
            if self.has(digest):
                # Deleted before the blob is hashed, so that a process killed meanwhile leaves nothing behind.
                path.unlink()
                yield None
                return
            partial = PartialBlob(handle, size, part_bytes)
            try:
                self._reserve(partial)
                yield partial
            except BaseException as error:
                # On a full disk no partial blob is kept. Otherwise a file with at least one complete part is kept.
                full = isinstance(error, OSError) and error.errno in _DISK_FULL_ERRNOS
                if full or isinstance(error, CorruptBlob) or len(partial.missing()) == partial.parts:
                    path.unlink()
                raise
        finally:
            os.close(handle)

    # -- space ---------------------------------------------------------------------------------------------------

    def _reserve(self, partial: PartialBlob) -> None:
        """Extend a partial file to its full length, evicting other blobs. Raises StoreError for lack of space."""
        length = partial.size + partial.parts
        if os.fstat(partial.handle).st_size == length:
            return
        os.ftruncate(partial.handle, 0)
        with self._locked():
            if self.limit is not None:
                excess = sum(size for _, size, _ in self._contents()) + length - self.limit
                if excess > 0 and self._evict(excess) < excess:
                    raise StoreError(
                        f"The cache {self.root} is limited to {self.limit} bytes. Running processes use so much of it "
                        f"that a blob of {partial.size} bytes does not fit.",
                        "Raise cache_bytes (PREHEAT_CACHE_BYTES).",
                    )
            # Sparse: other processes see the length that this one is about to allocate.
            os.ftruncate(partial.handle, length)
        try:
            _allocate(partial.handle, length)
        except OSError as error:
            if error.errno not in _DISK_FULL_ERRNOS:
                raise
            with self._locked():
                if not self._evict(max(1, length - shutil.disk_usage(self.root).free)):
                    raise
            _allocate(partial.handle, length)

    def _contents(self) -> list[tuple[Path, int, float]]:
        """Return path, bytes and time of last use of all complete and partial blobs, and of kept kernels."""
        entries = []
        folders = [self._partials, self._blobs]
        kernels = self.root / RUNTIME_CACHES
        if kernels.is_dir() and not kernels.is_symlink():  # it exists once TensorRT-RTX has compiled some
            folders.append(kernels)
        for folder in folders:
            for path in folder.iterdir():
                with suppress(FileNotFoundError):
                    status = path.stat()
                    # The later of both times, for files that were only written and for disks without access times.
                    entries.append((path, status.st_size, max(status.st_atime, status.st_mtime)))
        return entries

    def _evict(self, needed: int) -> int:
        """Delete kernels and unpinned blobs, least recently used first, until `needed` bytes are free.

        Returns the bytes freed. The caller holds the lock of the folder.
        """
        pinned = self._pinned_anywhere()
        freed = 0
        stale_before = time.time() - _STALE_SECONDS
        for path, size, used_at in sorted(self._contents(), key=lambda entry: entry[2]):
            # A partial blob that is being fetched is pinned, too, because its fetcher pinned it first.
            stale = path.parent == self._partials and used_at < stale_before
            if path.name in pinned or (freed >= needed and not stale):
                continue
            with suppress(FileNotFoundError):
                path.unlink()
                freed += size
        return freed

    def _pinned_anywhere(self) -> set[str]:
        """Return what live processes have pinned. Files of dead processes are deleted."""
        pinned: set[str] = set()
        for path in self._users.iterdir():
            with suppress(FileNotFoundError):
                if not _unlink_unlocked(path):
                    pinned.update(path.read_text().split())
        return pinned

    @contextmanager
    def _locked(self) -> Iterator[None]:
        handle = _open_regular(self.root / "lock")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    @contextmanager
    def _as_store_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            or_other = "or name another folder (PREHEAT_CACHE_DIR, cache_dir in config.yaml, --cache-dir)."
            if error.errno in _DISK_FULL_ERRNOS:
                raise StoreError(
                    f"The cache {self.root} is full ({error.strerror}).", f"Free space on that disk, {or_other}"
                ) from error
            entry = Path(str(error.filename2 or error.filename))
            if error.errno in _WRONG_TYPE_ERRNOS and self.root in entry.parents:
                raise StoreError(
                    f"The cache {self.root} cannot be used, because of {entry} in it: {error.strerror}.",
                    f"Remove that entry, {or_other}",
                ) from error
            raise StoreError(
                f"The cache {self.root} cannot be used: {error.strerror or error}.",
                f"Make it a writable folder, {or_other}",
            ) from error


def _line(digest: str) -> str:
    return f"{digest}\n"


def _unregister(handle: int, path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
    os.close(handle)


def _check_owner(root: Path) -> None:
    """Raise PermissionError for another user's folder: that user could replace blobs between check and use.

    A link to the root is followed, because the deployment itself names it.
    """
    owner = root.stat().st_uid
    if owner not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, f"it belongs to user {owner}, who could replace verified blobs")


def _open_regular(path: Path, flags: int = _CREATE) -> int:
    """Open a file of the cache for writing. Raises OSError for a link, which could lead anywhere, and for a pipe."""
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, _LOCKED_FILE_MODE)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    with suppress(OSError):  # earlier versions left it readable
        os.fchmod(handle, _LOCKED_FILE_MODE)
    return handle


def _same_inode(handle: int, path: Path) -> bool:
    """True if the open file is still the file at `path`."""
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    opened = os.fstat(handle)
    return (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino)


def _unlink_unlocked(path: Path) -> bool:
    """Delete a file that no process has locked, and return True if it was deleted.

    The lock is held meanwhile, so a process that waits for it sees the deletion.
    """
    handle = _open_regular(path, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if unlocked := _same_inode(handle, path):
            path.unlink()
        return unlocked
    except BlockingIOError:
        return False
    finally:
        os.close(handle)


def _allocate(handle: int, length: int) -> None:
    """Allocate the space now, so that a full disk is found before anything is fetched."""
    try:
        os.posix_fallocate(handle, 0, length)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
