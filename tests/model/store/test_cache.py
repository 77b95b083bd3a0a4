"""The cache folder: limited, shared by processes, never with a wrong blob. Needs no object store."""

import errno
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from model.errors import CorruptBlob, StoreError
from model.store.blob_cache import BlobCache, PartialBlob
from model.store.manifest import Blob
from tests.model.store.processes import finish, own_mounts, python
from tests.support.cached_blobs import PART, Fill, blob_of, bytes_read, fetch, file_names, fill_with


def fail_after(parts: int, data: bytes, error: Exception) -> Fill:
    """Return a function that writes some missing parts, then raises `error`."""

    def fill(partial: PartialBlob) -> None:
        for part in partial.missing()[:parts]:
            at, end = partial.span(part)
            partial.write(at, data[at:end])
            partial.finish(part)
        raise error

    return fill


def never(partial: PartialBlob) -> None:
    raise AssertionError("the blob is cached")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


# -- fetching -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, PART, PART + 1, 10 * PART])
def test_blob_is_fetched_once(root: Path, size: int) -> None:
    cache = BlobCache(root)
    digest, data = blob_of("a", size)
    parts: list[int] = []
    path = cache.fetch_blob(digest, size, PART, fill_with(data, parts))
    assert path.read_bytes() == data and parts == list(range(max(1, -(-size // PART))))
    assert cache.fetch_blob(digest, size, PART, never) == path == BlobCache(root).fetch_blob(digest, size, PART, never)
    assert not file_names(root, "partial")


def test_fetched_blob_is_not_hashed_again(root: Path) -> None:
    cache, size = BlobCache(root), 1_000_000
    fetch(cache, "a", size)
    before = bytes_read()
    for _ in range(2):
        cache.fetch_blob(blob_of("a", size)[0], size, PART, never)
    assert bytes_read() - before < size


def test_partial_blob_is_resumed(root: Path) -> None:
    digest, data = blob_of("a")
    with pytest.raises(StoreError, match="cut"):
        BlobCache(root).fetch_blob(digest, len(data), PART, fail_after(3, data, StoreError("cut")))
    assert file_names(root, "partial") == {digest} and not file_names(root)
    parts: list[int] = []
    assert BlobCache(root).fetch_blob(digest, len(data), PART, fill_with(data, parts)).read_bytes() == data
    assert parts == [3, 4, 5, 6, 7, 8, 9]


def test_foreign_partial_blob_is_restarted(root: Path) -> None:
    """Another version left other parts, or a process was killed between its last two steps."""
    digest, data = blob_of("a")
    for content in (b"", data, data + b"\1" * 3, b"x" * 50_000, b"\1" * 50_000):
        cache = BlobCache(root)
        (root / "partial" / digest).write_bytes(content)
        assert cache.fetch_blob(digest, len(data), PART, fill_with(data)).read_bytes() == data
        cache.get(digest, len(data)).unlink()


def test_failed_fetch_leaves_nothing(root: Path) -> None:
    """Without a first part, with wrong bytes, or if the disk fills up."""
    digest, data = blob_of("a")
    full = OSError(errno.ENOSPC, "No space left on device")
    failures = (0, StoreError("cut"), "cut"), (9, CorruptBlob("wrong"), "wrong"), (3, full, "is full")
    for parts, error, words in failures:
        with pytest.raises(StoreError, match=words):
            BlobCache(root).fetch_blob(digest, len(data), PART, fail_after(parts, data, error))
        assert not file_names(root) and not file_names(root, "partial")


def test_damaged_blob_is_fetched_again(root: Path) -> None:
    digest, data = blob_of("a")
    for damage in (b"b" * len(data), data[:-1], b"", data + b"a"):
        path = fetch(BlobCache(root), "a")
        path.write_bytes(damage)
        assert BlobCache(root).fetch_blob(digest, len(data), PART, fill_with(data)).read_bytes() == data


# -- several users ------------------------------------------------------------------------------------------------


def test_one_thread_fetches_and_others_wait(root: Path) -> None:
    cache = BlobCache(root)
    digest, data = blob_of("a")
    filled: list[int] = []
    together = Barrier(4)

    def fetch_with_others(_: int) -> Path:
        together.wait(60)
        return cache.fetch_blob(digest, len(data), PART, fill_with(data, filled))

    with ThreadPoolExecutor(4) as threads:
        [path] = set(threads.map(fetch_with_others, range(4)))
    assert path.read_bytes() == data and filled == list(range(10)) and not file_names(root, "partial")


def fetch_in_turn(root: Path, letters: str, limit: int, log: Path) -> None:
    """Fetch blobs, each with a cache of its own. Appends the letters of those that this process fetched to `log`."""
    for letter in letters:
        digest, data = blob_of(letter)
        cache = BlobCache(root, limit)

        def fill(partial: PartialBlob, letter: str = letter, data: bytes = data) -> None:
            with log.open("a") as file:
                file.write(letter)
            fill_with(data)(partial)

        path = cache.fetch_blob(digest, len(data), PART, fill)
        assert path.read_bytes() == data, "a blob in use was evicted"
        cache.close()


@pytest.mark.parametrize(("letters", "limit"), [("abcdefgh", 10**9), (2 * "abcdefgh", 45_000)], ids=["all", "evicted"])
def test_processes_fetch_each_blob_once_and_keep_the_limit(
    root: Path, tmp_path: Path, letters: str, limit: int
) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=fetch_in_turn, args=(root, letters, limit, tmp_path / "log")) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert limit < 10**9 or sorted((tmp_path / "log").read_text()) == sorted(letters)
    assert sum(path.stat().st_size for path in (root / "blobs").rglob("*") if path.is_file()) <= limit


def test_late_process_deletes_its_partial_before_it_hashes(root: Path) -> None:
    """Another process finishes the blob after this one found it missing, and before this one locks its partial file."""
    partials_while_hashing: list[set[str]] = []

    class Late(BlobCache):
        def has(self, digest: str) -> bool:
            found = super().has(digest)
            if not found:
                fetch(BlobCache(root), "a")
            return found

        def get(self, digest: str, size: int) -> Path:
            partials_while_hashing.append(file_names(root, "partial"))
            return super().get(digest, size)

    digest, data = blob_of("a")
    assert Late(root).fetch_blob(digest, len(data), PART, never).read_bytes() == data
    assert partials_while_hashing == [set()]


def test_touch_by_another_process_is_not_damage(root: Path) -> None:
    """The touch changes the file's times while this process streams a blob that it has verified before."""
    cache = BlobCache(root)
    digest, data = blob_of("a")
    path = fetch(cache, "a")
    received, touched = bytearray(), list[int]()

    class Sink:
        def buffer(self, at: int) -> memoryview:
            return memoryview(bytearray(PART))

        def filled(self, at: int, data: memoryview) -> None:
            if at == PART and not touched:
                os.utime(path)
                touched.append(at)
            del received[at:]
            received.extend(data)

    assert cache.stream_cached(digest, len(data), Sink())
    assert touched and bytes(received) == data and path.exists()


def test_blob_that_another_process_replaced_is_not_deleted(root: Path) -> None:
    """The other process replaces a damaged blob while this one hashes it."""
    digest, data = blob_of("a")
    fetch(BlobCache(root), "a").write_bytes(b"b" * len(data))

    class Slow(BlobCache):
        replaced = False

        def get(self, digest: str, size: int) -> Path:
            try:
                return super().get(digest, size)
            finally:
                if not self.replaced:
                    self.replaced = True
                    fetch(BlobCache(root), "a")

    cache = Slow(root)
    assert cache.fetch_blob(digest, len(data), PART, never).read_bytes() == data and cache.replaced


# -- space --------------------------------------------------------------------------------------------------------


def age(path: Path, seconds: int) -> None:
    """Set the file's times as if its last use was that long ago."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns - seconds * 10**9, status.st_mtime_ns - seconds * 10**9))


class Unread(BlobCache):
    """Reads no file, as on a disk that keeps no access times."""

    def get(self, digest: str, size: int) -> Path:
        return self.root / "blobs" / "sha256" / digest


def test_least_recently_used_is_evicted_first(root: Path) -> None:
    earlier = BlobCache(root, 35_000)
    for letter, ago in (("a", 300), ("b", 200), ("c", 100)):
        age(fetch(earlier, letter), ago)
    earlier.close()
    user = Unread(root, 35_000)
    fetch(user, "a")
    user.close()
    fetch(BlobCache(root, 35_000), "d")
    assert file_names(root) == {blob_of(letter)[0] for letter in "acd"}


def test_unpinned_blobs_are_evicted(root: Path) -> None:
    """The others stay pinned, also those that are pinned later."""
    cache = BlobCache(root, 45_000)
    for letter in "abc":
        fetch(cache, letter)
    cache.unpin([Blob(sha256=blob_of(letter)[0], bytes=10_000) for letter in "ab"])
    fetch(cache, "d")
    other = BlobCache(root, 45_000)
    for letter in "ef":
        fetch(other, letter)
    assert file_names(root) == {blob_of(letter)[0] for letter in "cdef"}
    with pytest.raises(StoreError):
        fetch(other, "g")


def test_pinned_blob_is_not_evicted(root: Path) -> None:
    user, other = BlobCache(root, 35_000), BlobCache(root, 35_000)
    age(fetch(user, "a"), 300)
    age(fetch(user, "b"), 200)
    fetch(other, "c")
    other.close()
    fetch(BlobCache(root, 35_000), "d")
    assert file_names(root) == {blob_of(letter)[0] for letter in "abd"}


def test_kept_kernels_count_and_are_evicted_in_turn(tmp_path: Path) -> None:
    for ago, kernels_stay in ((300, False), (100, True)):
        root = tmp_path / str(ago)
        cache = BlobCache(root, 25_000)
        age(fetch(cache, "a"), 200)
        cache.close()
        kernels = root / "runtime-caches" / "kernels"
        kernels.parent.mkdir()
        kernels.write_bytes(bytes(10_000))
        age(kernels, ago)
        fetch(BlobCache(root, 25_000), "b")
        assert kernels.exists() == kernels_stay == (blob_of("a")[0] not in file_names(root))


def test_kernels_behind_a_link_are_not_evicted(root: Path, tmp_path: Path) -> None:
    """The link may lead to a folder of other files."""
    cache = BlobCache(root, 15_000)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_bytes(bytes(10_000))
    (root / "runtime-caches").symlink_to(tmp_path / "other")
    fetch(cache, "a")
    assert (tmp_path / "other" / "file").exists()


def test_blob_of_killed_process_is_evicted(root: Path) -> None:
    script = """
        import os, signal, sys
        from pathlib import Path
        from model.store.blob_cache import BlobCache
        from tests.support.cached_blobs import fetch
        cache = BlobCache(Path(sys.argv[1]), 25_000)
        fetch(cache, "a")
        fetch(cache, "b")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    process = python(script, root)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == -9, error
    assert len(file_names(root, "users")) == 1
    cache = BlobCache(root, 25_000)
    fetch(cache, "c")
    assert blob_of("c")[0] in file_names(root) and len(file_names(root)) == 2
    assert len(file_names(root, "users")) == 1


def test_refuses_blob_that_does_not_fit(root: Path) -> None:
    cache = BlobCache(root, 25_000)
    fetch(cache, "a")
    fetch(cache, "b")
    with pytest.raises(
        StoreError, match=r"limited to 25000 bytes.*blob of 10000 bytes does not fit. Raise cache_bytes"
    ):
        fetch(cache, "c")
    with pytest.raises(StoreError, match="limited to 100 bytes"):
        fetch(BlobCache(root.with_name("other"), 100), "a")
    assert file_names(root) == {blob_of(letter)[0] for letter in "ab"} and not file_names(root, "partial")


def test_unused_partial_blob_is_evicted(root: Path) -> None:
    digest, data = blob_of("a")
    earlier = BlobCache(root, 15_000)
    with pytest.raises(StoreError):
        earlier.fetch_blob(digest, len(data), PART, fail_after(3, data, StoreError("cut")))
    earlier.close()
    fetch(BlobCache(root, 15_000), "b")
    assert not file_names(root, "partial") and file_names(root) == {blob_of("b")[0]}


FULL_DISK = """
    import os, subprocess, sys
    from pathlib import Path
    from model.errors import StoreError
    from model.store.blob_cache import BlobCache
    from tests.support.cached_blobs import blob_of, fetch, file_names

    root = Path(sys.argv[1])
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(root)], check=True)
    cache = BlobCache(root)
    fetch(cache, "a", 100_000)
    try:
        fetch(cache, "b", 100_000)
    except StoreError as error:
        print(error)
    assert file_names(root) == {blob_of("a", 100_000)[0]} and not file_names(root, "partial")
    assert fetch(cache, "c", 10_000).stat().st_size == 10_000
    cache.close()
    fetch(BlobCache(root), "b", 100_000)
    assert file_names(root) == {blob_of(*blob)[0] for blob in (("b", 100_000), ("c", 10_000))}
"""


def test_full_disk_is_reported_and_unpinned_blobs_evicted(root: Path) -> None:
    """Once "a" is not pinned, it is evicted for "b". "c" was used later and stays."""
    [message] = finish(python(FULL_DISK, root, prefix=own_mounts())).splitlines()
    assert message == (
        f"The cache {root} is full (No space left on device). Free space on that disk, or name another folder "
        "(PREHEAT_CACHE_DIR, cache_dir in config.yaml, --cache-dir)."
    )


LIMITED = """
    import resource, sys
    from pathlib import Path
    from model.errors import StoreError
    from model.store.blob_cache import BlobCache
    from tests.support.cached_blobs import fetch, file_names

    root = Path(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        fetch(BlobCache(root), "b", 100_000)
    except StoreError as error:
        print(error)
    assert not file_names(root) and not file_names(root, "partial")
"""


def test_file_size_limit_is_reported(root: Path) -> None:
    [message] = finish(python(LIMITED, root)).splitlines()
    assert message.startswith(f"The cache {root} is full (File too large). Free space")


def test_unusable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"The cache \S+/file/cache cannot be used: Not a directory"):
        BlobCache(tmp_path / "file" / "cache")
