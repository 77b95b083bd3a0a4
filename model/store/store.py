"""The read protocol of a store: immutable blobs by SHA-256, and releases and adapters by name.

blobs/sha256/<digest>               written once; readers verify the digest
releases/<model>/<version>.json     the manifest of a release, written once
adapters/<name>.json                the record of a LoRA adapter, written once
records/<kind>/<name>.json          the builder's records: drafts, engines, graphs, kernel times, calibrations

Nothing here writes to the store. The builder writes, with engine_builder/stores/.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from model.errors import StoreError
from model.store.adapter_record import AdapterRecord
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
        """Pass a blob's bytes to `sink` while reading. The bytes are verified only when this method returns.

        The store fills the sink's first buffer completely, or with the whole blob. Raises CorruptBlob, StoreError, and
        what `sink` raises.
        """

    def fetch(self, blobs: Iterable[Blob], is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Prepare `get` and `read` of `blobs`: copy blobs that this machine lacks, several at once.

        A local store copies nothing. Raises CorruptBlob or StoreError, and Unavailable soon after `is_stopped` is true.
        """

    def read_release(self, name: str) -> Manifest:
        """Return the manifest of "model/version". Raises ReleaseNotFound, ManifestError or StoreError."""

    def releases(self, model: str | None = None) -> list[str]:
        """Return the names of all releases, or of those of a model, sorted. Raises StoreError."""

    def read_adapter(self, name: str) -> AdapterRecord:
        """Return the record of an adapter. Raises AdapterNotFound, AdapterError or StoreError."""

    def adapters(self) -> dict[str, str]:
        """Return the names of all adapters, sorted, each with a mark that changes when its record is written again.

        Raises StoreError.
        """

    def unpin(self, blobs: Iterable[Blob]) -> None:
        """Let this machine's cache evict blobs, which this process reads no more. Raises StoreError."""


def open_store(url: str | Path, options: StoreOptions | None = None) -> Store:
    """Open the store at `url`: file:///folder, a path, or s3://bucket[/prefix]. Sends no request.

    A local store ignores `options`. Raises StoreError for any other URL.
    """
    folder = local_store_folder(url)
    return S3Store(str(url), options) if folder is None else LocalStore(folder)


def local_store_folder(url: str | Path) -> Path | None:
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
