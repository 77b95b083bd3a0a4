"""A store in a folder: damaged folders, full and read-only disks, killed and racing writers."""

import hashlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from engine_builder.stores.local import WritableLocalStore
from engine_builder.stores.store import open_writable_store
from model.errors import CorruptBlob, ManifestError, ReleaseExists, ReleaseNotFound, StoreError
from model.store.store import open_store
from tests.model.store.processes import CHANGING_FILE, assert_one_publisher_wins, finish, own_mounts, python
from tests.support import releases
from tests.support.releases import cpu_target

DATA = b"some bytes of an engine" * 1000
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> WritableLocalStore:
    return WritableLocalStore(tmp_path / "store")


def blob_path(store: WritableLocalStore, digest: str = DIGEST) -> Path:
    return store.root / "blobs" / "sha256" / digest


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


# -- blobs --------------------------------------------------------------------------------------------------------


def test_put_then_get_and_read(store: WritableLocalStore, tmp_path: Path) -> None:
    source = tmp_path / "engine.pt2"
    source.write_bytes(DATA)
    assert not store.has(DIGEST)
    assert store.put(source) == store.put_bytes(DATA) == store.put(source) == DIGEST
    assert store.has(DIGEST) and store.get(DIGEST, len(DATA)).read_bytes() == DATA
    buffer = bytearray(len(DATA))
    store.read(DIGEST, memoryview(buffer))
    assert buffer == DATA
    assert files(store.root) == [f"blobs/sha256/{DIGEST}"]
    assert blob_path(store).stat().st_mode & 0o777 == 0o644, "other users' servers must read it"


def test_refuses_damage_and_put_repairs_it(store: WritableLocalStore) -> None:
    path = blob_path(store)
    path.parent.mkdir(parents=True)
    one_bit = DATA[:5000] + bytes([DATA[5000] ^ 1]) + DATA[5001:]
    for damaged in (one_bit, DATA[:-1], DATA + b"\0", b"", DATA[::-1]):
        path.write_bytes(damaged)
        with pytest.raises(
            CorruptBlob, match=f"`preheat verify` and delete it .blobs/sha256/{DIGEST}.*`preheat build`"
        ):
            store.get(DIGEST, len(DATA))
        with pytest.raises(CorruptBlob, match=DIGEST[:12]):
            store.read(DIGEST, memoryview(bytearray(len(DATA))))
        store.put_bytes(DATA)
        assert path.read_bytes() == DATA and store.get(DIGEST, len(DATA)) == path


def test_refuses_missing_blob_and_wrong_size(store: WritableLocalStore) -> None:
    for attempt in (lambda: store.get(DIGEST, 1), lambda: store.read(DIGEST, memoryview(bytearray(1)))):
        with pytest.raises(CorruptBlob, match="missing from file://.*`preheat build`"):
            attempt()
    store.put_bytes(DATA)
    with pytest.raises(CorruptBlob, match=f"{len(DATA)} bytes instead of 7"):
        store.get(DIGEST, 7)
    with pytest.raises(CorruptBlob, match="instead of 7"):
        store.read(DIGEST, memoryview(bytearray(7)))


