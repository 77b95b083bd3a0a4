"""Where releases live. A store holds immutable blobs by SHA-256 and releases by name; nothing else.

blobs/sha256/<digest>               written once, verified whenever they are read
releases/<model>/<version>.json     the only names people type
records/<kind>/<name>.json          the builder's notes: engines by key, drafts of releases; may be rewritten
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from model.errors import StoreError
from model.store.manifest import Blob, Manifest
from model.store.options import StoreOptions
from model.store.sink import Sink

__all__ = ["Sink", "Store", "StoreOptions", "open_store"]


class Store(Protocol):
    """The contract of every store. Digests are SHA-256 in lower-case hex."""

    url: str

    def get(self, digest: str, size: int) -> Path:
        """The verified file of a blob of `size` bytes. Raises CorruptBlob or StoreError."""

    def read(self, digest: str, into: memoryview) -> None:
        """Fill `into` (exactly the blob's bytes) and verify. Raises CorruptBlob or StoreError."""

    def stream(self, digest: str, size: int, sink: Sink) -> None:
        """Hand over a blob's bytes as they are read, and verify; only after this returns are they known to be right.
        The first buffer is filled whole, or with all there is. Raises CorruptBlob or StoreError, and what `sink` does.
        """

    def fetch(self, blobs: Iterable[Blob]) -> None:
        """Bring blobs to this machine side by side, so that `get` and `read` find them; where they are, nothing.
        Raises CorruptBlob or StoreError."""

    def check(self, digest: str, size: int) -> None:
        """Read all of a blob where it lies (not a copy) and verify it. Raises CorruptBlob or StoreError."""

    def has(self, digest: str) -> bool:
        """Whether a blob is there (not whether it is intact)."""

    def put(self, path: Path) -> str:
        """Keep a file's bytes; returns their digest. Doing it twice is harmless, and so is dying half-way."""

    def put_bytes(self, data: bytes) -> str:
        """Keep some bytes; returns their digest."""

    def read_release(self, name: str) -> Manifest:
        """The manifest of "model/version". Raises ReleaseNotFound or ManifestError."""

    def write_release(self, manifest: Manifest) -> None:
        """Publish. Raises ReleaseExists where the name is taken, also in a race; CorruptBlob where a blob is missing
        or damaged; ManifestError where the manifest could not be read again."""

    def releases(self) -> list[str]:
        """All release names, sorted."""

    def read_record(self, kind: str, name: str) -> bytes | None:
        """One of the builder's notes (kind "engines": by engine key; kind "drafts": model.loading.target), or None."""

    def write_record(self, kind: str, name: str, record: bytes) -> None:
        """Keep a note; the last writer wins."""

    def records(self, kind: str) -> list[str]:
        """Names of the notes of a kind, sorted."""

    def blobs(self) -> Iterator[tuple[str, int, float]]:
        """Every blob there is: digest, bytes, when it was last put (seconds since 1970)."""

    def delete_blob(self, digest: str, unless_changed_after: float) -> bool:
        """Delete a blob; False where it has gone, or was put after that time. For `preheat gc` only."""

    def delete_unfinished(self, begun_before: float) -> int:
        """Delete what writers that died have left of blobs; returns how many."""


def open_store(url: str | Path, options: StoreOptions | None = None) -> Store:
    """file:///folder (or a plain path): a local folder, also a read-only one. s3://bucket[/prefix]: a bucket, with
    `options` (default: what the environment says), which is asked nothing yet. Raises StoreError for anything else."""
    text = str(url)
    refusal = StoreError(
        f"{text!r} is no store this version can open: give file:///absolute/folder, a path, or s3://bucket/prefix."
    )
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise refusal from error
    if parts.scheme == "s3":
        from model.store.s3 import S3Store

        return S3Store(text, options)
    path = text
    if parts.scheme == "file":
        path = unquote(parts.path)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not path.startswith("/"):
            raise refusal
    elif parts.scheme:
        raise refusal
    if not path or "\0" in path:
        raise refusal
    from model.store.local import LocalStore

    return LocalStore(Path(path))
