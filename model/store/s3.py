"""A store in a bucket of any S3-compatible service. Promises what `Store` promises, over a network that may fail.

A release is published by one conditional PutObject, so of racing publishers the service lets one win; blobs are named
by what they hold, so writing one twice is harmless. Blobs are fetched in ranges side by side into the cache folder
(model/store/blob_cache.py) and hashed there, in order, while the rest still comes; nothing is used before its SHA-256 was
found right. What the bucket is asked lies in model/store/s3_bucket.py, which is imported at the first question: with
everything in the cache none is asked.
"""

import hashlib
import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from model.errors import ManifestError, ReleaseExists, StoreError
from model.store.blob_cache import (
    BlobCache,
    Partial,
)
from model.store.keys import BLOBS, RELEASES, is_digest, is_release_name, record_key, release_key, release_not_found
from model.store.local import REFRESH_AGE
from model.store.manifest import Blob, Manifest
from model.store.manifest_json import parse_manifest
from model.store.options import StoreOptions
from model.store.sink import Nobody, Sink

if TYPE_CHECKING:
    from model.store.s3_bucket import Bucket

PART = 16 * 2**20  # bytes; large enough that a request's latency is small beside it, small enough to share connections
CONNECTIONS = 16
_BLOBS_AT_ONCE = 8
_CHUNK = 2**20  # bytes hashed at a time


