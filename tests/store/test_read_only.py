"""A folder that can only be read is a store: a mount of the platform's, an image's layer. Nothing of it is copied."""

import json
import os
from pathlib import Path

import pytest

from model.store.local import LocalStore
from tests.stand_ins import releases
from tests.stand_ins.releases import NAME, cpu_target
from tests.store.test_local import finish, own_mounts, python

SERVE = """
    import json, subprocess, sys, tempfile
    from pathlib import Path

    root, temporary = Path(sys.argv[1]), Path(sys.argv[2])
    subprocess.run(["mount", "--bind", root, root], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", root], check=True)
    tempfile.tempdir = str(temporary)
    import torch
    from model.cold_start import ColdStart
    from model.loading.load import load_release
    from model.loading.prefetch import Prefetch
    from model.loading.target import Target

    prefetch = Prefetch({"store": root.as_uri(), "release": "toy/1"}, {})
    store = prefetch.store(root.as_uri())
    loaded = load_release(store, "toy/1", [Target(*sys.argv[3:])], [], ColdStart())
    y = loaded.model.engines["unet"].run({"x": torch.ones(1, 4, 8, 8)}, 64, 64)["y"]
    assert torch.isfinite(y).all()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/blobs/" in line}
    try:
        (root / "x").write_bytes(b"")
    except OSError as error:
        print(json.dumps({"mapped": sorted(mapped), "refused": error.strerror}))
"""


def test_a_read_only_folder_is_served_without_copying_its_weights(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    manifest = releases.draft(store, releases.toy())
    store.write_release(manifest)
    (tmp_path / "temporary").mkdir()
    before = {path: path.stat().st_mtime_ns for path in sorted(store.root.rglob("*"))}
    target = cpu_target()
    said = json.loads(
        finish(
            python(
                SERVE, store.root, tmp_path / "temporary", target.device, target.product, target.capability,
                target.runtime_tag, prefix=own_mounts(),
            )
        )
    )  # fmt: skip
    assert said["refused"] == "Read-only file system"
    weights = {str(store.root / "blobs" / "sha256" / b.sha256) for record in manifest.weights for b in record.blobs}
    assert set(said["mapped"]) == weights, "they are in memory as the files that they are"
    assert {path: path.stat().st_mtime_ns for path in sorted(store.root.rglob("*"))} == before
    assert not list((tmp_path / "temporary").iterdir()), "no blob was copied beside it either"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without the right to write: run as root")
def test_a_user_who_may_only_read_is_served(tmp_path: Path) -> None:
    """As in an image that runs as another user than the one who filled the folder."""
    store = LocalStore(tmp_path / "store")
    store.write_release(releases.draft(store, releases.toy()))
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    script = """
        import os, sys
        from model.store.local import LocalStore

        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        store = LocalStore(sys.argv[1])
        manifest = store.read_release("toy/1")
        for digest, blob in manifest.blobs().items():
            store.get(digest, blob.bytes)
        try:
            store.put_bytes(b"new")
        except Exception as error:
            print(error)
    """
    said = finish(python(script, store.root))
    assert "cannot be written: Permission denied" in said and LocalStore(store.root).releases() == [NAME]
