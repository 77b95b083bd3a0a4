"""What a stranger who can write a store, or a node's cache, has to play with; one file beside this one per attempt.

Each attempt is made where a server meets it, in `load_release`: from a folder, and, where it is about blobs, from a
real bucket through a cache (`everywhere`). It must be refused with a sentence of its own, change nothing outside, and
leave no file in the cache but whole, right ones.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from model.cold_start import ColdStart
from model.errors import PreheatError
from model.loading.load import (
    Loaded,
    load_release,
)
from model.store.local import LocalStore
from model.store.manifest import Manifest
from model.store.s3 import S3Store
from model.store.signature import PublicKey
from model.store.store import Store
from tests.stand_ins import releases
from tests.stand_ins.releases import NAME, cpu_target


@dataclass
class Victim:
    """A sound release to tamper with, and the servers that would load it."""

    store: LocalStore
    manifest: Manifest
    cache: Path
    """The cache folder of the server that loads from a bucket."""
    bucket: Callable[[Path], S3Store] | None
    """Makes a bucket of what a folder holds; None where servers load from the folder itself."""
    entries: dict[str, Any] = field(default_factory=dict)
    """The manifest as JSON, which `refused` and `served` put in place first. Bytes may be written to `raw` instead."""
    raw: bytes | None = None
    keys: list[PublicKey] = field(default_factory=list)
    """What the deployment trusts."""

    def keep(self, data: bytes) -> dict[str, Any]:
        """Bytes under their own digest: someone published them."""
        return releases.keep(self.store, data).model_dump()

    def blob(self, digest: str) -> Path:
        """Where a blob lies, to be overwritten."""
        return self.store.root / "blobs" / "sha256" / digest

    def served(self, name: str = NAME) -> Loaded:
        """Load it as a server does."""
        releases.write_raw(self.store.root, self.raw if self.raw is not None else self.entries)
        store: Store = LocalStore(self.store.root) if self.bucket is None else self.bucket(self.store.root)
        try:
            return load_release(store, name, [cpu_target()], [], ColdStart(), self.keys)
        finally:
            if isinstance(store, S3Store):
                store.close()

    def refused(self, kind: type[PreheatError], words: str, name: str = NAME) -> str:
        """Load it, and be refused with this kind of error and these words."""
        with pytest.raises(PreheatError) as caught:
            self.served(name)
        message = str(caught.value)
        assert type(caught.value) is kind, repr(caught.value)
        assert words in message
        assert message.isprintable() and len(message) < 900, "it would fill a log, or forge a line of it"
        return message

    def check_cache(self) -> None:
        """Nothing but whole blobs, under what they hold, and no partial one."""
        folder = self.cache / "blobs" / "sha256"
        for path in folder.iterdir() if folder.exists() else ():
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name, path
        partial = self.cache / "partial"
        assert not partial.exists() or not list(partial.iterdir())


@pytest.fixture(scope="session")
def sound_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one release that loads. Not to be written to."""
    store = LocalStore(tmp_path_factory.mktemp("attacked") / "store")
    store.write_release(releases.draft(store, releases.toy()))
    return store.root


everywhere = pytest.mark.parametrize("victim", ["folder", "bucket"], indirect=True)
through_a_cache = pytest.mark.parametrize("victim", ["bucket"], indirect=True)


@pytest.fixture
def victim(request: pytest.FixtureRequest, sound_release: Path, tmp_path: Path) -> Iterator[Victim]:
    """A copy of it of one's own. What lies around it must not change."""
    inside = tmp_path / "inside"
    store = LocalStore(inside / "store")
    for path in sound_release.rglob("*"):
        if path.is_file():
            target = store.root / path.relative_to(sound_release)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    bucket = None
    if getattr(request, "param", "folder") == "bucket":
        client, name = request.getfixturevalue("s3"), request.getfixturevalue("bucket")
        open_bucket = request.getfixturevalue("open_bucket")

        put: dict[str, bytes] = {}

        def bucket(root: Path) -> S3Store:
            for path in root.rglob("*"):
                key = str(path.relative_to(root))
                if path.is_file() and put.get(key) != (data := path.read_bytes()):
                    client.put_object(Bucket=name, Key=key, Body=data)
                    put[key] = data
            opened: S3Store = open_bucket(cache_dir=inside / "cache", attempts=2)
            return opened

    manifest = store.read_release(NAME)
    victim = Victim(store, manifest, inside / "cache", bucket, json.loads(manifest.to_json()))
    around = sorted(path.name for path in tmp_path.parent.iterdir())
    yield victim
    victim.check_cache()
    assert outside.read_bytes() == b"precious" and {path.name for path in tmp_path.iterdir()} == {"inside", "outside"}
    assert sorted(path.name for path in tmp_path.parent.iterdir()) == around


@pytest.fixture
def outside(victim: Victim, tmp_path: Path) -> Path:
    """A file that is none of the store's business."""
    return tmp_path / "outside"
