"""Fixtures for attacks by someone who can write to a store, or to a node's cache.

Each attack is loaded by `load_release` as in a server: from a folder, and, for blobs, from a real bucket through a
cache (`in_folder_and_bucket`). It must be refused with its own error, change no file outside, and leave only complete,
correct files in the cache.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine_builder.stores.local import WritableLocalStore
from model.cold_start import ColdStart
from model.errors import PreheatError
from model.loading.load import Loaded, load_release
from model.store.local import LocalStore
from model.store.manifest import Manifest
from model.store.s3 import S3Store
from model.store.signature import PublicKey
from model.store.store import Store
from tests.support import releases
from tests.support.releases import NAME, cpu_target


@dataclass
class Victim:
    """A valid release to tamper with, and the servers that load it."""

    store: WritableLocalStore
    manifest: Manifest
    cache: Path
    """The cache folder of the server that loads from a bucket."""
    bucket: Callable[[Path], S3Store] | None
    """Copies a folder to a bucket and opens it; None if servers load from the folder itself."""
    entries: dict[str, Any] = field(default_factory=dict)
    """The manifest as JSON, which `refused` and `served` write first, unless `raw` is given."""
    raw: bytes | None = None
    keys: list[PublicKey] = field(default_factory=list)
    """The keys that the deployment trusts."""

    def keep(self, data: bytes) -> dict[str, Any]:
        """Store bytes under their own digest, as a publisher does."""
        return releases.put_blob(self.store, data).model_dump()

    def blob(self, digest: str) -> Path:
        """Return the file of a blob, to be overwritten."""
        return self.store.root / "blobs" / "sha256" / digest

    def served(self, name: str = NAME) -> Loaded:
        """Load the release as a server does."""
        releases.write_manifest(self.store.root, self.raw if self.raw is not None else self.entries)
        store: Store = LocalStore(self.store.root) if self.bucket is None else self.bucket(self.store.root)
        try:
            return load_release(store, name, [cpu_target()], [], ColdStart(), self.keys)
        finally:
            if isinstance(store, S3Store):
                store.close()

    def refused(self, kind: type[PreheatError], words: str, name: str = NAME) -> str:
        """Load the release, which must raise this error with these words."""
        with pytest.raises(PreheatError) as caught:
            self.served(name)
        message = str(caught.value)
        assert type(caught.value) is kind, repr(caught.value)
        assert words in message
        assert message.isprintable() and len(message) < 900, "it would fill a log, or forge a line"
        return message

    def check_cache(self) -> None:
        """Check that the cache has only complete, correct blobs."""
        folder = self.cache / "blobs" / "sha256"
        for path in folder.iterdir() if folder.exists() else ():
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name, path
        partial = self.cache / "partial"
        assert not partial.exists() or not list(partial.iterdir())


@pytest.fixture(scope="session")
def sound_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one valid release. Do not write to it."""
    store = WritableLocalStore(tmp_path_factory.mktemp("attacked") / "store")
    store.write_release(releases.draft(store, releases.compiled_toy()))
    return store.root


in_folder_and_bucket = pytest.mark.parametrize("victim", ["folder", "bucket"], indirect=True)
in_bucket = pytest.mark.parametrize("victim", ["bucket"], indirect=True)


@pytest.fixture
def victim(request: pytest.FixtureRequest, sound_release: Path, tmp_path: Path) -> Iterator[Victim]:
    """A copy of the release for one test. No file around it may change."""
    inside = tmp_path / "inside"
    store = WritableLocalStore(inside / "store")
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
    """A file outside the store and the cache."""
    return tmp_path / "outside"