class S3Store:
    """`s3://bucket[/prefix]` store, with a local cache of its blobs. Safe to use from several threads."""

    def __init__(self, url: str, options: StoreOptions | None = None) -> None:
        self._options = options = options or StoreOptions.from_deployment()
        self.bucket, self._prefix = split_url(url)
        self.url = f"s3://{self.bucket}" + (f"/{self._prefix}" if self._prefix else "")
        self._cache = BlobCache(options.cache_folder, options.cache_bytes)
        self._connected: Bucket | None = None
        self._connecting = Lock()
        self._offered: dict[str, bytes] = {}

    @property
    def _bucket(self) -> "Bucket":
        """The bucket, connected to when it is asked something for the first time. Raises StoreError."""
        with self._connecting:
            if self._connected is None:
                from model.store.s3_bucket import Bucket

                self._connected = Bucket(self.bucket, self._prefix, self.url, self._options, CONNECTIONS)
            return self._connected

    def close(self) -> None:
        """Close connections and give up what the cache keeps for us; otherwise both happen when nobody refers to us."""
        if self._connected is not None:
            self._connected.close()
        self._cache.close()

    # -- blobs: reading ------------------------------------------------------------------------------------------

    def get(self, digest: str, size: int) -> Path:
        return self._cache.bring(digest, size, PART, lambda partial: self._fill(digest, partial, Nobody(_CHUNK)))

    def read(self, digest: str, into: memoryview) -> None:
        self.get(digest, len(into))
        self._cache.read(digest, into)

    def stream(self, digest: str, size: int, sink: Sink) -> None:
        """What is not in the cache goes there and to the sink at once, and is read and hashed only once."""
        came = False

        def fill(partial: Partial) -> None:
            nonlocal came
            came = True
            self._fill(digest, partial, sink)

        if not self._cache.stream_kept(digest, size, sink):
            self._cache.bring(digest, size, PART, fill)
            if not came:  # another process fetched it while we waited
                self._cache.stream(digest, size, sink)

    def fetch(self, blobs: Iterable[Blob]) -> None:
        """Bring blobs into the cache, fetched and verified side by side. Raises what `get` raises, of the first."""
        with ThreadPoolExecutor(_BLOBS_AT_ONCE, thread_name_prefix="preheat-fetch") as pool:
            for _ in pool.map(lambda blob: self.get(blob.sha256, blob.bytes), blobs):
                pass

    def _fill(self, digest: str, partial: Partial, sink: Sink) -> None:
        """Fetch a blob's missing parts and check the whole. A wrong byte somewhere costs one more try of all parts."""
        for last in (False, True):
            if self._fetch_parts(digest, partial, sink) == digest:
                return
            partial.forget()
            self._options.report(-partial.size)
            if last:
                raise self._bucket.damaged(digest, "its bytes have changed")

    def _fetch_parts(self, digest: str, partial: Partial, sink: Sink) -> str:
        """Returns the SHA-256 of the file, hashed and handed over behind the parts that come."""
        missing = partial.missing()
        self._options.report(partial.size - sum(end - at for at, end in map(partial.span, missing)))
        hasher = hashlib.sha256()
        with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="preheat-part") as pool:
            coming = {part: pool.submit(self._fetch_part, digest, partial, part) for part in missing}
            try:
                at = part = come = 0
                while at < partial.size:
                    buffer = sink.buffer()[: partial.size - at]
                    while come < at + len(buffer):
                        if part in coming:
                            coming[part].result()
                        _, come = partial.span(part)
                        part += 1
                    partial.read(at, buffer)
                    hasher.update(buffer)
                    sink.filled(at, buffer)
                    at += len(buffer)
                for task in coming.values():
                    task.result()  # of a blob without bytes
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return hasher.hexdigest()

    def _fetch_part(self, digest: str, partial: Partial, part: int) -> None:
        at, end = partial.span(part)

        def take(data: bytes) -> None:
            nonlocal at
            partial.write(at, data)
            at += len(data)
            self._options.report(len(data))

        self._bucket.fetch_range(digest, at, end, partial.size, take)
        partial.finish(part)

    def check(self, digest: str, size: int) -> None:
        hasher = hashlib.sha256()
        at = 0

        def take(data: bytes) -> None:
            nonlocal at
            hasher.update(data)
            at += len(data)
            self._options.report(len(data))

        while True:
            end = min(size, at + PART)
            self._bucket.fetch_range(digest, at, end, size, take)
            if end == size:
                break
        if hasher.hexdigest() != digest:
            raise self._bucket.damaged(digest, "its bytes have changed")

    # -- blobs: writing ------------------------------------------------------------------------------------------

    def has(self, digest: str) -> bool:
        return self._bucket.head(digest) is not None

    def put(self, path: Path) -> str:
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                size = file.tell()
                if self._keeps(digest, size):
                    self._options.report(size)
                else:
                    file.seek(0)
                    self._bucket.put(digest, file, size, str(path))
        except OSError as error:
            raise StoreError(f"{path} cannot be read to be stored: {error.strerror or error}.") from error
        return digest

    def put_bytes(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        if self._keeps(digest, len(data)):
            self._options.report(len(data))
        else:
            self._bucket.put(digest, BytesIO(data), len(data), "The data")
        return digest

    def _keeps(self, digest: str, size: int) -> bool:
        """Whether the bucket has a blob in its full length, which is then made to look new (see `preheat gc`)."""
        head = self._bucket.head(digest)
        if head is None or head["ContentLength"] != size:
            return False
        if time.time() - head["LastModified"].timestamp() > REFRESH_AGE:
            self._bucket.refresh(digest)
        return True

    # -- releases ------------------------------------------------------------------------------------------------

    def read_release(self, name: str) -> Manifest:
        offered = self._offered.pop(name, None)
        return parse_manifest(self.read_manifest(name) if offered is None else offered, name)

    def offer(self, name: str, manifest: bytes) -> None:
        """What another process has just read as this release's manifest: the next `read_release` reads it instead."""
        self._offered[name] = manifest

    def read_manifest(self, name: str) -> bytes:
        """A release's manifest as it lies in the bucket, unread. Raises ReleaseNotFound or StoreError."""
        data = self._bucket.read_small(release_key(name), f"Release {name}")
        if data is None:
            raise release_not_found(name, self.url, self.releases())
        return data

    def write_release(self, manifest: Manifest) -> None:
        """As the protocol says; of the blobs, that each is there in its full length (`preheat verify` reads them)."""
        data = manifest.to_json()
        if parse_manifest(data, manifest.name) != manifest:
            raise ManifestError(f"The manifest of {manifest.name} would be read as another one: build it again.")
        blobs = manifest.blobs().values()
        for blob, head in zip(blobs, self._bucket.heads(blob.sha256 for blob in blobs), strict=True):
            if head is None:
                raise self._bucket.missing(blob.sha256)
            if head["ContentLength"] != blob.bytes:
                raise self._bucket.damaged(blob.sha256, f"it has {head['ContentLength']} bytes instead of {blob.bytes}")
        if not self._bucket.create_small(release_key(manifest.name), data, f"Release {manifest.name}"):
            raise ReleaseExists(
                f"{manifest.name} is published already and releases are written once: choose another version."
            )

    def releases(self) -> list[str]:
        keys = (key.removesuffix(".json") for key, _, _ in self._bucket.listed(f"{RELEASES}/") if key.endswith(".json"))
        return sorted(name for key in keys if is_release_name(name := key.removeprefix(f"{RELEASES}/")))

    # -- the builder's records -----------------------------------------------------------------------------------

    def read_record(self, kind: str, name: str) -> bytes | None:
        return self._bucket.read_small(record_key(kind, name), f"Record {kind}/{name}")

    def write_record(self, kind: str, name: str, record: bytes) -> None:
        self._bucket.write_small(record_key(kind, name), record, f"Record {kind}/{name}")

    def records(self, kind: str) -> list[str]:
        folder = record_key(kind, "x").removesuffix("x.json")
        names = (key.removeprefix(folder) for key, _, _ in self._bucket.listed(folder))
        return sorted(name.removesuffix(".json") for name in names if name.endswith(".json") and "/" not in name)

    # -- what `preheat gc` needs ---------------------------------------------------------------------------------

    def blobs(self) -> Iterator[tuple[str, int, float]]:
        for key, size, changed in self._bucket.listed(f"{BLOBS}/"):
            if is_digest(digest := key.removeprefix(f"{BLOBS}/")):
                yield digest, size, changed

    def delete_blob(self, digest: str, unless_changed_after: float) -> bool:
        head = self._bucket.head(digest)
        if head is None or head["LastModified"].timestamp() > unless_changed_after:
            return False
        self._bucket.delete(digest)
        return True

    def delete_unfinished(self, begun_before: float) -> int:
        return self._bucket.abort_uploads(begun_before)


def split_url(url: str) -> tuple[str, str]:
    """ "s3://bucket/a/prefix" -> bucket and prefix. Raises StoreError."""
    parts = urlsplit(url)
    prefix = parts.path.strip("/")
    sound = re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]", parts.netloc) and not (parts.query or parts.fragment)
    names = prefix.split("/") if prefix else []
    plain = all(re.fullmatch(r"[A-Za-z0-9!_.*'()-]+", name) and name not in (".", "..") for name in names)
    if parts.scheme != "s3" or not sound or not plain:
        raise StoreError(f"{url!r} is no store in a bucket: give s3://bucket or s3://bucket/prefix.")
    return parts.netloc, prefix
