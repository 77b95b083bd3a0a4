"""Fixtures for attacks by someone who can write to a store, or to the cache folder of a server.

`load_release` loads each attacked release as in a server: from a folder, or from a real bucket through a cache. The
load must raise the expected error, change no file outside, and leave only complete and correct files in the cache.
"""

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine_builder.stores.local import WritableLocalStore
from model.cold_start import ColdStart
from model.errors import PreheatError
from model.loading.load import Loaded
from model.store.local import LocalStore
from model.store.manifest import Manifest
from model.store.options import StoreOptions
from model.store.s3 import S3Store
from model.store.signature import PublicKey
from model.store.store import Store
from tests.support import object_store as ceph
from tests.support import releases
from tests.support.deployments import deployed, load_release
from tests.support.object_store import ObjectStore
from tests.support.releases import RELEASE_NAME, cpu_target


@dataclass
class AttackedRelease:
    """A valid release to attack, and the server that loads it."""

    store: WritableLocalStore
    manifest: Manifest
    cache: Path
    """The cache folder of a server that loads from a bucket."""
    open_store: Callable[[], Store]
    """Opens `store`, or a bucket with the same files, as a server does."""
    entries: dict[str, Any] = field(default_factory=dict)
    """The manifest as JSON. Each load writes it first, unless there are `manifest_bytes`."""
    manifest_bytes: bytes | None = None
    keys: list[PublicKey] = field(default_factory=list)
    """The keys that the deployment trusts."""

    def put(self, data: bytes) -> dict[str, Any]:
        """Store bytes under their own digest, as a publisher does. Returns their entry of a manifest."""
        return releases.put_blob(self.store, data).model_dump()

    def blob_path(self, digest: str) -> Path:
        """Return the file of a blob in the store, which a test may overwrite."""
        return self.store.root / "blobs" / "sha256" / digest

    def load(self, name: str = RELEASE_NAME) -> Loaded:
        """Load the release as a server does."""
        manifest = self.entries if self.manifest_bytes is None else self.manifest_bytes
        releases.write_manifest(self.store.root, manifest)
        store = self.open_store()
        try:
            return load_release(store, deployed(name, public_keys=tuple(self.keys)), [cpu_target()], ColdStart())
        finally:
            if isinstance(store, S3Store):
                store.close()

    def assert_refused(self, kind: type[PreheatError], words: str, name: str = RELEASE_NAME) -> str:
        """Load the release, which must raise this error with these words. Returns the message."""
        with pytest.raises(PreheatError) as caught:
            self.load(name)
        message = str(caught.value)
        assert type(caught.value) is kind, repr(caught.value)
        assert words in message
        assert message.isprintable() and len(message) < 900, "the message could fill a log or forge a line"
        return message

    def assert_cache_is_correct(self) -> None:
        """Check that the cache has only complete and correct blobs."""
        folder = self.cache / "blobs" / "sha256"
        for path in folder.iterdir() if folder.exists() else ():
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name, path
        partial = self.cache / "partial"
        assert not partial.exists() or not list(partial.iterdir())


class MirrorBucket:
    """A bucket with the same files as a folder. It uploads only what has changed since the last upload."""

    def __init__(self, s3: Any, endpoint: str) -> None:
        self.s3, self.endpoint = s3, endpoint
        self.name = f"attacked-{uuid.uuid4().hex[:12]}"
        self.uploaded: dict[str, bytes] = {}
        s3.create_bucket(Bucket=self.name)

    def upload(self, root: Path) -> None:
        files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for key, data in files.items():
            if self.uploaded.get(key) != data:
                self.s3.put_object(Bucket=self.name, Key=key, Body=data)
                self.uploaded[key] = data
        for key in self.uploaded.keys() - files.keys():
            self.s3.delete_object(Bucket=self.name, Key=key)
            del self.uploaded[key]

    def open(self, cache: Path) -> S3Store:
        """Open the bucket as a server does, with this cache folder."""
        options = StoreOptions(
            cache_dir=cache,
            endpoint=self.endpoint,
            access_key_id=ceph.ACCESS_KEY,
            secret_access_key=ceph.SECRET_KEY,
            attempts=2,
            timeout=20.0,
        )
        return S3Store(f"s3://{self.name}", options)


@pytest.fixture(scope="session")
def mirror_bucket(s3: Any, object_store: ObjectStore) -> MirrorBucket:
    return MirrorBucket(s3, object_store.url)


@pytest.fixture(scope="session")
def valid_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one valid release. Do not write to it."""
    store = WritableLocalStore(tmp_path_factory.mktemp("attacked") / "store")
    store.write_release(releases.draft_release(store, releases.compiled_toy()))
    return store.root


from_bucket = pytest.mark.parametrize("attacked", ["bucket"], indirect=True)


@pytest.fixture
def attacked(request: pytest.FixtureRequest, valid_release: Path, tmp_path: Path) -> Iterator[AttackedRelease]:
    """A copy of the release for one test. No file around it may change."""
    inside = tmp_path / "inside"
    store = WritableLocalStore(inside / "store")
    for path in valid_release.rglob("*"):
        if path.is_file():
            target = store.root / path.relative_to(valid_release)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    cache = inside / "cache"

    bucket: MirrorBucket | None = None
    if getattr(request, "param", "folder") == "bucket":
        bucket = request.getfixturevalue("mirror_bucket")

    def open_store() -> Store:
        if bucket is None:
            return LocalStore(store.root)
        bucket.upload(store.root)
        return bucket.open(cache)

    manifest = store.read_release(RELEASE_NAME)
    attacked = AttackedRelease(store, manifest, cache, open_store, json.loads(manifest.to_json()))
    around = sorted(path.name for path in tmp_path.parent.iterdir())
    yield attacked
    attacked.assert_cache_is_correct()
    assert outside.read_bytes() == b"precious" and {path.name for path in tmp_path.iterdir()} == {"inside", "outside"}
    assert sorted(path.name for path in tmp_path.parent.iterdir()) == around


@pytest.fixture
def outside(attacked: AttackedRelease, tmp_path: Path) -> Path:
    """A file outside the store and the cache."""
    return tmp_path / "outside"
