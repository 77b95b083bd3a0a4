"""A folder of fetched blobs, shared by all processes of a node: the layout of a local store, with a bound on its size.

blobs/sha256/<digest>   whole, verified blobs; verified again by each process that opens one
partial/<digest>        a blob on its way: its bytes, then one byte for each part, 1 where the part is there
users/<random>          the digests that one process uses, held locked for as long as its `BlobCache` lives
lock                    held for the moment in which room is made or a use is noted

One process fetches a blob (it holds the lock of the partial file) and the others wait for it. All locks are flock(2)'s,
which end with the process however it ends, so a killed one leaves nothing held, and the next goes on with its parts.

Least recently used blobs go first when room is needed, but none that a live process has noted: a load notes every blob
before it looks whether it is there, and its note lasts until the store it was opened with is given up. A blob that was
mapped may go after that: the file system keeps a mapped file's bytes.

Nothing is flushed to the disk: what a power cut damages, the next reader's check finds, and fetches again.
"""

import errno
import fcntl
import os
import shutil
import stat
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from model.errors import CorruptBlob, StoreError
from model.store.local import LocalStore, seen_as
from model.store.sink import Sink

_STALE = 24 * 3600  # seconds after which a partial blob that nobody fetches is not worth its room
_OURS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Partial:
    """A blob on its way, locked for one fetcher. `parts` of `part_bytes` each; the last may be shorter."""

    def __init__(self, handle: int, size: int, part_bytes: int) -> None:
        self.handle = handle
        self.size = size
        self.part_bytes = part_bytes
        self.parts = max(1, -(-size // part_bytes))

    def span(self, part: int) -> tuple[int, int]:
        """First byte of a part and the one behind its last."""
        return part * self.part_bytes, min(self.size, (part + 1) * self.part_bytes)

    def missing(self) -> list[int]:
        """The parts that are not there yet."""
        done = os.pread(self.handle, self.parts, self.size)
        return [part for part in range(self.parts) if done[part : part + 1] != b"\1"]

    def write(self, at: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self.handle, view, at)
            view, at = view[count:], at + count

    def read(self, at: int, into: memoryview) -> None:
        """Fill a buffer with the bytes from `at` on, which are there."""
        while into and (got := os.preadv(self.handle, [into], at)):
            into, at = into[got:], at + got

    def finish(self, part: int) -> None:
        """Say that a part is there; called after its bytes were written."""
        self.write(self.size + part, b"\1")

    def forget(self) -> None:
        """No part is there."""
        self.write(self.size, bytes(self.parts))


class BlobCache(LocalStore):
    """`get` and `read` as a local store's; `bring` fetches what is not there. `limit` in bytes; None: the disk's."""

    def __init__(self, root: Path, limit: int | None = None) -> None:
        super().__init__(root)
        self.limit = limit
        self._blobs = self.root / "blobs" / "sha256"
        self._partials = self.root / "partial"
        self._users = self.root / "users"
        self._used: set[str] = set()
        self._touched: set[str] = set()
        self._noting = Lock()
        with self._guarded():
            self.root.mkdir(parents=True, exist_ok=True)
            _refuse_strangers(self.root)
            for folder in (self._blobs, self._partials, self._users):
                folder.mkdir(parents=True, exist_ok=True)
            with self._alone():
                # Made and locked while nobody looks for users that are gone.
                path = self._users / uuid.uuid4().hex
                self._user = os.open(path, _OURS | os.O_EXCL | os.O_APPEND, 0o644)
                fcntl.flock(self._user, fcntl.LOCK_EX)
        self._release = weakref.finalize(self, _leave, self._user, path)

    def close(self) -> None:
        """Give up the notes of use."""
        self._release()

    # -- use -----------------------------------------------------------------------------------------------------

    def note(self, digest: str, size: int) -> None:
        """From now on no process evicts this blob, until this cache is closed."""
        self._blob_path(digest)  # raises for what is no digest
        with self._noting:
            if digest not in self._used:
                with self._guarded(), self._alone():
                    os.write(self._user, f"{digest}\n".encode())
                self._used.add(digest)

    def bring(self, digest: str, size: int, part_bytes: int, fill: Callable[[Partial], None]) -> Path:
        """The verified file of a blob. Where it is not there, `fill` fetches what is missing of it and checks its
        SHA-256 (raising CorruptBlob), by one process at a time."""
        self.note(digest, size)
        target = self._blob_path(digest)
        while (path := self._kept(digest, size)) is None:
            with self._guarded(), self._partial(digest, size, part_bytes) as partial:
                if partial is None:
                    continue  # another process may have been the one to fetch it
                fill(partial)
                os.ftruncate(partial.handle, size)
                os.replace(self._partials / digest, target)
                found = os.fstat(partial.handle)
                self._touched.add(digest)
                # `fill` has hashed the bytes of this very file.
                self._verified.add(seen_as(digest, found))
                return target
        return path

    def stream_kept(self, digest: str, size: int, sink: Sink) -> bool:
        """`stream` of a blob that is here, hashed once; False where it is not, or is damaged and so deleted."""
        self.note(digest, size)
        if not self.has(digest):
            return False
        self._touch(digest)
        found = self._file(digest)
        try:
            self.stream(digest, size, sink)
        except CorruptBlob:
            self._delete(digest, found)
            return False
        return True

    def _kept(self, digest: str, size: int) -> Path | None:
        """The verified file of a blob that is here; a damaged one is deleted."""
        if not self.has(digest):
            return None
        self._touch(digest)
        found = self._file(digest)
        try:
            return self.get(digest, size)
        except CorruptBlob:
            self._delete(digest, found)
            return None

    def _file(self, digest: str) -> tuple[int, int] | None:
        """What tells a blob's file from another that takes its place: its inode, which may be given again, and when it
        was written."""
        try:
            status = self._blob_path(digest).stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _delete(self, digest: str, found: tuple[int, int] | None) -> None:
        """Delete a damaged blob, the file `found`; not one that another process has brought in its place."""
        with self._guarded():
            if found is not None and self._file(digest) == found:
                self._blob_path(digest).unlink(missing_ok=True)

    def _touch(self, digest: str) -> None:
        """Note when a blob was last used, in its time of access. Once, and before it is verified: what changes a
        file's times makes `get` hash it again."""
        if digest in self._touched:
            return
        self._touched.add(digest)
        with suppress(OSError):
            path = self._blob_path(digest)
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))

    @contextmanager
    def _partial(self, digest: str, size: int, part_bytes: int) -> Iterator[Partial | None]:
        """The partial file of a blob, of its full length and locked. Waits for whoever has it; None where it was
        finished, or evicted, meanwhile."""
        path = self._partials / digest
        handle = _open_ours(path)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if not _is_still(handle, path):
                yield None
                return
            if self.has(digest):
                # Deleted before anything is hashed: a process that is killed meanwhile leaves nothing behind.
                path.unlink()
                yield None
                return
            partial = Partial(handle, size, part_bytes)
            try:
                self._reserve(partial)
                yield partial
            except BaseException as error:
                # What is full must not stay full of halves; else only what holds no part is not worth keeping.
                full = isinstance(error, OSError) and error.errno in _FULL
                if full or isinstance(error, CorruptBlob) or len(partial.missing()) == partial.parts:
                    path.unlink()
                raise
        finally:
            os.close(handle)

    # -- room ----------------------------------------------------------------------------------------------------

    def _reserve(self, partial: Partial) -> None:
        """Give a partial file its full length, evicting others for it. Raises StoreError where it cannot be."""
        length = partial.size + partial.parts
        if os.fstat(partial.handle).st_size == length:
            return
        os.ftruncate(partial.handle, 0)
        with self._alone():
            if self.limit is not None:
                over = sum(size for _, size, _ in self._contents()) + length - self.limit
                if over > 0 and self._evict(over) < over:
                    raise StoreError(
                        f"The cache {self.root} may hold {self.limit} bytes, and what running processes use of it "
                        f"leaves no room for a blob of {partial.size}: raise cache_bytes (PREHEAT_CACHE_BYTES)."
                    )
            # Sparse, so that the next to look sees what we are about to take.
            os.ftruncate(partial.handle, length)
        try:
            _allocate(partial.handle, length)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            with self._alone():
                if not self._evict(max(1, length - shutil.disk_usage(self.root).free)):
                    raise
            _allocate(partial.handle, length)

    def _contents(self) -> list[tuple[Path, int, float]]:
        """Blobs and partial ones: path, bytes, when it was used last."""
        found = []
        for folder in (self._partials, self._blobs):
            for path in folder.iterdir():
                with suppress(FileNotFoundError):
                    status = path.stat()
                    # The later one, for a file that was only written, or lies where times of access cannot be set.
                    found.append((path, status.st_size, max(status.st_atime, status.st_mtime)))
        return found

    def _evict(self, needed: int) -> int:
        """Delete what nobody uses, least recently used first, until `needed` bytes are free; returns how many are.
        The caller holds the lock of the folder."""
        used = self._in_use()
        freed = 0
        day_ago = time.time() - _STALE
        for path, size, last in sorted(self._contents(), key=lambda entry: entry[2]):
            # A half that is being fetched is in use, too: its fetcher noted it first.
            stale = path.parent == self._partials and last < day_ago
            if path.name in used or (freed >= needed and not stale):
                continue
            with suppress(FileNotFoundError):
                path.unlink()
                freed += size
        return freed

    def _in_use(self) -> set[str]:
        """What live processes have noted; the notes of dead ones are deleted."""
        used: set[str] = set()
        for path in self._users.iterdir():
            with suppress(FileNotFoundError):
                if not _unlink_idle(path):
                    used.update(path.read_text().split())
        return used

    @contextmanager
    def _alone(self) -> Iterator[None]:
        handle = _open_ours(self.root / "lock")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise StoreError(
                    f"The cache {self.root} is full ({error.strerror}): make room on that disk, or name a folder on "
                    "another (PREHEAT_CACHE_DIR, cache_dir in config.yaml, --cache-dir)."
                ) from error
            raise StoreError(
                f"The cache {self.root} cannot be used: {error.strerror or error}. Make it a folder that can be "
                "written, or name another (PREHEAT_CACHE_DIR, cache_dir in config.yaml, --cache-dir)."
            ) from error


def _leave(handle: int, path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
    os.close(handle)


def _refuse_strangers(root: Path) -> None:
    """A folder of another user's is no cache: what was verified in it could be swapped before it is used. (Two names
    for one folder are fine: a link to the root is the deployment's own.)"""
    owner = root.stat().st_uid
    if owner not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, f"it belongs to user {owner}, who could change what was verified in it")


def _open_ours(path: Path, flags: int = _OURS) -> int:
    """Open a file of the cache to write to it. A link could lead anywhere, and a pipe would hang: OSError."""
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, f"{path.name[:80]} in it is no file")
    return handle


def _is_still(handle: int, path: Path) -> bool:
    """Whether an opened file is the one of that name."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    ours = os.fstat(handle)
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)


def _unlink_idle(path: Path) -> bool:
    """Delete a file whose lock nobody holds, while holding it: who waits for it sees that it has gone."""
    handle = _open_ours(path, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if idle := _is_still(handle, path):
            path.unlink()
        return idle
    except BlockingIOError:
        return False
    finally:
        os.close(handle)


def _allocate(handle: int, length: int) -> None:
    """Take the room now, so that a disk too small is found before anything is fetched."""
    try:
        os.posix_fallocate(handle, 0, length)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
