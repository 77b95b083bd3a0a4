"""A store in a folder, against a hostile folder, a full disk, a read-only disk, a killed writer and a racing one."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from model.errors import CorruptBlob, ManifestError, ReleaseExists, ReleaseNotFound, StoreError
from model.store.local import LocalStore
from model.store.manifest import Manifest
from model.store.store import open_store
from tests.stand_ins import releases

REPOSITORY = Path(__file__).resolve().parents[2]
DATA = b"some bytes of an engine" * 1000
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def blob(store: LocalStore, digest: str = DIGEST) -> Path:
    return store.root / "blobs" / "sha256" / digest


def plant(store: LocalStore, data: bytes, digest: str = DIGEST) -> Path:
    """Write bytes under a digest that may not be theirs."""
    path = blob(store, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def python(script: str, *arguments: object, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A real process that runs `script` in this repository."""
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], given: str = "") -> str:
    out, err = process.communicate(given, timeout=60)
    assert process.returncode == 0, err
    return out


# -- blobs --------------------------------------------------------------------------------------------------------


def test_what_is_put_is_got_and_read(store: LocalStore, tmp_path: Path) -> None:
    source = tmp_path / "engine.pt2"
    source.write_bytes(DATA)
    assert not store.has(DIGEST)
    assert store.put(source) == store.put_bytes(DATA) == store.put(source) == DIGEST
    assert store.has(DIGEST) and store.get(DIGEST, len(DATA)).read_bytes() == DATA
    buffer = bytearray(len(DATA))
    store.read(DIGEST, memoryview(buffer))
    assert buffer == DATA
    assert files(store.root) == [f"blobs/sha256/{DIGEST}"]
    assert blob(store).stat().st_mode & 0o777 == 0o644, "another user's server reads it"


def test_no_bytes_are_a_blob_too(store: LocalStore) -> None:
    digest = store.put_bytes(b"")
    assert store.get(digest, 0).read_bytes() == b""
    store.read(digest, memoryview(bytearray()))


DAMAGE = {
    "one bit": DATA[:5000] + bytes([DATA[5000] ^ 1]) + DATA[5001:],
    "one byte less": DATA[:-1],
    "one byte more": DATA + b"\0",
    "empty": b"",
    "another blob's of this size": DATA[::-1],
}


