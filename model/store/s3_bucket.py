"""A bucket of any S3-compatible service, as a store needs it: blobs in ranges and in parts, small objects whole.

Requests are retried by botocore, bodies that break off here, each from its last byte; what fails for good is a
StoreError that says what to mend. The service must know `If-None-Match` on PutObject, as Amazon's, Ceph's and MinIO's
do. Importing this module imports boto3, which takes longer than fetching a small model.
"""

import base64
import hashlib
import random
import re
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from threading import BoundedSemaphore
from typing import Any, BinaryIO

from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]
from urllib3.exceptions import HTTPError

from model.errors import CorruptBlob, StoreError
from model.store.keys import BLOBS, blob_key
from model.store.manifest import MANIFEST_LIMIT
from model.store.options import StoreOptions
from model.store.s3_client import connect
from model.store.s3_errors import code_of, is_damage, is_missing, is_taken, sentence

LIST_PAGE = 1000  # keys of one answer, S3's most
UPLOAD_PART = 16 * 2**20  # bytes; S3 wants at least 5 MiB, and at most 10,000 parts
_UPLOADS = 8  # parts of one blob on their way at once
_CHUNK = 2**20  # bytes read from a connection at a time
_PAUSE = 0.1  # seconds before the first retry; doubled for each, up to
_LONGEST_PAUSE = 5.0
_PUBLISHER = "preheat-publisher"  # metadata that tells our object from one that somebody else wrote meanwhile
_BROKEN = (BotoCoreError, HTTPError)  # how reading a body fails; a request that fails is a StoreError by then


