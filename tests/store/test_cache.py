"""The folder of fetched blobs: bounded, shared by processes, and never holding what is wrong. Needs no object store."""

import errno
import fcntl
import hashlib
import multiprocessing
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import pytest

from model.errors import CorruptBlob, ManifestError, StoreError
from model.store.blob_cache import (
    BlobCache,
    Partial,
)
from model.store.local import LocalStore
from tests.store.test_local import own_mounts

REPOSITORY = Path(__file__).resolve().parents[2]
PART = 1000
Fill = Callable[[Partial], None]


def blob_of(letter: str, size: int = 10_000) -> tuple[str, bytes]:
    data = letter.encode() * size
    return hashlib.sha256(data).hexdigest(), data


def filling(data: bytes, parts: list[int] | None = None) -> Fill:
    """Writes what is missing, and says in `parts` what that was."""

    def fill(partial: Partial) -> None:
        for part in partial.missing():
            at, end = partial.span(part)
            partial.write(at, data[at:end])
            partial.finish(part)
            if parts is not None:
                parts.append(part)

    return fill


def breaking(data: bytes, after: int, error: Exception) -> Fill:
    """Writes some parts and fails."""

    def fill(partial: Partial) -> None:
        for part in partial.missing()[:after]:
            at, end = partial.span(part)
            partial.write(at, data[at:end])
            partial.finish(part)
        raise error

    return fill


def never(partial: Partial) -> None:
    raise AssertionError("it is here already")


def bring(cache: BlobCache, letter: str, size: int = 10_000) -> Path:
    digest, data = blob_of(letter, size)
    return cache.bring(digest, size, PART, filling(data))