def test_detects_change_with_restored_mtime(store: WritableLocalStore) -> None:
    """Inode, size and modification time are the same; only the change time differs."""
    store.put_bytes(DATA)
    path = store.get(DIGEST, len(DATA))
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of a file system may tick 250 times a second
        path.write_bytes(DATA[::-1])
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    now = path.stat()
    assert (now.st_ino, now.st_size, now.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    with pytest.raises(CorruptBlob, match="have changed"):
        store.get(DIGEST, len(DATA))


def test_refuses_invalid_digest(store: WritableLocalStore) -> None:
    zeros = "0" * 63
    for digest in ("", "../" * 20 + "0000", zeros, "0" * 65, "A" * 64, "/" + zeros, zeros + "\n", zeros + "\0"):
        for attempt in (
            lambda digest: store.get(digest, 1),
            lambda digest: store.has(digest),
            lambda digest: store.read(digest, memoryview(bytearray(1))),
        ):
            with pytest.raises(ManifestError, match="is not a SHA-256 digest"):
                attempt(digest)


def test_put_refuses_missing_and_changing_sources(store: WritableLocalStore, tmp_path: Path) -> None:
    for source, words in (
        (tmp_path / "nothing.pt2", "nothing.pt2 does not exist, so it cannot be stored"),
        (tmp_path, "cannot be read"),
        (CHANGING_FILE, "changed while it was stored. Run the command again"),
    ):
        with pytest.raises(StoreError, match=words):
            store.put(source)
    assert files(store.root) == []


# -- links and special files ---------------------------------------------------------------------------------------


def test_put_replaces_link_but_not_its_target(store: WritableLocalStore, tmp_path: Path) -> None:
    outside = tmp_path / "passwd"
    outside.write_bytes(b"root")
    blob_path(store).parent.mkdir(parents=True)
    for target in (outside, tmp_path / "nowhere"):
        blob_path(store).symlink_to(target)
        store.put_bytes(DATA)
        assert not blob_path(store).is_symlink() and store.get(DIGEST, len(DATA)).read_bytes() == DATA
        blob_path(store).unlink()
    assert outside.read_bytes() == b"root" and not (tmp_path / "nowhere").exists()


def test_refuses_special_files_in_place_of_a_release(store: WritableLocalStore) -> None:
    release = store.root / "releases" / "toy" / "1.json"
    release.parent.mkdir(parents=True)
    for create in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        create(release)
        with pytest.raises(StoreError, match="Release toy/1 cannot be read"):
            store.read_release("toy/1")
        release.unlink()


# -- releases -----------------------------------------------------------------------------------------------------


def test_release_is_written_once(store: WritableLocalStore) -> None:
    manifest = releases.draft_release(store)
    store.write_release(manifest)
    written = (store.root / "releases/toy/1.json").read_bytes()
    with pytest.raises(ReleaseExists, match="toy/1 is already published.*Choose another version"):
        store.write_release(manifest.model_copy(update={"created": "later"}))
    assert (store.root / "releases/toy/1.json").read_bytes() == written
    assert store.read_release("toy/1") == manifest and store.releases() == ["toy/1"]


def test_missing_release_lists_available_ones(store: WritableLocalStore) -> None:
    with pytest.raises(
        ReleaseNotFound, match=r"toy/1 was not found in file://.*has no release. Run `preheat publish toy/1"
    ):
        store.read_release("toy/1")
    for number in range(100):
        releases.write_manifest(store.root, {}, f"toy/{number}")
    with pytest.raises(ReleaseNotFound, match=r"Available: toy/0, .* and 80 more\.") as caught:
        store.read_release("toy/none")
    assert len(str(caught.value)) < 1000


def test_refuses_release_with_bad_blob(store: WritableLocalStore) -> None:
    manifest = releases.draft_release(store)
    digests = list(manifest.blobs())
    for digest in (digests[0], digests[-1], digests[len(digests) // 2]):
        path = blob_path(store, digest)
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


def test_lists_only_valid_release_names(store: WritableLocalStore) -> None:
    store.write_release(releases.draft_release(store))
    folder = store.root / "releases"
    for other in ("toy/.hidden.json", "toy/a b.json", "toy/readme.txt", "toy/.incoming-x.json", ".DS_Store"):
        (folder / other).write_text("{}")
    (folder / "a b").mkdir()
    (folder / "a b" / "1.json").write_text("{}")
    assert store.releases() == ["toy/1"]


def test_exactly_one_racing_publisher_wins(store: WritableLocalStore, tmp_path: Path) -> None:
    assert_one_publisher_wins(store, store.url, tmp_path / "draft.json", {})
    assert not list(store.root.rglob(".incoming-*"))


def test_publishers_at_the_same_time(store: WritableLocalStore) -> None:
    """Equal content gets one release. Other content gets the next number, or an error if the version was named."""
    draft = releases.draft_release(store)
    one, other = (draft.model_copy(update={"builder": {"source": source}}) for source in "ab")
    answers = releases.publish_at_once(store, [one, one, other, other], "")
    assert sorted(answers) == ["published"] * 2 + ["unchanged"] * 2
    assert {store.read_release(name).builder["source"] for name in store.releases()} == {"a", "b"}
    answers = releases.publish_at_once(store, [one, one, other, other], "7")
    exists = "toy/7 is already published, and releases are written once. Choose another version."
    assert sorted(answers) == ["published", exists, exists, "unchanged"]


# -- records ------------------------------------------------------------------------------------------------------


def test_records_are_kept_rewritten_and_listed(store: WritableLocalStore) -> None:
    long = "m" * 128 + ".cuda-rtxpro6000blackwell-sm120-torch2.13-cu130.fp16"
    assert store.read_record("drafts", long) is None and store.records("drafts") == []
    store.write_record("drafts", long, b"one")
    store.write_record("drafts", long, b"two")
    assert store.read_record("drafts", long) == b"two" and store.records("drafts") == [long]
    for kind, name in (("..", "x"), ("drafts", "../x"), ("drafts", ""), ("drafts", "x" * 221), ("a/b", "x")):
        with pytest.raises(StoreError, match="not a valid name for a record"):
            store.write_record(kind, name, b"")


# -- crashes, full disks, read-only disks -------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_killed_put_leaves_valid_store(store: WritableLocalStore, moment: str) -> None:
    """kill -9 before the bytes are flushed, or before the file is renamed."""
    script = """
        import os, signal, sys
        from engine_builder.stores.local import WritableLocalStore

        def stop(*_):
            print("stopped", flush=True)
            signal.pause()

        setattr(os, sys.argv[2], stop)
        WritableLocalStore(sys.argv[1]).put_bytes(b"some bytes of an engine" * 1000)
    """
    writer = python(script, store.root, moment)
    assert writer.stdout is not None and writer.stdout.readline() == "stopped\n"
    writer.kill()
    assert writer.wait(timeout=60) == -signal.SIGKILL
    writer.communicate()
    [incoming] = store.root.rglob(".incoming-*")
    assert not store.has(DIGEST) and not blob_path(store).exists()
    again = WritableLocalStore(store.root)
    assert again.put_bytes(DATA) == DIGEST and again.get(DIGEST, len(DATA)).read_bytes() == DATA
    assert incoming.exists(), "its writer may be alive"


def test_deletes_files_of_dead_writers_after_a_day(store: WritableLocalStore) -> None:
    folders = [store.root / "blobs" / "sha256", store.root / "releases" / "toy"]
    now = time.time()
    for folder in folders:
        folder.mkdir(parents=True)
        for name, age in ((".incoming-old", 25 * 3600), (".incoming-young", 23 * 3600), ("not-ours", 99 * 3600)):
            (folder / name).write_bytes(b"x")
            os.utime(folder / name, (now - age, now - age))
    (folders[0] / ".incoming-folder").mkdir()
    os.utime(folders[0] / ".incoming-folder", (0, 0))
    store.write_release(releases.draft_release(store))
    for folder in folders:
        assert not (folder / ".incoming-old").exists()
        assert (folder / ".incoming-young").exists() and (folder / "not-ours").exists()


TRY_TO_WRITE = """
    import os, sys, subprocess
    from pathlib import Path
    from model.errors import StoreError
    from engine_builder.stores.local import WritableLocalStore

    root, large = Path(sys.argv[1]), os.urandom(2**20)
    for mount in sys.argv[2:]:
        subprocess.run(["mount", *mount.split(), root], check=True)
    store = WritableLocalStore(root)
    if "tmpfs" in sys.argv[2]:
        small = store.put_bytes(b"small")
        store.write_record("engines", "key", b"before")
    else:
        small, blob = next(iter(store.read_release("toy/1").blobs().items()))
        assert store.put_bytes(store.get(small, blob.bytes).read_bytes()) == small
    before = sorted(root.rglob("*"))
    for attempt in (lambda: store.put_bytes(large), lambda: store.write_record("engines", "key", large)):
        try:
            attempt()
        except StoreError as error:
            print(error)
        assert sorted(root.rglob("*")) == before, "a file remains"
    assert store.has(small) and store.read_record("engines", "key") in (b"before", None)
"""


def test_full_disk_is_reported(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    process = python(TRY_TO_WRITE, tmp_path / "disk", "-t tmpfs -o size=256k none", prefix=own_mounts())
    lines = finish(process).splitlines()
    assert len(lines) == 2 and all("No space left on device" in line and "Free disk space" in line for line in lines)


def test_read_only_disk_is_read_but_not_written(store: WritableLocalStore) -> None:
    store.write_release(releases.draft_release(store))
    mounts = f"--bind {store.root}", "-o remount,ro,bind"
    lines = finish(python(TRY_TO_WRITE, store.root, *mounts, prefix=own_mounts())).splitlines()
    assert len(lines) == 2 and all("Read-only file system" in line and "another store" in line for line in lines)


# -- opening ------------------------------------------------------------------------------------------------------


def test_refuses_invalid_url() -> None:
    for url in (
        "", "file://", "file://elsewhere/store", "file:relative", "file:///a?b", "file:///a#b", "file:///a%00b", "a\0b",
        "ftp://host/store", "http://[::1", "data:store",
    ):  # fmt: skip
        with pytest.raises(StoreError) as caught:
            open_store(url)
        assert "file:///absolute/folder" in str(caught.value)


def test_opens_by_path_and_by_url(tmp_path: Path) -> None:
    odd = tmp_path / "with space, % and #"
    store = open_writable_store(odd)
    digest = store.put_bytes(DATA)
    for url in (store.url, str(odd), odd, f"file://localhost{store.url.removeprefix('file://')}"):
        assert open_store(url).get(digest, len(DATA)) == open_writable_store(url).get(digest, len(DATA))


SERVE = """
    import json, subprocess, sys, tempfile
    from pathlib import Path

    root, temporary = Path(sys.argv[1]), Path(sys.argv[2])
    subprocess.run(["mount", "--bind", root, root], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", root], check=True)
    tempfile.tempdir = str(temporary)
    import torch
    from model.cold_start import ColdStart
    from model.deployment import Deployment
    from model.loading.prefetch import Prefetch
    from model.loading.releases import Releases
    from model.loading.target import Target
    from model.settings import read_settings

    prefetch = Prefetch(read_settings({"store": root.as_uri(), "release": "toy/1"}), {})
    loaded = Releases(prefetch.store(), Deployment(("toy/1",)), [Target(*sys.argv[3:])], ColdStart()).open(0)
    y = loaded.model.engines["unet"].run({"x": torch.ones(1, 4, 8, 8)}, 64, 64)["y"]
    assert torch.isfinite(y).all()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/blobs/" in line}
    try:
        (root / "x").write_bytes(b"")
    except OSError as error:
        print(json.dumps({"mapped": sorted(mapped), "refused": error.strerror}))
"""


def test_serves_read_only_folder_without_copying(tmp_path: Path) -> None:
    store = WritableLocalStore(tmp_path / "store")
    store.write_release(releases.draft_release(store, releases.compiled_toy()))
    (tmp_path / "temporary").mkdir()
    before = {path: path.stat().st_mtime_ns for path in sorted(store.root.rglob("*"))}
    target = cpu_target()
    result = json.loads(
        finish(
            python(
                SERVE, store.root, tmp_path / "temporary", target.device, target.product, target.capability,
                target.runtime_tag, prefix=own_mounts(),
            )
        )
    )  # fmt: skip
    assert result["refused"] == "Read-only file system"
    assert result["mapped"] == [], "a mapped file could change under the server"
    assert {path: path.stat().st_mtime_ns for path in sorted(store.root.rglob("*"))} == before
    assert not list((tmp_path / "temporary").iterdir()), "no blob was copied elsewhere"
