"""The cache folder: limited, shared by processes, never with a wrong blob. Needs no object store."""

import errno
import fcntl
import hashlib
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import pytest

from model.errors import CorruptBlob, ManifestError, StoreError
from model.store.blob_cache import BlobCache, PartialBlob
from model.store.local import LocalStore
from tests.store.processes import finish, own_mounts, python

PART = 1000
Fill = Callable[[PartialBlob], None]


def blob_of(letter: str, size: int = 10_000) -> tuple[str, bytes]:
    data = letter.encode() * size
    return hashlib.sha256(data).hexdigest(), data


def filling(data: bytes, parts: list[int] | None = None) -> Fill:
    """Write the missing parts, and append their numbers to `parts`."""

    def fill(partial: PartialBlob) -> None:
        for part in partial.missing():
            at, end = partial.span(part)
            partial.write(at, data[at:end])
            partial.finish(part)
            if parts is not None:
                parts.append(part)

    return fill


def breaking(data: bytes, after: int, error: Exception) -> Fill:
    """Write some parts, then raise `error`."""

    def fill(partial: PartialBlob) -> None:
        for part in partial.missing()[:after]:
            at, end = partial.span(part)
            partial.write(at, data[at:end])
            partial.finish(part)
        raise error

    return fill


def never(partial: PartialBlob) -> None:
    raise AssertionError("the blob is cached")


def fetch(cache: BlobCache, letter: str, size: int = 10_000) -> Path:
    digest, data = blob_of(letter, size)
    return cache.fetch_blob(digest, size, PART, filling(data))