def here(root: Path, folder: str = "blobs/sha256") -> set[str]:
    return {path.name for path in (root / folder).iterdir()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


# -- bringing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, PART, PART + 1, 10 * PART])
def test_a_blob_is_brought_once(root: Path, size: int) -> None:
    cache = BlobCache(root)
    digest, data = blob_of("a", size)
    parts: list[int] = []
    path = cache.bring(digest, size, PART, filling(data, parts))
    assert path.read_bytes() == data and parts == list(range(max(1, -(-size // PART))))
    assert cache.bring(digest, size, PART, never) == path == BlobCache(root).bring(digest, size, PART, never)
    assert not here(root, "partial")


def test_a_partial_blob_goes_on_where_it_stopped(root: Path) -> None:
    digest, data = blob_of("a")
    with pytest.raises(StoreError, match="cut"):
        BlobCache(root).bring(digest, len(data), PART, breaking(data, 3, StoreError("cut")))
    assert here(root, "partial") == {digest} and not here(root)
    parts: list[int] = []
    assert BlobCache(root).bring(digest, len(data), PART, filling(data, parts)).read_bytes() == data
    assert parts == [3, 4, 5, 6, 7, 8, 9]


def test_a_partial_blob_of_another_kind_is_begun_again(root: Path) -> None:
    """One of an earlier version with other parts, or cut off between its last two steps."""
    digest, data = blob_of("a")
    for left in (b"", data, data + b"\1" * 3, b"x" * 50_000, b"\1" * 50_000):
        cache = BlobCache(root)
        (root / "partial" / digest).write_bytes(left)
        assert cache.bring(digest, len(data), PART, filling(data)).read_bytes() == data
        cache.get(digest, len(data)).unlink()


def test_nothing_is_left_of_what_failed_at_once_or_was_wrong(root: Path) -> None:
    digest, data = blob_of("a")
    for fill in (breaking(data, 0, StoreError("cut")), breaking(data, 9, CorruptBlob("wrong"))):
        with pytest.raises(StoreError):
            BlobCache(root).bring(digest, len(data), PART, fill)
        assert not here(root) and not here(root, "partial")


def test_a_disk_that_fills_up_while_parts_come_keeps_none_of_them(root: Path) -> None:
    digest, data = blob_of("a")
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(StoreError, match="is full"):
        BlobCache(root).bring(digest, len(data), PART, breaking(data, 3, full))
    assert not here(root) and not here(root, "partial")


def test_a_damaged_blob_is_brought_again(root: Path) -> None:
    digest, data = blob_of("a")
    for damage in (b"b" * len(data), data[:-1], b"", data + b"a"):
        path = bring(BlobCache(root), "a")
        path.write_bytes(damage)
        assert BlobCache(root).bring(digest, len(data), PART, filling(data)).read_bytes() == data


def test_a_brought_blob_is_not_hashed_again_by_this_process(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = BlobCache(root)
    digest, data = blob_of("a")
    bring(cache, "a")
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
    for _ in range(2):
        cache.bring(digest, len(data), PART, never)
        cache.get(digest, len(data))


def test_a_digest_that_is_none_makes_no_file(root: Path) -> None:
    cache = BlobCache(root)
    for digest in ("../escape", "", "A" * 64):
        with pytest.raises(ManifestError):
            cache.bring(digest, 1, PART, never)
    assert not list(root.parent.glob("escape")) and not here(root, "partial")


# -- several users ------------------------------------------------------------------------------------------------


def test_of_several_threads_one_brings_and_the_others_wait(root: Path) -> None:
    cache = BlobCache(root)
    digest, data = blob_of("a")
    begun, may_end = Event(), Event()
    filled: list[int] = []

    def slowly(partial: Partial) -> None:
        begun.set()
        assert may_end.wait(60)
        filling(data)(partial)
        filled.append(1)

    paths: list[Path] = []
    threads = [
        Thread(target=lambda: paths.append(cache.bring(digest, len(data), PART, slowly)), daemon=True) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert len(paths) == 4 and len(set(paths)) == 1 and len(filled) == 1
    assert not here(root, "partial")


def test_who_waited_leaves_nothing_even_if_killed_while_it_hashes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest, data = blob_of("a")
    begun, may_end = Event(), Event()

    def slowly(partial: Partial) -> None:
        begun.set()
        assert may_end.wait(60)
        filling(data)(partial)

    first, second = BlobCache(root), BlobCache(root)
    threads = [Thread(target=first.bring, args=(digest, len(data), PART, slowly), daemon=True)]
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
    threads.append(Thread(target=second.bring, args=(digest, len(data), PART, never), daemon=True))
    threads[1].start()
    assert waits.wait(60)
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert left == [set()]


def test_a_touch_by_another_process_makes_no_blob_damaged(root: Path) -> None:
    """Its use is noted in the file's times, while this one hands over bytes that it has verified before."""
    cache = BlobCache(root)
    digest, data = blob_of("a")
    path = bring(cache, "a")
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
    assert cache.stream_kept(digest, len(data), Sink())
    assert touched and bytes(got) == data and path.exists()


def test_a_good_blob_in_a_damaged_one_s_place_is_not_deleted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest, data = blob_of("a")
    path = bring(BlobCache(root), "a")
    path.write_bytes(b"b" * len(data))
    slow = BlobCache(root)
    get = slow.get

    def late(digest: str, size: int) -> Path:
        try:
            return get(digest, size)
        finally:
            monkeypatch.setattr(slow, "get", get)
            assert BlobCache(root).bring(digest, size, PART, filling(data)) == path  # another process is faster

    monkeypatch.setattr(slow, "get", late)
    assert slow.bring(digest, len(data), PART, never).read_bytes() == data


def _bring_many(root: Path, letters: str, limit: int, log: Path) -> None:
    for letter in letters:
        digest, data = blob_of(letter)
        cache = BlobCache(root, limit)

        def fill(partial: Partial, letter: str = letter, data: bytes = data) -> None:
            with log.open("a") as file:
                file.write(letter)
            filling(data)(partial)

        path = cache.bring(digest, len(data), PART, fill)
        assert path.read_bytes() == data, "a blob in use was evicted"
        cache.close()


def test_processes_share_one_folder(root: Path, tmp_path: Path) -> None:
    """With room for all, each blob is brought by one of them; with little, all the same nothing goes wrong."""
    context = multiprocessing.get_context("fork")
    for limit, times in ((10**9, 1), (45_000, 2)):
        log = tmp_path / str(limit)
        letters = "abcdefgh" * times
        workers = [
            context.Process(target=_bring_many, args=(tmp_path / f"cache{limit}", letters, limit, log)) for _ in "123"
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


# -- room ---------------------------------------------------------------------------------------------------------


def age(path: Path, seconds: int) -> None:
    """As if it had been used that long ago."""
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns - seconds * 10**9, found.st_mtime_ns - seconds * 10**9))


def test_the_least_recently_used_goes_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a disk that keeps no times of access: reading a file does not make it look used.
    monkeypatch.setattr(LocalStore, "get", lambda cache, digest, size: cache._blob_path(digest))
    earlier = BlobCache(root, 35_000)
    for letter, ago in (("a", 300), ("b", 200), ("c", 100)):
        age(bring(earlier, letter), ago)
    earlier.close()
    user = BlobCache(root, 35_000)
    bring(user, "a")  # which is the latest used now
    user.close()
    bring(BlobCache(root, 35_000), "d")
    assert here(root) == {blob_of(letter)[0] for letter in "acd"}


def test_what_is_in_use_is_not_evicted(root: Path) -> None:
    user, other = BlobCache(root, 35_000), BlobCache(root, 35_000)
    age(bring(user, "a"), 300)
    age(bring(user, "b"), 200)
    bring(other, "c")
    other.close()
    bring(BlobCache(root, 35_000), "d")
    assert here(root) == {blob_of(letter)[0] for letter in "abd"}


def test_what_a_user_that_has_gone_used_may_go(root: Path) -> None:
    """Killed, so that it cannot say so."""
    script = """
        import os, signal, sys
        from pathlib import Path
        from model.store.blob_cache import BlobCache
        from tests.store.test_cache import bring
        cache = BlobCache(Path(sys.argv[1]), 25_000)
        bring(cache, "a")
        bring(cache, "b")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(root)], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True
    )
    assert run.returncode == -9, run.stderr
    assert len(here(root, "users")) == 1
    cache = BlobCache(root, 25_000)
    bring(cache, "c")
    assert blob_of("c")[0] in here(root) and len(here(root)) == 2
    assert len(here(root, "users")) == 1


def test_a_blob_for_which_there_is_no_room_is_refused(root: Path) -> None:
    cache = BlobCache(root, 25_000)
    bring(cache, "a")
    bring(cache, "b")
    with pytest.raises(StoreError, match=r"may hold 25000 bytes.*no room for a blob of 10000: raise cache_bytes"):
        bring(cache, "c")
    with pytest.raises(StoreError, match="may hold 100 bytes"):
        bring(BlobCache(root.with_name("other"), 100), "a")
    assert here(root) == {blob_of(letter)[0] for letter in "ab"} and not here(root, "partial")


def test_halves_that_nobody_fetches_make_room(root: Path) -> None:
    digest, data = blob_of("a")
    earlier = BlobCache(root, 15_000)
    with pytest.raises(StoreError):
        earlier.bring(digest, len(data), PART, breaking(data, 3, StoreError("cut")))
    earlier.close()
    bring(BlobCache(root, 15_000), "b")
    assert not here(root, "partial") and here(root) == {blob_of("b")[0]}


def test_a_half_that_is_being_fetched_stays(root: Path) -> None:
    digest, data = blob_of("a")

    def fill(partial: Partial) -> None:
        with pytest.raises(StoreError, match="no room"):
            bring(BlobCache(root, 15_000), "b")
        filling(data)(partial)

    assert BlobCache(root, 15_000).bring(digest, len(data), PART, fill).read_bytes() == data


FULL_DISK = """
    import os, subprocess, sys
    from pathlib import Path
    from model.errors import StoreError
    from model.store.blob_cache import BlobCache
    from tests.store.test_cache import bring, here, blob_of

    root = Path(sys.argv[1])
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(root)], check=True)
    cache = BlobCache(root)
    bring(cache, "a", 100_000)
    try:
        bring(cache, "b", 100_000)
    except StoreError as error:
        print(error)
    assert here(root) == {blob_of("a", 100_000)[0]} and not here(root, "partial")
    assert bring(cache, "c", 10_000).stat().st_size == 10_000
    cache.close()
    bring(BlobCache(root), "b", 100_000)
    print(sorted(here(root)) == sorted(blob_of(*blob)[0] for blob in (("b", 100_000), ("c", 10_000))))
"""


def run(script: str, root: Path, *prefix: str) -> list[str]:
    done = subprocess.run(
        [*prefix, sys.executable, "-c", textwrap.dedent(script), str(root)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_full_disk_is_said_and_what_nobody_uses_makes_room(root: Path) -> None:
    """The second time "a" is not in use, so it goes, and "c", which was used later, stays."""
    said, evicted = run(FULL_DISK, root, *own_mounts())
    assert said == (
        f"The cache {root} is full (No space left on device): make room on that disk, or name a folder on another "
        "(PREHEAT_CACHE_DIR, cache_dir in config.yaml, --cache-dir)."
    )
    assert evicted == "True"


LIMITED = """
    import resource, sys
    from pathlib import Path
    from model.errors import StoreError
    from model.store.blob_cache import BlobCache
    from tests.store.test_cache import bring, here, blob_of

    root = Path(sys.argv[1])
    cache = BlobCache(root)
    bring(cache, "a")
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        bring(cache, "b", 100_000)
    except StoreError as error:
        print(error)
    assert here(root) == {blob_of("a")[0]} and not here(root, "partial")
    bring(cache, "c")
"""


def test_a_file_that_the_system_stops_is_said(root: Path) -> None:
    [said] = run(LIMITED, root)
    assert said.startswith(f"The cache {root} is full (File too large): make room")


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"The cache \S+/file/cache cannot be used: Not a directory"):
        BlobCache(tmp_path / "file" / "cache")
