"""Serving from a read-only folder, such as a mount or an image layer, copies nothing."""

import json
import os
from pathlib import Path

import pytest

from engine_builder.stores.local import WritableLocalStore
from tests.model.store.processes import finish, own_mounts, python
from tests.support import releases
from tests.support.releases import RELEASE_NAME, cpu_target

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
    from model.settings import read_settings

    prefetch = Prefetch(read_settings({"store": root.as_uri(), "release": "toy/1"}), {})
    loaded = load_release(prefetch.store(), "toy/1", [Target(*sys.argv[3:])], [], ColdStart())
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can switch to another user: run as root")
def test_serves_user_without_write_permission(tmp_path: Path) -> None:
    """The user of an image may differ from the folder's owner."""
    store = WritableLocalStore(tmp_path / "store")
    store.write_release(releases.draft_release(store))
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    script = """
        import os, sys
        from engine_builder.stores.local import WritableLocalStore

        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        store = WritableLocalStore(sys.argv[1])
        manifest = store.read_release("toy/1")
        for digest, blob in manifest.blobs().items():
            store.get(digest, blob.bytes)
        try:
            store.put_bytes(b"new")
        except Exception as error:
            print(error)
    """
    output = finish(python(script, store.root))
    assert "cannot be written: Permission denied" in output and WritableLocalStore(store.root).releases() == [
        RELEASE_NAME
    ]
