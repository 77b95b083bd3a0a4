"""A store in a folder: a disk, a mounted bucket, a read-only image layer. Promises what `Store` promises.

Writes go to a temporary name beside the target and are moved into place, so a reader, or a crash, never meets half a
file. Several processes may share the folder.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from model.errors import CorruptBlob, ManifestError, ReleaseExists, ReleaseNotFound, StoreError
from model.store.manifest import MANIFEST_LIMIT, Manifest, parse_manifest, split_name

_CHUNK = 4 * 2**20  # bytes read at a time while hashing


class LocalStore:
    """`file://` store. Verified blobs are remembered by (inode, size, mtime) for the life of the process."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root).absolute()
        self.url = self.root.as_uri()
        self._verified: set[tuple[str, int, int, int]] = set()

    # -- blobs ---------------------------------------------------------------------------------------------------

    def _blob_path(self, digest: str) -> Path:
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise ManifestError(f"{digest!r} is no SHA-256 digest.")
        return self.root / "blobs" / "sha256" / digest

    def has(self, digest: str) -> bool:
        return self._blob_path(digest).is_file()

    def get(self, digest: str, size: int) -> Path:
        path = self._blob_path(digest)
        with _reading(path, f"Blob {digest[:12]} is missing from {self.url}"):
            stat = path.stat()
            if stat.st_size != size:
                raise CorruptBlob(_corrupt(digest, self.url, f"it has {stat.st_size} bytes instead of {size}"))
            seen = (digest, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if seen not in self._verified:
                if _digest_of(path) != digest:
                    raise CorruptBlob(_corrupt(digest, self.url, "its bytes have changed"))
                self._verified.add(seen)
        return path

    def read(self, digest: str, into: memoryview) -> None:
        path = self._blob_path(digest)
        with (
            _reading(path, f"Blob {digest[:12]} is missing from {self.url}"),
            path.open("rb", buffering=0) as file,
        ):
            size = os.fstat(file.fileno()).st_size
            if size != len(into):
                raise CorruptBlob(_corrupt(digest, self.url, f"it has {size} bytes instead of {len(into)}"))
            hasher, at = hashlib.sha256(), 0
            while at < size:
                got = file.readinto(into[at : at + _CHUNK])
                if not got:
                    raise CorruptBlob(_corrupt(digest, self.url, f"it ends after {at} of {size} bytes"))
                hasher.update(into[at : at + got])
                at += got
        if hasher.hexdigest() != digest:
            raise CorruptBlob(_corrupt(digest, self.url, "its bytes have changed"))

    def put(self, path: Path) -> str:
        digest = _digest_of(path)
        self._place_blob(digest, path)
        return digest

    def put_bytes(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        self._place_blob(digest, data)
        return digest

    def _place_blob(self, digest: str, source: Path | bytes) -> None:
        target = self._blob_path(digest)
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        if target.is_file() and target.stat().st_size == size and _digest_of(target) == digest:
            return
        with _writing(self, target) as temporary:
            if isinstance(source, bytes):
                _write_through(temporary, [source])
            else:
                with source.open("rb") as file:
                    _write_through(temporary, iter(lambda: file.read(_CHUNK), b""))
            if _digest_of(temporary) != digest:
                raise CorruptBlob(f"{source if isinstance(source, Path) else 'The data'} changed while it was stored.")
            os.replace(temporary, target)

    # -- releases ------------------------------------------------------------------------------------------------

    def _release_path(self, name: str) -> Path:
        model, version = split_name(name)
        return self.root / "releases" / model / f"{version}.json"

    def read_release(self, name: str) -> Manifest:
        path = self._release_path(name)
        try:
            with path.open("rb") as file:
                data = file.read(MANIFEST_LIMIT + 1)
        except (FileNotFoundError, NotADirectoryError) as error:
            there = ", ".join(self.releases()) or "none"
            raise ReleaseNotFound(
                f"No release {name} in {self.url} (releases there: {there}): name one of them, or publish it with "
                f"`preheat publish {name} --store {self.url}`."
            ) from error
        except OSError as error:
            raise StoreError(f"Release {name} cannot be read from {self.url}: {error.strerror}.") from error
        return parse_manifest(data, name)

    def write_release(self, manifest: Manifest) -> None:
        for digest, blob in manifest.blobs().items():
            self.get(digest, blob.bytes)
        target = self._release_path(manifest.name)
        with _writing(self, target) as temporary:
            _write_through(temporary, [manifest.to_json()])
            try:
                os.link(temporary, target)  # fails where the name is taken: of two racing publishers one wins
            except FileExistsError as error:
                raise ReleaseExists(
                    f"{manifest.name} is published already and releases are written once: choose another version."
                ) from error

    def releases(self) -> list[str]:
        folder = self.root / "releases"
        return sorted(f"{path.parent.name}/{path.stem}" for path in folder.glob("*/*.json"))

    # -- the builder's records -----------------------------------------------------------------------------------

    def _record_path(self, kind: str, name: str) -> Path:
        split_name(f"{kind}/{name}")
        return self.root / "records" / kind / f"{name}.json"

    def read_record(self, kind: str, name: str) -> bytes | None:
        try:
            return self._record_path(kind, name).read_bytes()
        except FileNotFoundError:
            return None

    def write_record(self, kind: str, name: str, record: bytes) -> None:
        target = self._record_path(kind, name)
        with _writing(self, target) as temporary:
            _write_through(temporary, [record])
            os.replace(temporary, target)

    def records(self, kind: str) -> list[str]:
        return sorted(path.stem for path in (self.root / "records" / kind).glob("*.json"))


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _corrupt(digest: str, url: str, what: str) -> str:
    return f"Blob {digest[:12]} in {url} is damaged: {what}. Find all damage with `preheat verify`, then build again."


@contextmanager
def _reading(path: Path, missing: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptBlob(f"{missing}: build and publish the release again.") from error
    except OSError as error:
        raise StoreError(f"{path.name[:12]} cannot be read: {error.strerror}.") from error


@contextmanager
def _writing(store: LocalStore, target: Path) -> Iterator[Path]:
    """A temporary path beside `target`, gone afterwards whatever happens."""
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".incoming-", dir=target.parent)
        os.close(handle)
        temporary = Path(name)
        temporary.chmod(0o644)
        yield temporary
    except OSError as error:
        raise StoreError(
            f"{store.url} cannot be written: {error.strerror or error}. Nothing in it was changed."
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _write_through(path: Path, chunks: Iterator[bytes] | list[bytes]) -> None:
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