class Bucket:
    """The objects of a bucket whose keys begin with a prefix, which no key here has. For up to `connections` threads.

    Raises StoreError for a client that cannot be made, and CorruptBlob for what is not the blob that was asked for.
    """

    def __init__(self, name: str, prefix: str, url: str, options: StoreOptions, connections: int) -> None:
        self.name = name
        self._prefix = prefix
        self._url = url
        self._options = options
        self._connections = connections
        self._endpoint = options.endpoint or "Amazon S3"
        with self._asking("The store"):
            self.client = connect(options, connections)
        self.close = weakref.finalize(self, self.client.close)
        self._seen = False
        self._slots = BoundedSemaphore(connections)

    # -- blobs ---------------------------------------------------------------------------------------------------

    def fetch_range(self, digest: str, at: int, end: int, size: int, take: Callable[[bytes], None]) -> None:
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
            f"Blob {digest[:12]} breaks off at byte {at} of {size} each time it is asked of {self._url}: what came is "
            "kept, so start again when the network is better."
        ) from broken

    def _body(self, digest: str, at: int, end: int, size: int) -> Iterator[bytes]:
        """Bytes `at` to `end` of a blob, or fewer where the body breaks off. Raises what _BROKEN lists."""
        with self._asking(f"Blob {digest[:12]}"):
            asked = {"Range": f"bytes={at}-{end - 1}"} if size else {}
            try:
                answer = self.client.get_object(Bucket=self.name, Key=self._key(blob_key(digest)), **asked)
            except ClientError as error:
                if is_missing(error):
                    raise self.missing(digest) from error
                if code_of(error) == "InvalidRange":
                    raise self.damaged(digest, f"it has fewer than {size} bytes") from error
                raise
        with closing(answer["Body"]) as body:
            found = answer.get("ContentRange", f"/{answer['ContentLength']}").rpartition("/")[2]
            if found != str(size):
                raise self.damaged(digest, f"it has {found} bytes instead of {size}")
            while at < end and (data := body.read(min(_CHUNK, end - at))):
                at += len(data)
                yield data

    def missing(self, digest: str) -> CorruptBlob:
        return CorruptBlob(
            f"Blob {digest[:12]} is missing from {self._url}: build and publish the release again "
            "(`preheat build`, `preheat publish`)."
        )

    def damaged(self, digest: str, what: str) -> CorruptBlob:
        return CorruptBlob(
            f"Blob {digest[:12]} in {self._url} is damaged: {what}. Find all damage with `preheat verify`, delete it "
            f"({BLOBS}/{digest}), then build again (`preheat build`)."
        )

    def head(self, digest: str) -> Any:
        """The service's answer about a blob, None where it is not there."""
        with self._asking(f"Blob {digest[:12]}"):
            try:
                return self.client.head_object(Bucket=self.name, Key=self._key(blob_key(digest)))
            except ClientError as error:
                if not is_missing(error):
                    raise
                if not self._seen:
                    # A HEAD's answer has no body to say so: is it the object that is missing, or the whole bucket?
                    self.client.list_objects_v2(Bucket=self.name, MaxKeys=1)
                    self._seen = True
                return None

    def heads(self, digests: Iterable[str]) -> list[Any]:
        """`head` of each, asked side by side."""
        with ThreadPoolExecutor(self._connections, thread_name_prefix="preheat-head") as pool:
            return list(pool.map(self.head, digests))

    def refresh(self, digest: str) -> None:
        """Make a blob look as if it was written just now."""
        key = self._key(blob_key(digest))
        with self._asking(f"Blob {digest[:12]}"):
            self.client.copy_object(
                Bucket=self.name, Key=key, CopySource={"Bucket": self.name, "Key": key}, MetadataDirective="REPLACE"
            )

    def put(self, digest: str, source: BinaryIO, size: int, name: str) -> None:
        """Write a blob of `size` bytes: in one request where it is small, else in parts. Raises StoreError, with
        `name` in it, where the source has changed."""
        if size <= UPLOAD_PART:
            self._put_whole(digest, source.read(), name)
        else:
            self._put_parts(digest, source, name)

    def delete(self, digest: str) -> None:
        with self._asking(f"Blob {digest[:12]}"):
            self.client.delete_object(Bucket=self.name, Key=self._key(blob_key(digest)))

    def _put_whole(self, digest: str, data: bytes, source: str) -> None:
        if hashlib.sha256(data).hexdigest() != digest:
            raise _changed(source)
        key = self._key(blob_key(digest))
        with self._asking(f"Blob {digest[:12]}"):
            self._send(lambda: self.client.put_object(Bucket=self.name, Key=key, Body=data, ContentMD5=_md5(data)))
        self._options.report(len(data))

    def _put_parts(self, digest: str, source: BinaryIO, name: str) -> None:
        """A multipart upload: the blob appears once all of it is there, or not at all."""
        where = {"Bucket": self.name, "Key": self._key(blob_key(digest))}
        hasher = hashlib.sha256()

        def send(number: int, data: bytes) -> dict[str, Any]:
            with self._slots:
                answer = self._send(
                    lambda: self.client.upload_part(
                        **where, **upload, PartNumber=number, Body=data, ContentMD5=_md5(data)
                    )
                )
            self._options.report(len(data))
            return {"PartNumber": number, "ETag": answer["ETag"]}

        with self._asking(f"Blob {digest[:12]}"):
            upload = {"UploadId": self.client.create_multipart_upload(**where)["UploadId"]}
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
                self.client.complete_multipart_upload(**where, **upload, MultipartUpload={"Parts": parts})
            except BaseException:
                with suppress(BotoCoreError, ClientError):
                    self.client.abort_multipart_upload(**where, **upload)
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

    def abort_uploads(self, begun_before: float) -> int:
        """Multipart uploads that their writers left behind: they take room and no listing shows them."""
        with self._asking("Unfinished uploads"):
            pages = self.client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.name, Prefix=self._key(f"{BLOBS}/")
            )
            old = [u for page in pages for u in page.get("Uploads", []) if u["Initiated"].timestamp() < begun_before]
            for upload in old:
                self.client.abort_multipart_upload(Bucket=self.name, Key=upload["Key"], UploadId=upload["UploadId"])
        return len(old)

    # -- small objects -------------------------------------------------------------------------------------------

    def read_small(self, key: str, what: str) -> bytes | None:
        """An object whole, None where there is none; of one larger than any manifest, a byte more than that."""
        broken: Exception | None = None
        for attempt in range(self._options.attempts):
            if attempt:
                _pause(attempt)
            with self._asking(what):
                try:
                    answer = self.client.get_object(Bucket=self.name, Key=self._key(key))
                except ClientError as error:
                    if is_missing(error):
                        return None
                    raise
            try:
                with closing(answer["Body"]) as body:
                    data: bytes = body.read(MANIFEST_LIMIT + 1)
                    size: int = answer["ContentLength"]
                # These have no digest of their own; the service's names what was put, in one piece.
                if len(data) > MANIFEST_LIMIT or (len(data) == size and _fits_etag(data, answer)):
                    return data
            except _BROKEN as error:
                broken = error
        raise StoreError(
            f"{what} arrives damaged each time it is asked of {self._url}: check the network, then start again."
        ) from broken

    def listed(self, folder: str) -> Iterator[tuple[str, int, float]]:
        """Key (without our prefix), bytes and time of change of all objects whose key begins with `folder`."""
        skip = len(self._key(folder)) - len(folder)
        with self._asking(f"The list of {folder}"):
            for page in self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.name, Prefix=self._key(folder), PaginationConfig={"PageSize": LIST_PAGE}
            ):
                for entry in page.get("Contents", []):
                    yield entry["Key"][skip:], entry["Size"], entry["LastModified"].timestamp()

    def write_small(self, key: str, data: bytes, what: str) -> None:
        """Write an object; the last writer wins."""
        with self._asking(what):
            self._send(
                lambda: self.client.put_object(Bucket=self.name, Key=self._key(key), Body=data, ContentMD5=_md5(data))
            )

    def create_small(self, key: str, data: bytes, what: str) -> bool:
        """Write an object that is not there yet; False where it is, also in a race."""
        where = {"Bucket": self.name, "Key": self._key(key)}
        publisher = uuid.uuid4().hex
        with self._asking(what):
            for attempt in range(self._options.attempts):
                try:
                    self._send(
                        lambda: self.client.put_object(
                            **where, Body=data, ContentMD5=_md5(data), IfNoneMatch="*", Metadata={_PUBLISHER: publisher}
                        )
                    )
                    return True
                except ClientError as error:
                    if not is_taken(error):
                        raise
                # Taken; but by us, where the answer to the request that wrote it was lost and it was sent again.
                try:
                    return bool(self.client.head_object(**where)["Metadata"].get(_PUBLISHER) == publisher)
                except ClientError as error:
                    if not is_missing(error):
                        raise
                    _pause(attempt + 1)  # another publisher was in the middle of it, and has not made it
        return False

    # -- the service ---------------------------------------------------------------------------------------------

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        try:
            yield
        except (BotoCoreError, ClientError, HTTPError) as error:
            raise StoreError(sentence(error, what, self._url, self._endpoint)) from error


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _fits_etag(data: bytes, answer: Mapping[str, Any]) -> bool:
    """Whether a body is the one that the service keeps; where the ETag is no MD5, as under keys of KMS or the caller's,
    nobody can say."""
    found = str(answer["ETag"]).strip('"').lower()
    if "SSECustomerAlgorithm" in answer or answer.get("ServerSideEncryption", "AES256") != "AES256":
        return True
    return not re.fullmatch(r"[0-9a-f]{32}", found) or hashlib.md5(data, usedforsecurity=False).hexdigest() == found


def _changed(source: str) -> StoreError:
    return StoreError(f"{source} changed while it was stored: do it again.")


def _pause(attempt: int) -> None:
    """Longer each time, and of random length, so that many who failed together do not come back together."""
    time.sleep(min(_LONGEST_PAUSE, _PAUSE * 2 ** (attempt - 1)) * random.uniform(0.5, 1))


def _results(tasks: list[Future[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What tasks gave, in order. Raises what the first that failed raised, once none of the others will begin."""
    try:
        return [task.result() for task in tasks]
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
