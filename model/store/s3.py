"""A store in a bucket of any S3-compatible service. Promises what `Store` promises, over a network that may fail.

A release is published by one conditional PutObject, so of racing publishers the service lets one win; blobs are named
by what they hold, so writing one twice is harmless. Blobs are fetched in ranges side by side into the cache folder
(model/store/cache.py) and hashed there, in order, while the rest still comes; nothing is used before its SHA-256 was
found right. The service must know `If-None-Match` on PutObject, as Amazon's, Ceph's and MinIO's do.

Requests are retried by botocore, bodies that break off here, each from its last byte.
"""

import base64
import hashlib
import random
import re
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from io import BytesIO
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any, BinaryIO, TypeVar

from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]
from urllib3.exceptions import HTTPError

from model.errors import CorruptBlob, ManifestError, ReleaseExists, StoreError
from model.store.cache import BlobCache, Partial
from model.store.keys import (
    BLOBS,
    RELEASES,
    blob_key,
    is_digest,
    is_release_name,
    record_key,
    release_key,
    release_not_found,
)
from model.store.local import REFRESH_AGE
from model.store.manifest import MANIFEST_LIMIT, Blob, Manifest, parse_manifest
from model.store.options import StoreOptions
from model.store.s3_client import connect, split_url
from model.store.s3_errors import code_of, is_damage, is_missing, is_taken, sentence
from model.store.sink import Nobody, Sink

PART = 16 * 2**20  # bytes; large enough that a request's latency is small beside it, small enough to share connections
_CONNECTIONS = 16
_BLOBS_AT_ONCE = 8
_CHUNK = 2**20  # bytes read from a connection at a time
_PAUSE = 0.1  # seconds before the first retry; doubled for each, up to
_LONGEST_PAUSE = 5.0
_PUBLISHER = "preheat-publisher"  # metadata that tells our manifest from one that somebody else wrote meanwhile
LIST_PAGE = 1000  # keys of one answer, S3's most
UPLOAD_PART = 16 * 2**20  # bytes; S3 wants at least 5 MiB, and at most 10,000 parts
_UPLOADS = 8  # parts of one blob on their way at once
_BROKEN = (BotoCoreError, HTTPError)  # how reading a body fails; a request that fails is a StoreError by then
_T = TypeVar("_T")