def here(root: Path, folder: str = "blobs/sha256") -> set[str]:
    return {path.name for path in (root / folder).iterdir()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


# -- fetching -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, PART, PART + 1, 10 * PART])
def test_blob_is_fetched_once(root: Path, size: int) -> None:
    cache = BlobCache(root)
    digest, data = blob_of("a", size)
    parts: list[int] = []
    path = cache.fetch_blob(digest, size, PART, filling(data, parts))
    assert path.read_bytes() == data and parts == list(range(max(1, -(-size // PART))))
    assert cache.fetch_blob(digest, size, PART, never) == path == BlobCache(root).fetch_blob(digest, size, PART, never)
    assert not here(root, "partial")


def test_partial_blob_is_resumed(root: Path) -> None:
    digest, data = blob_of("a")
    with pytest.raises(StoreError, match="cut"):
        BlobCache(root).fetch_blob(digest, len(data), PART, breaking(data, 3, StoreError("cut")))
    assert here(root, "partial") == {digest} and not here(root)
    parts: list[int] = []
    assert BlobCache(root).fetch_blob(digest, len(data), PART, filling(data, parts)).read_bytes() == data
    assert parts == [3, 4, 5, 6, 7, 8, 9]


def test_foreign_partial_blob_is_restarted(root: Path) -> None:
    """It has other parts, as of another version, or was cut between its last two steps."""
    digest, data = blob_of("a")
    for left in (b"", data, data + b"\1" * 3, b"x" * 50_000, b"\1" * 50_000):
        cache = BlobCache(root)
        (root / "partial" / digest).write_bytes(left)
        assert cache.fetch_blob(digest, len(data), PART, filling(data)).read_bytes() == data
        cache.get(digest, len(data)).unlink()


def test_failed_first_part_and_wrong_bytes_leave_nothing(root: Path) -> None:
    digest, data = blob_of("a")
    for fill in (breaking(data, 0, StoreError("cut")), breaking(data, 9, CorruptBlob("wrong"))):
        with pytest.raises(StoreError):
            BlobCache(root).fetch_blob(digest, len(data), PART, fill)
        assert not here(root) and not here(root, "partial")


def test_disk_that_fills_up_keeps_no_part(root: Path) -> None:
    digest, data = blob_of("a")
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(StoreError, match="is full"):
        BlobCache(root).fetch_blob(digest, len(data), PART, breaking(data, 3, full))
    assert not here(root) and not here(root, "partial")


def test_damaged_blob_is_fetched_again(root: Path) -> None:
    digest, data = blob_of("a")
    for damage in (b"b" * len(data), data[:-1], b"", data + b"a"):
        path = fetch(BlobCache(root), "a")
        path.write_bytes(damage)
        assert BlobCache(root).fetch_blob(digest, len(data), PART, filling(data)).read_bytes() == data


def test_fetched_blob_is_not_hashed_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = BlobCache(root)
    digest, data = blob_of("a")
    fetch(cache, "a")
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
    for _ in range(2):
        cache.fetch_blob(digest, len(data), PART, never)
        cache.get(digest, len(data))


def test_invalid_digest_creates_no_file(root: Path) -> None:
    cache = BlobCache(root)
    for digest in ("../escape", "", "A" * 64):
        with pytest.raises(ManifestError):
            cache.fetch_blob(digest, 1, PART, never)
    assert not list(root.parent.glob("escape")) and not here(root, "partial")


# -- several users ------------------------------------------------------------------------------------------------


def test_one_thread_fetches_and_others_wait(root: Path) -> None:
    cache = BlobCache(root)
    digest, data = blob_of("a")
    begun, may_end = Event(), Event()
    filled: list[int] = []

    def slowly(partial: PartialBlob) -> None:
        begun.set()
        assert may_end.wait(60)
        filling(data)(partial)
        filled.append(1)

    paths: list[Path] = []
    threads = [
        Thread(target=lambda: paths.append(cache.fetch_blob(digest, len(data), PART, slowly)), daemon=True)
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert len(paths) == 4 and len(set(paths)) == 1 and len(filled) == 1
    assert not here(root, "partial")


def test_waiting_process_deletes_partial_before_it_hashes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest, data = blob_of("a")
    begun, may_end = Event(), Event()

    def slowly(partial: PartialBlob) -> None:
        begun.set()
        assert may_end.wait(60)
        filling(data)(partial)

    first, second = BlobCache(root), BlobCache(root)
    threads = [Thread(target=first.fetch_blob, args=(digest, len(data), PART, slowly), daemon=True)]
    threads[0].start()
    assert begun.wait(60)
    left: list[set[str]] = []
    get = second.get
    monkeypatch.setattr(second, "get", lambda *given: left.append(here(root, "partial")) or get(*given))  # type: ignore[func-returns-value]
    waits, flock = Event(), fcntl.flock

    def locked(handle: int, how: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{handle}")).parent.name == "partial":
            waits.set()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", locked)
    threads.append(Thread(target=second.fetch_blob, args=(digest, len(data), PART, never), daemon=True))
    threads[1].start()
    assert waits.wait(60)
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert left == [set()]


def test_touch_by_another_process_is_not_damage(root: Path) -> None:
    """It changes the file's times while this process streams bytes that it has verified before."""
    cache = BlobCache(root)
    digest, data = blob_of("a")
    path = fetch(cache, "a")
    got = bytearray()

    class Sink:
        def buffer(self) -> memoryview:
            return memoryview(bytearray(PART))

        def filled(self, at: int, given: memoryview) -> None:
            if at == PART and not touched:
                touched.append(os.utime(path))
            del got[at:]
            got.extend(given)

    touched: list[None] = []
    assert cache.stream_cached(digest, len(data), Sink())
    assert touched and bytes(got) == data and path.exists()


def test_replaced_blob_is_not_deleted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest, data = blob_of("a")
    path = fetch(BlobCache(root), "a")
    path.write_bytes(b"b" * len(data))
    slow = BlobCache(root)
    get = slow.get

    def late(digest: str, size: int) -> Path:
        try:
            return get(digest, size)
        finally:
            monkeypatch.setattr(slow, "get", get)
            assert BlobCache(root).fetch_blob(digest, size, PART, filling(data)) == path  # another process was faster

    monkeypatch.setattr(slow, "get", late)
    assert slow.fetch_blob(digest, len(data), PART, never).read_bytes() == data


def _fetch_many(root: Path, letters: str, limit: int, log: Path) -> None:
    for letter in letters:
        digest, data = blob_of(letter)
        cache = BlobCache(root, limit)

        def fill(partial: PartialBlob, letter: str = letter, data: bytes = data) -> None:
            with log.open("a") as file:
                file.write(letter)
            filling(data)(partial)

        path = cache.fetch_blob(digest, len(data), PART, fill)
        assert path.read_bytes() == data, "a blob in use was evicted"
        cache.close()


def test_processes_share_one_folder(root: Path, tmp_path: Path) -> None:
    """With space for all, each blob is fetched by one of them. With little space nothing goes wrong either."""
    context = multiprocessing.get_context("fork")
    for limit, times in ((10**9, 1), (45_000, 2)):
        log = tmp_path / str(limit)
        letters = "abcdefgh" * times
        workers = [
            context.Process(target=_fetch_many, args=(tmp_path / f"cache{limit}", letters, limit, log)) for _ in "123"
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert [worker.exitcode for worker in workers] == [0, 0, 0]
        if limit == 10**9:
            assert sorted(log.read_text()) == sorted("abcdefgh")
        else:
            kept = [path for path in (tmp_path / f"cache{limit}" / "blobs").rglob("*") if path.is_file()]
            assert sum(path.stat().st_size for path in kept) <= limit


# -- space --------------------------------------------------------------------------------------------------------


def age(path: Path, seconds: int) -> None:
    """Set the times as if the last use was that long ago."""
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns - seconds * 10**9, found.st_mtime_ns - seconds * 10**9))


def test_least_recently_used_is_evicted_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a disk without access times: reading a file does not make it look used.
    monkeypatch.setattr(LocalStore, "get", lambda cache, digest, size: cache._blob_path(digest))
    earlier = BlobCache(root, 35_000)
    for letter, ago in (("a", 300), ("b", 200), ("c", 100)):
        age(fetch(earlier, letter), ago)
    earlier.close()
    user = BlobCache(root, 35_000)
    fetch(user, "a")  # the most recently used one now
    user.close()
    fetch(BlobCache(root, 35_000), "d")
    assert here(root) == {blob_of(letter)[0] for letter in "acd"}


def test_pinned_blob_is_not_evicted(root: Path) -> None:
    user, other = BlobCache(root, 35_000), BlobCache(root, 35_000)
    age(fetch(user, "a"), 300)
    age(fetch(user, "b"), 200)
    fetch(other, "c")
    other.close()
    fetch(BlobCache(root, 35_000), "d")
    assert here(root) == {blob_of(letter)[0] for letter in "abd"}


def test_blob_of_killed_process_is_evicted(root: Path) -> None:
    script = """
        import os, signal, sys
        from pathlib import Path
        from model.store.blob_cache import BlobCache
        from tests.store.test_cache import fetch
        cache = BlobCache(Path(sys.argv[1]), 25_000)
        fetch(cache, "a")
        fetch(cache, "b")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    process = python(script, root)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == -9, error
    assert len(here(root, "users")) == 1
    cache = BlobCache(root, 25_000)
    fetch(cache, "c")
    assert blob_of("c")[0] in here(root) and len(here(root)) == 2
    assert len(here(root, "users")) == 1


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
    assert here(root) == {blob_of(letter)[0] for letter in "ab"} and not here(root, "partial")


def test_unused_partial_blob_is_evicted(root: Path) -> None:
    digest, data = blob_of("a")
    earlier = BlobCache(root, 15_000)
    with pytest.raises(StoreError):
        earlier.fetch_blob(digest, len(data), PART, breaking(data, 3, StoreError("cut")))
    earlier.close()
    fetch(BlobCache(root, 15_000), "b")
    assert not here(root, "partial") and here(root) == {blob_of("b")[0]}


def test_partial_blob_in_use_stays(root: Path) -> None:
    digest, data = blob_of("a")

    def fill(partial: PartialBlob) -> None:
        with pytest.raises(StoreError, match="does not fit"):
            fetch(BlobCache(root, 15_000), "b")
        filling(data)(partial)

    assert BlobCache(root, 15_000).fetch_blob(digest, len(data), PART, fill).read_bytes() == data


FULL_DISK = """
    import os, subprocess, sys
    from pathlib import Path
    from model.errors import StoreError
    from model.store.blob_cache import BlobCache
    from tests.store.test_cache import fetch, here, blob_of

    root = Path(sys.argv[1])
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(root)], check=True)
    cache = BlobCache(root)
    fetch(cache, "a", 100_000)
    try:
        fetch(cache, "b", 100_000)
    except StoreError as error:
        print(error)
    assert here(root) == {blob_of("a", 100_000)[0]} and not here(root, "partial")
    assert fetch(cache, "c", 10_000).stat().st_size == 10_000
    cache.close()
    fetch(BlobCache(root), "b", 100_000)
    print(sorted(here(root)) == sorted(blob_of(*blob)[0] for blob in (("b", 100_000), ("c", 10_000))))
"""


def test_full_disk_is_reported_and_unpinned_blobs_evicted(root: Path) -> None:
    """The second time "a" is not pinned, so it is evicted; "c", which was used later, stays."""
    message, evicted = finish(python(FULL_DISK, root, prefix=own_mounts())).splitlines()
    assert message == (
        f"The cache {root} is full (No space left on device). Free space on that disk, or name another folder "
        "(PREHEAT_CACHE_DIR, cache_dir in config.yaml, --cache-dir)."
    )
    assert evicted == "True"


LIMITED = """
    import resource, sys
    from pathlib import Path
    from model.errors import StoreError
    from model.store.blob_cache import BlobCache
    from tests.store.test_cache import fetch, here, blob_of

    root = Path(sys.argv[1])
    cache = BlobCache(root)
    fetch(cache, "a")
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        fetch(cache, "b", 100_000)
    except StoreError as error:
        print(error)
    assert here(root) == {blob_of("a")[0]} and not here(root, "partial")
    fetch(cache, "c")
"""


def test_file_size_limit_is_reported(root: Path) -> None:
    [message] = finish(python(LIMITED, root)).splitlines()
    assert message.startswith(f"The cache {root} is full (File too large). Free space")


def test_unusable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"The cache \S+/file/cache cannot be used: Not a directory"):
        BlobCache(tmp_path / "file" / "cache")


@pytest.mark.parametrize(
    "name, kind",
    [("lock", "folder"), ("lock", "link"), ("lock", "pipe"), *(
        (name, kind) for name in ("users", "partial", "blobs/sha256") for kind in ("file", "link", "pipe")
    )],
)  # fmt: skip
def test_names_the_entry_that_is_in_the_way(root: Path, name: str, kind: str) -> None:
    entry = root / name
    entry.parent.mkdir(parents=True, exist_ok=True)
    if kind == "link":
        entry.symlink_to("elsewhere")
    else:
        {"folder": os.mkdir, "file": Path.touch, "pipe": os.mkfifo}[kind](entry)
    with pytest.raises(StoreError, match="Remove that entry") as caught:
        BlobCache(root)
    assert f"because of {entry} in it" in str(caught.value)


def test_names_a_folder_in_place_of_a_blob(root: Path) -> None:
    cache = BlobCache(root)
    blob = root / "blobs" / "sha256" / blob_of("a")[0]
    blob.mkdir()
    (blob / "file").touch()
    with pytest.raises(StoreError, match="Remove that entry") as caught:
        fetch(cache, "a")
    assert f"because of {blob} in it" in str(caught.value)