@pytest.mark.parametrize("damaged", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_refused_and_putting_again_mends_it(store: LocalStore, damaged: bytes) -> None:
    path = plant(store, damaged)
    with pytest.raises(CorruptBlob, match=f"`preheat verify`, delete it .blobs/sha256/{DIGEST}.*`preheat build`"):
        store.get(DIGEST, len(DATA))
    with pytest.raises(CorruptBlob, match=DIGEST[:12]):
        store.read(DIGEST, memoryview(bytearray(len(DATA))))
    store.put_bytes(DATA)
    assert path.read_bytes() == DATA and store.get(DIGEST, len(DATA)) == path


def test_a_size_that_the_manifest_has_wrong_is_refused(store: LocalStore) -> None:
    store.put_bytes(DATA)
    with pytest.raises(CorruptBlob, match=f"{len(DATA)} bytes instead of 7"):
        store.get(DIGEST, 7)
    with pytest.raises(CorruptBlob, match="instead of 7"):
        store.read(DIGEST, memoryview(bytearray(7)))


def test_a_missing_blob_says_to_build(store: LocalStore) -> None:
    for attempt in (lambda: store.get(DIGEST, 1), lambda: store.read(DIGEST, memoryview(bytearray(1)))):
        with pytest.raises(CorruptBlob, match="missing.*`preheat build`"):
            attempt()


def test_a_change_is_seen_though_its_time_was_set_back(store: LocalStore) -> None:
    """The same inode, size and modification time; only the time of change tells."""
    store.put_bytes(DATA)
    path = store.get(DIGEST, len(DATA))
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # clocks of file systems tick some 250 times a second
        path.write_bytes(DATA[::-1])
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    now = path.stat()
    assert (now.st_ino, now.st_size, now.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    with pytest.raises(CorruptBlob, match="have changed"):
        store.get(DIGEST, len(DATA))


@pytest.mark.parametrize(
    "digest", ["", "../" * 20 + "0000", "0" * 63, "0" * 65, "A" * 64, "/" + "0" * 63, "0" * 63 + "\n", "0" * 63 + "\0"]
)
def test_what_is_no_digest_never_becomes_a_path(store: LocalStore, digest: str) -> None:
    for attempt in (
        lambda: store.get(digest, 1),
        lambda: store.has(digest),
        lambda: store.read(digest, memoryview(bytearray(1))),
    ):
        with pytest.raises(ManifestError, match="no SHA-256 digest"):
            attempt()


def test_a_source_that_is_not_there_is_said_to_be_missing(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not there to be stored"):
        store.put(tmp_path / "nothing.pt2")
    with pytest.raises(StoreError, match="cannot be read"):
        store.put(tmp_path)
    assert files(store.root) == []


def test_a_source_that_changes_while_it_is_read_is_not_kept(store: LocalStore, tmp_path: Path) -> None:
    """A growing source: hashed at one length, copied at another."""
    source = tmp_path / "log"
    source.write_bytes(DATA)
    holds = store._holds

    def grow(digest: str, size: int) -> bool:
        with source.open("ab") as file:
            file.write(b"more")
        return holds(digest, size)

    store._holds = grow  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="changed while it was stored"):
        store.put(source)
    assert files(store.root) == []


# -- links and things that are no files ---------------------------------------------------------------------------


def test_a_link_is_followed_and_what_it_leads_to_is_checked(store: LocalStore, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(DATA)
    bad.write_bytes(DATA[::-1])
    blob(store).parent.mkdir(parents=True)
    blob(store).symlink_to(good)
    assert store.get(DIGEST, len(DATA)).read_bytes() == DATA
    blob(store).unlink()
    blob(store).symlink_to(bad)
    with pytest.raises(CorruptBlob, match="have changed"):
        store.get(DIGEST, len(DATA))


def test_putting_replaces_a_link_and_leaves_alone_what_it_leads_to(store: LocalStore, tmp_path: Path) -> None:
    outside = tmp_path / "passwd"
    outside.write_bytes(b"root")
    blob(store).parent.mkdir(parents=True)
    for target in (outside, tmp_path / "nowhere"):
        blob(store).symlink_to(target)
        store.put_bytes(DATA)
        assert not blob(store).is_symlink() and store.get(DIGEST, len(DATA)).read_bytes() == DATA
        blob(store).unlink()
    assert outside.read_bytes() == b"root" and not (tmp_path / "nowhere").exists()


def test_pipes_folders_and_loops_are_refused_and_not_waited_for(store: LocalStore) -> None:
    path = blob(store)
    path.parent.mkdir(parents=True)
    for make, unmake in ((os.mkfifo, os.unlink), (os.mkdir, os.rmdir), (lambda it: os.symlink(it, it), os.unlink)):
        make(path)
        with pytest.raises(StoreError, match="cannot be read"):
            store.get(DIGEST, 0)
        with pytest.raises(StoreError, match="cannot be read"):
            store.read(DIGEST, memoryview(bytearray()))
        unmake(path)
    release = store.root / "releases" / "toy" / "1.json"
    release.parent.mkdir(parents=True)
    os.mkfifo(release)
    with pytest.raises(StoreError, match="Release toy/1 cannot be read"):
        store.read_release("toy/1")
    release.unlink()
    release.symlink_to("/dev/zero")
    with pytest.raises(StoreError, match="Release toy/1 cannot be read"):
        store.read_release("toy/1")


# -- releases -----------------------------------------------------------------------------------------------------


def test_a_release_is_written_once(store: LocalStore) -> None:
    manifest = releases.draft(store)
    store.write_release(manifest)
    written = (store.root / "releases/toy/1.json").read_bytes()
    with pytest.raises(ReleaseExists, match="toy/1 .*choose another version"):
        store.write_release(manifest.model_copy(update={"created": "later"}))
    assert (store.root / "releases/toy/1.json").read_bytes() == written
    assert store.read_release("toy/1") == manifest and store.releases() == ["toy/1"]


def test_a_missing_release_names_those_there_and_the_command(store: LocalStore) -> None:
    with pytest.raises(ReleaseNotFound, match=r"No release toy/1 in file://.*there: none.*`preheat publish toy/1"):
        store.read_release("toy/1")
    for number in range(100):
        releases.write_raw(store.root, {}, f"toy/{number}")
    with pytest.raises(ReleaseNotFound, match=r"toy/0, .* and 80 more\)") as caught:
        store.read_release("toy/none")
    assert len(str(caught.value)) < 1000


def test_a_release_that_names_a_missing_or_damaged_blob_is_not_published(store: LocalStore) -> None:
    manifest = releases.draft(store)
    digests = list(manifest.blobs())
    for digest in (digests[0], digests[-1], digests[len(digests) // 2]):
        path = blob(store, digest)
        data = path.read_bytes()
        for damage in (None, data[:-1], bytes([data[0] ^ 1]) + data[1:]):
            path.unlink()
            if damage is not None:
                path.write_bytes(damage)
            with pytest.raises(CorruptBlob, match=digest[:12]):
                store.write_release(manifest)
            assert store.releases() == []
            path.write_bytes(data)
    store.write_release(manifest)


def test_a_release_that_could_not_be_read_again_is_not_published(store: LocalStore) -> None:
    """`model_copy` validates nothing, so a publisher can hold a manifest that no reader would take."""
    manifest = releases.draft(store)
    broken = [
        {"engines": manifest.engines * 2},
        {"settings": manifest.settings.model_copy(update={"vae_scaling_factor": float("nan")})},
        {"schema_version": 2},
        {"version": "../1"},
    ]
    for update in broken:
        with pytest.raises(ManifestError):
            store.write_release(manifest.model_copy(update=update))
    assert not (store.root / "releases").exists()


def test_what_strangers_put_between_the_releases_is_not_listed(store: LocalStore) -> None:
    store.write_release(releases.draft(store))
    folder = store.root / "releases"
    for stranger in ("toy/.hidden.json", "toy/a b.json", "toy/readme.txt", "toy/.incoming-x.json", ".DS_Store"):
        (folder / stranger).write_text("{}")
    (folder / "a b").mkdir()
    (folder / "a b" / "1.json").write_text("{}")
    assert store.releases() == ["toy/1"]


def test_of_racing_publishers_exactly_one_wins_each_release(store: LocalStore, tmp_path: Path) -> None:
    """Four processes, thirty versions, all let go at once: every version is one of theirs, whole."""
    manifest = releases.draft(store)
    draft = tmp_path / "draft.json"
    draft.write_bytes(manifest.to_json())
    script = """
        import sys
        from model.errors import ReleaseExists
        from model.store.local import LocalStore
        from model.store.manifest import Manifest

        root, draft, me = sys.argv[1:]
        store = LocalStore(root)
        manifest = Manifest.model_validate_json(open(draft, "rb").read())
        print("ready", flush=True)
        sys.stdin.readline()
        for version in map(str, range(30)):
            try:
                store.write_release(manifest.model_copy(update={"version": version, "created": me}))
                print(version)
            except ReleaseExists:
                pass
    """
    publishers = [python(script, store.root, draft, me) for me in "abcd"]
    for publisher in publishers:
        assert publisher.stdout is not None and publisher.stdout.readline() == "ready\n"
    for publisher in publishers:
        assert publisher.stdin is not None
        publisher.stdin.write("go\n")
        publisher.stdin.flush()
    won = {me: finish(publisher).split() for me, publisher in zip("abcd", publishers, strict=True)}
    assert sorted(version for versions in won.values() for version in versions) == sorted(map(str, range(30)))
    for me, versions in won.items():
        for version in versions:
            assert store.read_release(f"toy/{version}").created == me
    assert not list(store.root.rglob(".incoming-*"))


# -- records ------------------------------------------------------------------------------------------------------


def test_records_are_kept_rewritten_and_listed(store: LocalStore) -> None:
    long = "m" * 128 + ".cuda-rtxpro6000blackwell-sm120-torch2.13-cu130.fp16"
    assert store.read_record("drafts", long) is None and store.records("drafts") == []
    store.write_record("drafts", long, b"one")
    store.write_record("drafts", long, b"two")
    assert store.read_record("drafts", long) == b"two" and store.records("drafts") == [long]
    for kind, name in (("..", "x"), ("drafts", "../x"), ("drafts", ""), ("drafts", "x" * 221), ("a/b", "x")):
        with pytest.raises(StoreError, match="no name for a record"):
            store.write_record(kind, name, b"")


# -- crashes, full disks, read-only disks -------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_put_killed_half_way_leaves_the_store_sound(store: LocalStore, moment: str) -> None:
    """kill -9 when the bytes are written and not yet on disk, and when they are and have no name yet."""
    script = """
        import os, signal, sys
        from model.store.local import LocalStore

        def stop(*_):
            print("here", flush=True)
            signal.pause()

        setattr(os, sys.argv[2], stop)
        LocalStore(sys.argv[1]).put_bytes(b"some bytes of an engine" * 1000)
    """
    writer = python(script, store.root, moment)
    assert writer.stdout is not None and writer.stdout.readline() == "here\n"
    writer.kill()
    assert writer.wait(timeout=60) == -signal.SIGKILL
    writer.communicate()
    left = list(store.root.rglob(".incoming-*"))
    assert len(left) == 1 and not store.has(DIGEST) and not blob(store).exists()
    again = LocalStore(store.root)
    assert again.put_bytes(DATA) == DIGEST and again.get(DIGEST, len(DATA)).read_bytes() == DATA
    assert left[0].exists(), "it may belong to a writer that lives"


def test_what_dead_writers_left_is_swept_after_a_day_and_not_before(store: LocalStore) -> None:
    folders = [store.root / "blobs" / "sha256", store.root / "releases" / "toy"]
    now = time.time()
    for folder in folders:
        folder.mkdir(parents=True)
        for name, age in ((".incoming-old", 25 * 3600), (".incoming-young", 23 * 3600), ("not-ours", 99 * 3600)):
            (folder / name).write_bytes(b"x")
            os.utime(folder / name, (now - age, now - age))
    (folders[0] / ".incoming-folder").mkdir()
    os.utime(folders[0] / ".incoming-folder", (0, 0))
    store.write_release(releases.draft(store))
    for folder in folders:
        assert not (folder / ".incoming-old").exists()
        assert (folder / ".incoming-young").exists() and (folder / "not-ours").exists()


LIMITED = """
    import resource, sys
    from model.errors import StoreError
    from model.store.local import LocalStore

    store = LocalStore(sys.argv[1])
    small = store.put_bytes(b"small")
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    for attempt in (
        lambda: store.put_bytes(b"large" * 10_000),
        lambda: store.write_record("engines", "key", b"large" * 10_000),
    ):
        try:
            attempt()
        except StoreError as error:
            print(error)
    store.get(small, 5)
"""


def test_a_write_that_the_system_stops_changes_nothing(store: LocalStore) -> None:
    said = finish(python(LIMITED, store.root)).splitlines()
    assert len(said) == 2 and all("File too large. Nothing in it was changed" in line for line in said)
    assert files(store.root) == [f"blobs/sha256/{hashlib.sha256(b'small').hexdigest()}"]


def own_mounts() -> tuple[str, ...]:
    """A command prefix that gives a process mounts of its own; skips the test where the system gives none."""
    prefixes = (("unshare", "--mount"), ("unshare", "--map-root-user", "--mount"))
    for prefix in prefixes if shutil.which("unshare") else ():
        if subprocess.run([*prefix, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0:
            return prefix
    pytest.skip("a disk of a few KiB needs the right to mount one: run as root, or where unshare --map-root-user does")


FULL_DISK = """
    import os, subprocess, sys
    from pathlib import Path
    from model.errors import StoreError
    from model.store.local import LocalStore

    root = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", root], check=True)
    store = LocalStore(root)
    small = store.put_bytes(b"small")
    store.write_record("engines", "key", b"before")
    large = root.parent / "large"
    large.write_bytes(os.urandom(2**20))

    def refused(attempt):
        before = sorted(root.rglob("*"))
        try:
            attempt()
        except StoreError as error:
            print(error)
        assert sorted(root.rglob("*")) == before, "something was left behind"

    refused(lambda: store.put(large))
    refused(lambda: store.put_bytes(large.read_bytes()))
    refused(lambda: store.write_record("engines", "key", large.read_bytes()))
    assert store.read_record("engines", "key") == b"before"
    store.get(small, 5)
    assert store.put_bytes(b"room again") and store.get(small, 5)
"""


def test_a_full_disk_is_said_to_be_full_and_the_store_stays_sound(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    said = finish(python(FULL_DISK, root, prefix=own_mounts())).splitlines()
    assert len(said) == 3 and all("No space left on device" in line and "make room" in line for line in said)


READ_ONLY = """
    import subprocess, sys
    from model.errors import ReleaseExists, StoreError
    from model.store.local import LocalStore

    root = sys.argv[1]
    subprocess.run(["mount", "--bind", root, root], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", root], check=True)
    store = LocalStore(root)
    manifest = store.read_release("toy/1")
    for digest, blob in manifest.blobs().items():
        store.get(digest, blob.bytes)
    assert store.put_bytes(store.get(digest, blob.bytes).read_bytes()) == digest
    for attempt in (
        lambda: store.put_bytes(b"new"),
        lambda: store.write_record("engines", "key", b"x"),
        lambda: store.write_release(manifest.model_copy(update={"version": "2"})),
    ):
        try:
            attempt()
        except StoreError as error:
            print(error)
"""


def test_a_read_only_store_is_read_and_says_why_it_cannot_be_written(store: LocalStore) -> None:
    store.write_release(releases.draft(store))
    before = files(store.root)
    said = finish(python(READ_ONLY, store.root, prefix=own_mounts())).splitlines()
    assert len(said) == 3 and all("Read-only file system" in line and "another store" in line for line in said)
    assert files(store.root) == before


# -- opening ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "", "file://", "file://elsewhere/store", "file:relative", "file:///a?b", "file:///a#b", "file:///a%00b", "a\0b",
        "ftp://host/store", "http://[::1", "data:store",
    ],
)  # fmt: skip
def test_what_is_no_store_is_refused(url: str) -> None:
    with pytest.raises(StoreError) as caught:
        open_store(url)
    assert "file:///absolute/folder" in str(caught.value)


def test_a_store_is_opened_by_path_and_by_its_own_url(tmp_path: Path) -> None:
    odd = tmp_path / "with space, % and #"
    made = open_store(odd)
    digest = made.put_bytes(DATA)
    for url in (made.url, str(odd), odd, f"file://localhost{made.url.removeprefix('file://')}"):
        assert open_store(url).has(digest)


def test_a_manifest_survives_the_folder(store: LocalStore) -> None:
    manifest: Manifest = releases.draft(store, refiner=True)
    store.write_release(manifest)
    assert LocalStore(store.root).read_release("toy/1") == manifest
