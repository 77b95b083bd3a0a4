"""The read protocol of a store: immutable blobs by SHA-256, and releases by name. Nothing here writes.

blobs/sha256/<digest>               written once, verified at every read
releases/<model>/<version>.json     written once
records/<kind>/<name>.json          records of the builder, which may be rewritten

The builder's half, which writes, is in engine_builder/stores/.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from model.errors import StoreError
from model.store.local import LocalStore
from model.store.manifest import Blob, Manifest
from model.store.options import StoreOptions
from model.store.s3 import S3Store
from model.store.sink import Sink


class Store(Protocol):
    """Reads blobs and releases. Digests are SHA-256 in lower-case hex."""

    url: str

    def get(self, digest: str, size: int) -> Path:
        """Return the verified file of a blob of `size` bytes. Raises CorruptBlob or StoreError."""

    def read(self, digest: str, into: memoryview) -> None:
        """Fill `into` (exactly the blob's size) and verify it. Raises CorruptBlob or StoreError."""

    def stream(self, digest: str, size: int, sink: Sink) -> None:
        """Pass a blob's bytes to `sink` while reading. The bytes are verified only when this returns.

        The first buffer is filled completely, or holds the whole blob. Raises CorruptBlob, StoreError, and what `sink`
        raises.
        """

    def fetch(self, blobs: Iterable[Blob]) -> None:
        """Copy missing blobs to this machine in parallel, for `get` and `read`. Raises CorruptBlob or StoreError."""

    def read_release(self, name: str) -> Manifest:
        """Return the manifest of "model/version". Raises ReleaseNotFound, ManifestError or StoreError."""

    def releases(self) -> list[str]:
        """Return all release names, sorted. Raises StoreError."""


def open_store(url: str | Path, options: StoreOptions | None = None) -> Store:
    """Open the store at `url`: file:///folder, a path, or s3://bucket[/prefix]. Sends no request.

    `options` concern s3:// only. Raises StoreError for any other URL.
    """
    folder = parse_store_url(url)
    return S3Store(str(url), options) if folder is None else LocalStore(folder)


def parse_store_url(url: str | Path) -> Path | None:
    """Return the folder of a local store, or None for an s3:// URL. Raises StoreError for any other URL."""
    text = str(url)
    error = StoreError(
        f"{text!r} is not the URL of a store.", "Give file:///absolute/folder, a path, or s3://bucket/prefix."
    )
    try:
        parts = urlsplit(text)
    except ValueError as cause:
        raise error from cause
    if parts.scheme == "s3":
        return None
    path = text
    if parts.scheme == "file":
        path = unquote(parts.path)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not path.startswith("/"):
            raise error
    elif parts.scheme:
        raise error
    if not path or "\0" in path:
        raise error
    return Path(path)
