"""Write to a bucket of any S3-compatible service: blobs in parts, small objects whole.

The service must support `If-None-Match` on PutObject, as Amazon S3, Ceph and MinIO do.
"""

import base64
import hashlib
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

from boto3.s3.transfer import TransferConfig  # type: ignore[import-untyped]
from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]

from engine_builder.stores.writing import source_changed
from model.store.keys import BLOBS, blob_key
from model.store.options import StoreOptions
from model.store.s3_bucket import Bucket
from model.store.s3_errors import is_corrupted_body, is_missing, is_taken

UPLOAD_PART_BYTES = 16 * 2**20  # S3 requires at least 5 MiB, and at most 10,000 parts
COPY_LIMIT_BYTES = 5 * 10**9  # of one CopyObject. Only plans that hold their weights can be larger
COPY_PART_BYTES = 128 * 2**20
_PARTS_IN_FLIGHT = 8  # per blob
_PUBLISHER = "preheat-publisher"  # metadata key that distinguishes this publisher's object from a concurrent one's


class Source(Protocol):
    """What a blob is uploaded from: a file, or a `BytesSource`."""

    def read(self, count: int = -1, /) -> bytes:
        """Return the next `count` bytes, or fewer at the end; -1: all that are left."""


class BytesSource:
    """Reads bytes in memory. Unlike io.BytesIO it does not copy a memoryview, which may have gigabytes."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._left = memoryview(data)

    def read(self, count: int = -1, /) -> bytes:
        part = self._left if count < 0 else self._left[:count]
        self._left = self._left[len(part) :]
        return bytes(part)


class WritableBucket(Bucket):
    """A bucket that can be written. All methods raise StoreError."""

    def __init__(self, name: str, prefix: str, url: str, options: StoreOptions, connections: int) -> None:
        super().__init__(name, prefix, url, options, connections)
        self._bucket_exists = False  # True once a request has shown it

    def head(self, digest: str) -> Any:
        """Return the service's answer about a blob, or None if it is missing."""
        with self._requesting(f"Blob {digest[:12]}"):
            try:
                return self.client.head_object(Bucket=self.name, Key=self._key(blob_key(digest)))
            except ClientError as error:
                if not is_missing(error):
                    raise
                if not self._bucket_exists:
                    # A HEAD answer has no body, so a missing object looks like a missing bucket.
                    self.client.list_objects_v2(Bucket=self.name, MaxKeys=1)
                    self._bucket_exists = True
                return None

    def heads(self, digests: Iterable[str]) -> list[Any]:
        """Return `head` of each digest, requested in parallel."""
        with ThreadPoolExecutor(self._connections, thread_name_prefix="preheat-head") as pool:
            return list(pool.map(self.head, digests))

    def refresh(self, digest: str, size: int) -> None:
        """Copy a blob of `size` bytes onto itself, in parts if it is large. This renews its time of writing."""
        key = self._key(blob_key(digest))
        source = {"Bucket": self.name, "Key": key}
        with self._requesting(f"Blob {digest[:12]}"):
            if size <= COPY_LIMIT_BYTES:
                self.client.copy_object(Bucket=self.name, Key=key, CopySource=source, MetadataDirective="REPLACE")
            else:
                parts = TransferConfig(multipart_threshold=1, multipart_chunksize=COPY_PART_BYTES)
                self.client.copy(source, self.name, key, Config=parts)

    def put(self, digest: str, source: Source, size: int, name: str) -> None:
        """Write a blob of `size` bytes, in parts if it is large. Raises StoreError if the source `name` changes."""
        if size <= UPLOAD_PART_BYTES:
            self._put_whole(digest, source.read(), name)
        else:
            self._put_parts(digest, source, name)

    def delete(self, key: str, what: str) -> None:
        """Delete an object. `what`: in messages."""
        with self._requesting(what):
            self.client.delete_object(Bucket=self.name, Key=self._key(key))

    def _put_whole(self, digest: str, data: bytes, source: str) -> None:
        if hashlib.sha256(data).hexdigest() != digest:
            raise source_changed(source)
        self.write_small(blob_key(digest), data, f"Blob {digest[:12]}")
        self._options.report(len(data))

    def _put_parts(self, digest: str, source: Source, name: str) -> None:
        """Write a multipart upload. The blob appears only when all of it is uploaded."""
        target = {"Bucket": self.name, "Key": self._key(blob_key(digest))}
        hasher = hashlib.sha256()

        def send(number: int, data: bytes) -> dict[str, Any]:
            with self._slots:
                answer = self._send(
                    lambda: self.client.upload_part(
                        **target, **upload, PartNumber=number, Body=data, ContentMD5=_md5(data)
                    )
                )
            self._options.report(len(data))
            return {"PartNumber": number, "ETag": answer["ETag"]}

        with self._requesting(f"Blob {digest[:12]}"):
            upload = {"UploadId": self.client.create_multipart_upload(**target)["UploadId"]}
            with ThreadPoolExecutor(_PARTS_IN_FLIGHT, thread_name_prefix="preheat-put") as pool:
                sent: list[Future[dict[str, Any]]] = []
                try:
                    while data := source.read(UPLOAD_PART_BYTES):
                        hasher.update(data)
                        if len(sent) >= _PARTS_IN_FLIGHT:
                            sent[-_PARTS_IN_FLIGHT].result()  # only parts in flight are held in memory
                        sent.append(pool.submit(send, len(sent) + 1, data))
                    parts = {"Parts": [task.result() for task in sent]}
                    if hasher.hexdigest() != digest:
                        raise source_changed(name)
                    self.client.complete_multipart_upload(**target, **upload, MultipartUpload=parts)
                except BaseException:
                    pool.shutdown(cancel_futures=True)  # waits, so that no part arrives after the abort
                    with suppress(BotoCoreError, ClientError):
                        self.client.abort_multipart_upload(**target, **upload)
                    raise

    def _send(self, request: Callable[[], Any]) -> Any:
        """Send a body. Repeats it if the service's checksum shows that it arrived damaged."""
        for attempt in self._attempts():
            try:
                return request()
            except ClientError as error:
                if not is_corrupted_body(error) or attempt == self._options.attempts - 1:
                    raise

    def abort_uploads(self, begun_before: float) -> int:
        """Delete unfinished multipart uploads, which use space and are not listed. Returns their number."""
        with self._requesting("Unfinished uploads"):
            pages = self.client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.name, Prefix=self._key(f"{BLOBS}/")
            )
            uploads = [upload for page in pages for upload in page.get("Uploads", [])]
            abandoned = [upload for upload in uploads if upload["Initiated"].timestamp() < begun_before]
            for upload in abandoned:
                self.client.abort_multipart_upload(Bucket=self.name, Key=upload["Key"], UploadId=upload["UploadId"])
        return len(abandoned)

    def write_small(self, key: str, data: bytes, name: str) -> None:
        """Write an object in one request. The last writer wins."""
        with self._requesting(name):
            self._send(
                lambda: self.client.put_object(Bucket=self.name, Key=self._key(key), Body=data, ContentMD5=_md5(data))
            )

    def create_small(self, key: str, data: bytes, name: str) -> bool:
        """Write an object that does not exist yet. Returns False if it exists, also in a race."""
        target = {"Bucket": self.name, "Key": self._key(key)}
        publisher = uuid.uuid4().hex
        with self._requesting(name):
            for _ in self._attempts():
                try:
                    self._send(
                        lambda: self.client.put_object(
                            **target, Body=data, ContentMD5=_md5(data), IfNoneMatch="*",
                            Metadata={_PUBLISHER: publisher},
                        )
                    )  # fmt: skip
                    return True
                except ClientError as error:
                    if not is_taken(error):
                        raise
                # Taken, possibly by this same request: botocore sends it again if the answer was lost.
                try:
                    return bool(self.client.head_object(**target)["Metadata"].get(_PUBLISHER) == publisher)
                except ClientError as error:
                    if not is_missing(error):  # missing: the concurrent publisher was refused as well
                        raise
        return False


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