class S3Store:
    """`s3://bucket[/prefix]` store, with a local cache of its blobs. Safe to use from several threads."""

    def __init__(self, url: str, options: StoreOptions | None = None) -> None:
        self._options = options = options or StoreOptions.from_deployment()
        self.bucket, self._prefix = split_url(url)
        self.url = f"s3://{self.bucket}" + (f"/{self._prefix}" if self._prefix else "")
        self._cache = BlobCache(options.cache_folder, options.cache_bytes)
        self._endpoint = options.endpoint or "Amazon S3"
        with self._asking("The store"):
            self._client = connect(options, _CONNECTIONS)
        self._close = weakref.finalize(self, self._client.close)
        self._bucket_seen = False
        self._slots = BoundedSemaphore(_CONNECTIONS)

    def close(self) -> None:
        """Close connections and give up what the cache keeps for us; otherwise both happen when nobody refers to us."""
        self._close()
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
            _results([pool.submit(self.get, blob.sha256, blob.bytes) for blob in blobs])

    def _fill(self, digest: str, partial: Partial, sink: Sink) -> None:
        """Fetch a blob's missing parts and check the whole. A wrong byte somewhere costs one more try of all parts."""
        for last in (False, True):
            if self._fetch_parts(digest, partial, sink) == digest:
                return
            partial.forget()
            self._options.report(-partial.size)
            if last:
                raise self._damaged(digest, "its bytes have changed")

    def _fetch_parts(self, digest: str, partial: Partial, sink: Sink) -> str:
        """Returns the SHA-256 of the file, hashed and handed over behind the parts that come."""
        missing = partial.missing()
        self._options.report(partial.size - sum(end - at for at, end in map(partial.span, missing)))
        hasher = hashlib.sha256()
        with ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="preheat-part") as pool:
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

        self._fetch_range(digest, at, end, partial.size, take)
        partial.finish(part)

    def _fetch_range(self, digest: str, at: int, end: int, size: int, take: Callable[[bytes], None]) -> None:
        """Give `take` the bytes `at` to `end` of a blob, in order and each once, however often the body breaks off."""
        broken: Exception | None = None
        for attempt in range(self._options.attempts):
            if attempt:
                _pause(attempt)
            try:
                with self._slots:
                    for data in self._body(digest, at, end, size):
                        take(data)
                        at += len(data)
                if at == end:
                    return
            except _BROKEN as error:
                broken = error
        raise StoreError(
            f"Blob {digest[:12]} breaks off at byte {at} of {size} each time it is asked of {self.url}: what came is "
            "kept, so start again when the network is better."
        ) from broken

    def _body(self, digest: str, at: int, end: int, size: int) -> Iterator[bytes]:
        """Bytes `at` to `end` of a blob, or fewer where the body breaks off. Raises what _BROKEN lists."""
        with self._asking(f"Blob {digest[:12]}"):
            asked = {"Range": f"bytes={at}-{end - 1}"} if size else {}
            try:
                answer = self._client.get_object(Bucket=self.bucket, Key=self._key(blob_key(digest)), **asked)
            except ClientError as error:
                if is_missing(error):
                    raise self._missing(digest) from error
                if code_of(error) == "InvalidRange":
                    raise self._damaged(digest, f"it has fewer than {size} bytes") from error
                raise
        with closing(answer["Body"]) as body:
            found = answer.get("ContentRange", f"/{answer['ContentLength']}").rpartition("/")[2]
            if found != str(size):
                raise self._damaged(digest, f"it has {found} bytes instead of {size}")
            while at < end and (data := body.read(min(_CHUNK, end - at))):
                at += len(data)
                yield data

    def _missing(self, digest: str) -> CorruptBlob:
        return CorruptBlob(
            f"Blob {digest[:12]} is missing from {self.url}: build and publish the release again "
            "(`preheat build`, `preheat publish`)."
        )

    def _damaged(self, digest: str, what: str) -> CorruptBlob:
        return CorruptBlob(
            f"Blob {digest[:12]} in {self.url} is damaged: {what}. Find all damage with `preheat verify`, delete it "
            f"({BLOBS}/{digest}), then build again (`preheat build`)."
        )

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
            self._fetch_range(digest, at, end, size, take)
            if end == size:
                break
        if hasher.hexdigest() != digest:
            raise self._damaged(digest, "its bytes have changed")

    # -- blobs: writing ------------------------------------------------------------------------------------------

    def has(self, digest: str) -> bool:
        return self._head(digest) is not None

    def put(self, path: Path) -> str:
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                size = file.tell()
                if self._keeps(digest, size):
                    self._options.report(size)
                elif size <= UPLOAD_PART:
                    file.seek(0)
                    self._put_whole(digest, file.read(), str(path))
                else:
                    file.seek(0)
                    self._put_parts(digest, file, str(path))
        except OSError as error:
            raise StoreError(f"{path} cannot be read to be stored: {error.strerror or error}.") from error
        return digest

    def put_bytes(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        if self._keeps(digest, len(data)):
            self._options.report(len(data))
        elif len(data) <= UPLOAD_PART:
            self._put_whole(digest, data, "The data")
        else:
            self._put_parts(digest, BytesIO(data), "The data")
        return digest

    def _keeps(self, digest: str, size: int) -> bool:
        """Whether the bucket has a blob in its full length, which is then made to look new (see `preheat gc`)."""
        head = self._head(digest)
        if head is None or head["ContentLength"] != size:
            return False
        if time.time() - head["LastModified"].timestamp() > REFRESH_AGE:
            key = self._key(blob_key(digest))
            with self._asking(f"Blob {digest[:12]}"):
                self._client.copy_object(
                    Bucket=self.bucket,
                    Key=key,
                    CopySource={"Bucket": self.bucket, "Key": key},
                    MetadataDirective="REPLACE",
                )
        return True

    def _head(self, digest: str) -> Any:
        with self._asking(f"Blob {digest[:12]}"):
            try:
                return self._client.head_object(Bucket=self.bucket, Key=self._key(blob_key(digest)))
            except ClientError as error:
                if not is_missing(error):
                    raise
                if not self._bucket_seen:
                    # A HEAD's answer has no body to say so: is it the object that is missing, or the whole bucket?
                    self._client.list_objects_v2(Bucket=self.bucket, MaxKeys=1)
                    self._bucket_seen = True
                return None

    def _put_whole(self, digest: str, data: bytes, source: str) -> None:
        if hashlib.sha256(data).hexdigest() != digest:
            raise _changed(source)
        key = self._key(blob_key(digest))
        with self._asking(f"Blob {digest[:12]}"):
            self._send(lambda: self._client.put_object(Bucket=self.bucket, Key=key, Body=data, ContentMD5=_md5(data)))
        self._options.report(len(data))

    def _put_parts(self, digest: str, source: BinaryIO, name: str) -> None:
        """A multipart upload: the blob appears once all of it is there, or not at all."""
        where = {"Bucket": self.bucket, "Key": self._key(blob_key(digest))}
        hasher = hashlib.sha256()

        def send(number: int, data: bytes) -> dict[str, Any]:
            with self._slots:
                answer = self._send(
                    lambda: self._client.upload_part(
                        **where, **upload, PartNumber=number, Body=data, ContentMD5=_md5(data)
                    )
                )
            self._options.report(len(data))
            return {"PartNumber": number, "ETag": answer["ETag"]}

        with self._asking(f"Blob {digest[:12]}"):
            upload = {"UploadId": self._client.create_multipart_upload(**where)["UploadId"]}
            try:
                with ThreadPoolExecutor(_UPLOADS, thread_name_prefix="preheat-put") as pool:
                    sent: list[Future[dict[str, Any]]] = []
                    while data := source.read(UPLOAD_PART):
                        hasher.update(data)
                        if len(sent) >= _UPLOADS:
                            sent[-_UPLOADS].result()  # no more parts in memory than are on their way
                        sent.append(pool.submit(send, len(sent) + 1, data))
                    parts = _results(sent)
                if hasher.hexdigest() != digest:
                    raise _changed(name)
                self._client.complete_multipart_upload(**where, **upload, MultipartUpload={"Parts": parts})
            except BaseException:
                with suppress(BotoCoreError, ClientError):
                    self._client.abort_multipart_upload(**where, **upload)
                raise

    def _send(self, request: Callable[[], Any]) -> Any:
        """Send a body again where it arrived damaged, which the service's checksums say."""
        for attempt in range(1, self._options.attempts):
            try:
                return request()
            except ClientError as error:
                if not is_damage(error):
                    raise
            _pause(attempt)
        return request()

    # -- releases ------------------------------------------------------------------------------------------------

    def read_release(self, name: str) -> Manifest:
        data = self._read_small(release_key(name), f"Release {name}")
        if data is None:
            raise release_not_found(name, self.url, self.releases())
        return parse_manifest(data, name)

    def write_release(self, manifest: Manifest) -> None:
        """As the protocol says; of the blobs, that each is there in its full length (`preheat verify` reads them)."""
        data = manifest.to_json()
        if parse_manifest(data, manifest.name) != manifest:
            raise ManifestError(f"The manifest of {manifest.name} would be read as another one: build it again.")
        blobs = list(manifest.blobs().values())
        with ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="preheat-head") as pool:
            heads = _results([pool.submit(self._head, blob.sha256) for blob in blobs])
        for blob, head in zip(blobs, heads, strict=True):
            if head is None:
                raise self._missing(blob.sha256)
            if head["ContentLength"] != blob.bytes:
                raise self._damaged(blob.sha256, f"it has {head['ContentLength']} bytes instead of {blob.bytes}")
        where = {"Bucket": self.bucket, "Key": self._key(release_key(manifest.name))}
        publisher = uuid.uuid4().hex
        with self._asking(f"Release {manifest.name}"):
            for attempt in range(self._options.attempts):
                try:
                    self._send(
                        lambda: self._client.put_object(
                            **where, Body=data, ContentMD5=_md5(data), IfNoneMatch="*", Metadata={_PUBLISHER: publisher}
                        )
                    )
                    return
                except ClientError as error:
                    if not is_taken(error):
                        raise
                # Taken; but by us, where the answer to the request that wrote it was lost and it was sent again.
                try:
                    winner = self._client.head_object(**where)["Metadata"].get(_PUBLISHER)
                except ClientError as error:
                    if not is_missing(error):
                        raise
                    _pause(attempt + 1)  # another publisher was in the middle of it, and has not made it
                    continue
                if winner == publisher:
                    return
                break
        raise ReleaseExists(
            f"{manifest.name} is published already and releases are written once: choose another version."
        )

    def releases(self) -> list[str]:
        keys = (key.removesuffix(".json") for key, _, _ in self._listed(f"{RELEASES}/") if key.endswith(".json"))
        return sorted(name for key in keys if is_release_name(name := key.removeprefix(f"{RELEASES}/")))

    # -- the builder's records -----------------------------------------------------------------------------------

    def read_record(self, kind: str, name: str) -> bytes | None:
        return self._read_small(record_key(kind, name), f"Record {kind}/{name}")

    def write_record(self, kind: str, name: str, record: bytes) -> None:
        where = {"Bucket": self.bucket, "Key": self._key(record_key(kind, name))}
        with self._asking(f"Record {kind}/{name}"):
            self._send(lambda: self._client.put_object(**where, Body=record, ContentMD5=_md5(record)))

    def records(self, kind: str) -> list[str]:
        folder = record_key(kind, "x").removesuffix("x.json")
        names = (key.removeprefix(folder) for key, _, _ in self._listed(folder))
        return sorted(name.removesuffix(".json") for name in names if name.endswith(".json") and "/" not in name)

    # -- what `preheat gc` needs ---------------------------------------------------------------------------------

    def blobs(self) -> Iterator[tuple[str, int, float]]:
        for key, size, changed in self._listed(f"{BLOBS}/"):
            if is_digest(digest := key.removeprefix(f"{BLOBS}/")):
                yield digest, size, changed

    def delete_blob(self, digest: str, unless_changed_after: float) -> bool:
        head = self._head(digest)
        if head is None or head["LastModified"].timestamp() > unless_changed_after:
            return False
        with self._asking(f"Blob {digest[:12]}"):
            self._client.delete_object(Bucket=self.bucket, Key=self._key(blob_key(digest)))
        return True

    def delete_unfinished(self, begun_before: float) -> int:
        """Multipart uploads that their writers left behind: they take room and no listing shows them."""
        with self._asking("Unfinished uploads"):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.bucket, Prefix=self._key(f"{BLOBS}/")
            )
            old = [u for page in pages for u in page.get("Uploads", []) if u["Initiated"].timestamp() < begun_before]
            for upload in old:
                self._client.abort_multipart_upload(Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        return len(old)

    # -- the service ---------------------------------------------------------------------------------------------

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _read_small(self, key: str, what: str) -> bytes | None:
        """An object whole, None where there is none; of one larger than any manifest, a byte more than that."""
        broken: Exception | None = None
        for attempt in range(self._options.attempts):
            if attempt:
                _pause(attempt)
            with self._asking(what):
                try:
                    answer = self._client.get_object(Bucket=self.bucket, Key=self._key(key))
                except ClientError as error:
                    if is_missing(error):
                        return None
                    raise
            try:
                with closing(answer["Body"]) as body:
                    data: bytes = body.read(MANIFEST_LIMIT + 1)
                    size: int = answer["ContentLength"]
                # These have no digest of their own; the service's names what was put, in one piece.
                if len(data) > MANIFEST_LIMIT or (len(data) == size and _fits_etag(data, answer["ETag"])):
                    return data
            except _BROKEN as error:
                broken = error
        raise StoreError(
            f"{what} arrives damaged each time it is asked of {self.url}: check the network, then start again."
        ) from broken

    def _listed(self, folder: str) -> Iterator[tuple[str, int, float]]:
        """Key (without our prefix), bytes and time of change of all objects whose key begins with `folder`."""
        skip = len(self._key(folder)) - len(folder)
        with self._asking(f"The list of {folder}"):
            for page in self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self._key(folder), PaginationConfig={"PageSize": LIST_PAGE}
            ):
                for entry in page.get("Contents", []):
                    yield entry["Key"][skip:], entry["Size"], entry["LastModified"].timestamp()

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        try:
            yield
        except (BotoCoreError, ClientError, HTTPError) as error:
            raise StoreError(sentence(error, what, self.url, self._endpoint)) from error


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _fits_etag(data: bytes, etag: str) -> bool:
    """Whether a body is the one that the service keeps; where an ETag is no MD5 (some encryption), nobody can say."""
    found = etag.strip('"').lower()
    return not re.fullmatch(r"[0-9a-f]{32}", found) or hashlib.md5(data, usedforsecurity=False).hexdigest() == found


def _changed(source: str) -> StoreError:
    return StoreError(f"{source} changed while it was stored: do it again.")


def _pause(attempt: int) -> None:
    """Longer each time, and of random length, so that many who failed together do not come back together."""
    time.sleep(min(_LONGEST_PAUSE, _PAUSE * 2 ** (attempt - 1)) * random.uniform(0.5, 1))


def _results(tasks: "Sequence[Future[_T]]") -> list[_T]:
    """What tasks gave, in order. Raises what the first that failed raised, once none of the others will begin."""
    try:
        return [task.result() for task in tasks]
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
