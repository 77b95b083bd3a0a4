"""Read a store in a bucket of any S3-compatible service, over a network that may fail. Implements `Store`.

Blobs are fetched in parallel ranges into the cache folder (model/store/blob_cache.py). They are hashed there in order
while later ranges arrive, and nothing is used before its SHA-256 is verified. model/store/s3_bucket.py sends the
requests. It is imported at the first request. A blob in the cache needs no request.
"""

import hashlib
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from model.errors import StoreError
from model.store.adapter_record import AdapterRecord, parse_adapter
from model.store.blob_cache import BlobCache, PartialBlob
from model.store.keys import (
    ADAPTERS,
    RELEASES,
    adapter_key,
    adapter_not_found,
    blob_damaged,
    is_adapter_name,
    is_release_name,
    release_key,
    release_not_found,
)
from model.store.manifest import Blob, Manifest
from model.store.manifest_json import parse_manifest
from model.store.options import StoreOptions
from model.store.sink import BufferSink, DiscardSink, Sink, StoppableSink

if TYPE_CHECKING:
    from model.store.s3_bucket import Bucket

CONNECTIONS = 16
_CONCURRENT_BLOBS = 8
_CHUNK_BYTES = 2**20  # hashed at a time, if a blob goes only to the cache


class S3Store:
    """`s3://bucket[/prefix]` store with a local cache of its blobs. Thread-safe."""

    def __init__(self, url: str, options: StoreOptions | None = None) -> None:
        self._options = options = options or StoreOptions()
        self._bucket_name, self._prefix = split_url(url)
        self.url = f"s3://{self._bucket_name}" + (f"/{self._prefix}" if self._prefix else "")
        self._cache = BlobCache(options.cache_folder, options.cache_bytes)
        self._connected: Bucket | None = None
        self._connecting = Lock()
        self._preset_manifests: dict[str, bytes] = {}

    @property
    def _bucket(self) -> "Bucket":
        """The bucket, connected at its first use. Raises StoreError."""
        with self._connecting:
            if self._connected is None:
                self._connected = self._connect()
            return self._connected

    def _connect(self) -> "Bucket":
        from model.store.s3_bucket import Bucket

        return Bucket(self._bucket_name, self._prefix, self.url, self._options, CONNECTIONS)

    def close(self) -> None:
        """Close the connections and unpin the blobs. Otherwise garbage collection does both."""
        if self._connected is not None:
            self._connected.close()
        self._cache.close()

    # -- blobs ---------------------------------------------------------------------------------------------------

    def get(self, digest: str, size: int) -> Path:
        return self._get(digest, size, DiscardSink(_CHUNK_BYTES))

    def _get(self, digest: str, size: int, sink: Sink) -> Path:
        part_bytes = self._options.part_bytes
        return self._cache.fetch_blob(digest, size, part_bytes, lambda partial: self._fill(digest, partial, sink))

    def read(self, digest: str, into: memoryview) -> None:
        """Like `Store.read`. Always hashes the bytes in memory, once: a missing blob while it is fetched."""
        self._stream(digest, len(into), BufferSink(into, _CHUNK_BYTES), trust_verified=False)

    def stream(self, digest: str, size: int, sink: Sink) -> None:
        """Like `Store.stream`. A missing blob goes to the cache and to the sink in one pass, and is hashed once."""
        self._stream(digest, size, sink, trust_verified=True)

    def _stream(self, digest: str, size: int, sink: Sink, trust_verified: bool) -> None:
        def fill(partial: PartialBlob) -> None:
            self._fill(digest, partial, sink)

        while not self._cache.stream_cached(digest, size, sink, trust_verified):
            if self._cache.fetch_missing(digest, size, self._options.part_bytes, fill):
                return

    def fetch(self, blobs: Iterable[Blob], is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Fetch blobs into the cache in parallel. Raises the error of the first blob that fails."""

        def get(blob: Blob) -> None:
            self._get(blob.sha256, blob.bytes, StoppableSink(DiscardSink(_CHUNK_BYTES), is_stopped))

        with ThreadPoolExecutor(_CONCURRENT_BLOBS, thread_name_prefix="preheat-fetch") as pool:
            for _ in pool.map(get, blobs):
                pass

    def unpin(self, blobs: Iterable[Blob]) -> None:
        self._cache.unpin(blobs)

    def _fill(self, digest: str, partial: PartialBlob, sink: Sink) -> None:
        """Fetch the missing parts of a blob and verify it. After a wrong digest all parts are fetched once more."""
        for last in (False, True):
            if self._fetch_parts(digest, partial, sink) == digest:
                return
            partial.clear()
            self._options.report(-partial.size)
            if last:
                raise blob_damaged(digest, self.url, "its bytes have changed")

    def _fetch_parts(self, digest: str, partial: PartialBlob, sink: Sink) -> str:
        """Fetch the missing parts and pass all bytes to `sink` in order. Returns their SHA-256."""
        missing = partial.missing()
        self._options.report(partial.size - sum(end - at for at, end in map(partial.span, missing)))
        hasher = hashlib.sha256()
        with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="preheat-part") as pool:
            fetching = {part: pool.submit(self._fetch_part, digest, partial, part) for part in missing}
            try:
                at = part = available = 0
                while at < partial.size:
                    buffer = sink.buffer(at)[: partial.size - at]
                    while available < at + len(buffer):
                        if part in fetching:
                            fetching[part].result()
                        _, available = partial.span(part)
                        part += 1
                    partial.read(at, buffer)
                    hasher.update(buffer)
                    sink.filled(at, buffer)
                    at += len(buffer)
                for task in fetching.values():
                    task.result()  # an empty blob has one part, and the loop above did not wait for it
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return hasher.hexdigest()

    def _fetch_part(self, digest: str, partial: PartialBlob, part: int) -> None:
        at, end = partial.span(part)

        def write(data: bytes) -> None:
            nonlocal at
            partial.write(at, data)
            at += len(data)
            self._options.report(len(data))

        self._bucket.fetch_range(digest, at, end, partial.size, write)
        partial.finish(part)

    # -- releases ------------------------------------------------------------------------------------------------

    def read_release(self, name: str) -> Manifest:
        preset = self._preset_manifests.pop(name, None)
        return parse_manifest(self.read_manifest(name) if preset is None else preset, name)

    def preset_manifest(self, name: str, manifest: bytes) -> None:
        """Let the next `read_release` parse this manifest, which another process has just read."""
        self._preset_manifests[name] = manifest

    def read_manifest(self, name: str) -> bytes:
        """Return a release's manifest without parsing it. Raises ReleaseNotFound or StoreError."""
        data = self._bucket.read_small(release_key(name), f"Release {name}")
        if data is None:
            raise release_not_found(name, self.url, self.releases())
        return data

    def releases(self, model: str | None = None) -> list[str]:
        folder = f"{RELEASES}/"
        listed = folder if model is None else f"{folder}{model}/"
        keys = (found.key for found in self._bucket.list_objects(listed) if found.key.endswith(".json"))
        names = (key.removeprefix(folder).removesuffix(".json") for key in keys)
        return sorted(name for name in names if is_release_name(name))

    # -- adapters ------------------------------------------------------------------------------------------------

    def read_adapter(self, name: str) -> AdapterRecord:
        data = self._bucket.read_small(adapter_key(name), f"Adapter {name}")
        if data is None:
            raise adapter_not_found(name, self.url, [*self.adapters()])
        return parse_adapter(data, name)

    def adapters(self) -> dict[str, str]:
        folder = f"{ADAPTERS}/"
        marks = {
            found.key.removeprefix(folder).removesuffix(".json"): f"{found.etag} {found.changed}"
            for found in self._bucket.list_objects(folder)
            if found.key.endswith(".json")
        }
        return {name: marks[name] for name in sorted(marks) if is_adapter_name(name)}


def split_url(url: str) -> tuple[str, str]:
    """Return bucket and prefix of "s3://bucket/a/prefix". Raises StoreError."""
    parts = urlsplit(url)
    prefix = parts.path.strip("/")
    valid_bucket = re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]", parts.netloc)
    names = prefix.split("/") if prefix else []
    valid_prefix = all(re.fullmatch(r"[A-Za-z0-9!_.*'()-]+", name) and name not in (".", "..") for name in names)
    if parts.scheme != "s3" or not valid_bucket or not valid_prefix or parts.query or parts.fragment:
        raise StoreError(f"{url!r} is not the URL of a bucket.", "Give s3://bucket or s3://bucket/prefix.")
    return parts.netloc, prefix
