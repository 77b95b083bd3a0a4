"""Read a bucket of any S3-compatible service: blobs in ranges, small objects whole.

botocore retries requests. If a blob's body breaks off, this module requests only the missing bytes. Small objects are
read again from the start. Lasting failures become StoreErrors. Importing this module imports boto3, which takes longer
than fetching a small model.
"""

import hashlib
import random
import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from threading import BoundedSemaphore
from typing import Any, NamedTuple

from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]
from urllib3.exceptions import HTTPError

from model.errors import StoreError
from model.store.keys import blob_damaged, blob_key, blob_missing
from model.store.manifest import MANIFEST_LIMIT
from model.store.options import StoreOptions
from model.store.s3_client import connect
from model.store.s3_errors import code_of, is_missing, store_error

_LIST_PAGE_KEYS = 1000  # keys of one response, the maximum of S3
_LONGEST_PAUSE_SECONDS = 5.0
_CHUNK_BYTES = 2**20  # read from a connection at a time
_BODY_ERRORS = (BotoCoreError, HTTPError)  # of reading a body; `_requesting` turns those of requests into StoreErrors


class ListedObject(NamedTuple):
    """An object of a list. changed: seconds since 1970. etag: differs for objects of other bytes."""

    key: str
    bytes: int
    changed: float
    etag: str


class Bucket:
    """The objects of a bucket whose keys begin with a prefix. Methods take and return keys without the prefix.

    Serves up to `connections` threads. The constructor raises StoreError if no client can be made.
    """

    def __init__(self, name: str, prefix: str, url: str, options: StoreOptions, connections: int) -> None:
        self.name = name
        self._prefix = prefix
        self._url = url
        self._options = options
        self._connections = connections
        self._endpoint = options.endpoint or "Amazon S3"
        with self._requesting("The store"):
            self.client = connect(options, connections)
        self.close = weakref.finalize(self, self.client.close)
        self._slots = BoundedSemaphore(connections)

    def fetch_range(self, digest: str, at: int, end: int, size: int, write: Callable[[bytes], None]) -> None:
        """Pass the bytes `at` to `end` of a blob to `write`, in order and each once, even if the body breaks off.

        Raises CorruptBlob or StoreError.
        """
        cause: Exception | None = None
        for _ in self._attempts():
            try:
                with self._slots:
                    for data in self._body(digest, at, end, size):
                        write(data)
                        at += len(data)
                if at == end:
                    return
            except _BODY_ERRORS as error:
                cause = error
        raise StoreError(
            f"Blob {digest[:12]} from {self._url} breaks off at byte {at} of {size}, also after several tries. The "
            "bytes received are kept.",
            "Check the network, then start again.",
        ) from cause

    def _body(self, digest: str, at: int, end: int, size: int) -> Iterator[bytes]:
        """Yield bytes `at` to `end` of a blob, or fewer if the body breaks off. Raises _BODY_ERRORS."""
        with self._requesting(f"Blob {digest[:12]}"):
            header = {"Range": f"bytes={at}-{end - 1}"} if size else {}
            try:
                answer = self.client.get_object(Bucket=self.name, Key=self._key(blob_key(digest)), **header)
            except ClientError as error:
                if is_missing(error):
                    raise blob_missing(digest, self._url) from error
                if code_of(error) == "InvalidRange":
                    raise blob_damaged(digest, self._url, f"it has fewer than {size} bytes") from error
                raise
        with closing(answer["Body"]) as body:
            actual = answer.get("ContentRange", f"/{answer['ContentLength']}").rpartition("/")[2]
            if actual != str(size):
                raise blob_damaged(digest, self._url, f"it has {actual} bytes instead of {size}")
            while at < end and (data := body.read(min(_CHUNK_BYTES, end - at))):
                at += len(data)
                yield data

    def read_small(self, key: str, what: str) -> bytes | None:
        """Return an object, or None if it is missing. Of a larger object only MANIFEST_LIMIT + 1 bytes are read."""
        cause: Exception | None = None
        for _ in self._attempts():
            with self._requesting(what):
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
                # These objects have no digest of their own, so the service's ETag is compared.
                if len(data) > MANIFEST_LIMIT or (len(data) == size and fits_etag(data, answer)):
                    return data
            except _BODY_ERRORS as error:
                cause = error
        raise StoreError(
            f"{what} from {self._url} arrives damaged, also after several tries.",
            "Check the network, then start again.",
        ) from cause

    def list_objects(self, folder: str) -> Iterator[ListedObject]:
        """Yield all objects whose key begins with `folder`."""
        skip = len(self._key(folder)) - len(folder)
        with self._requesting(f"The list of {folder}"):
            for page in self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.name, Prefix=self._key(folder), PaginationConfig={"PageSize": _LIST_PAGE_KEYS}
            ):
                for entry in page.get("Contents", []):
                    changed = entry["LastModified"].timestamp()
                    yield ListedObject(entry["Key"][skip:], entry["Size"], changed, entry.get("ETag", ""))

    def _attempts(self) -> Iterator[int]:
        """Yield 0, 1, ... and pause before each retry."""
        for attempt in range(self._options.attempts):
            if attempt:
                # Longer each time, and of random length, so that clients do not retry all at the same time.
                pause = min(_LONGEST_PAUSE_SECONDS, self._options.retry_pause * 2 ** (attempt - 1))
                time.sleep(pause * random.uniform(0.5, 1))
            yield attempt

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    @contextmanager
    def _requesting(self, what: str) -> Iterator[None]:
        try:
            yield
        except (BotoCoreError, ClientError, HTTPError) as error:
            raise store_error(error, what, self._url, self._endpoint) from error


def fits_etag(data: bytes, answer: Mapping[str, Any]) -> bool:
    """Return False if the ETag is an MD5 of other bytes. With KMS or customer keys an ETag is not an MD5."""
    etag = str(answer["ETag"]).strip('"').lower()
    if "SSECustomerAlgorithm" in answer or answer.get("ServerSideEncryption", "AES256") != "AES256":
        return True
    return not re.fullmatch(r"[0-9a-f]{32}", etag) or hashlib.md5(data, usedforsecurity=False).hexdigest() == etag
