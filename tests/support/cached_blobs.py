"""Blobs of one repeated letter, and the contents of a cache folder. Scripts in other processes use them too."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from model.store.blob_cache import BlobCache, PartialBlob

PART = 1000
Fill = Callable[[PartialBlob], None]


def blob_of(letter: str, size: int = 10_000) -> tuple[str, bytes]:
    """Return the digest and the bytes of a blob."""
    data = letter.encode() * size
    return hashlib.sha256(data).hexdigest(), data


def fill_with(data: bytes, filled: list[int] | None = None) -> Fill:
    """Return a function that writes the missing parts, and appends their numbers to `filled`."""

    def fill(partial: PartialBlob) -> None:
        for part in partial.missing():
            at, end = partial.span(part)
            partial.write(at, data[at:end])
            partial.finish(part)
            if filled is not None:
                filled.append(part)

    return fill


def fetch(cache: BlobCache, letter: str, size: int = 10_000) -> Path:
    """Fetch a blob through the cache, unless it is cached."""
    digest, data = blob_of(letter, size)
    return cache.fetch_blob(digest, size, PART, fill_with(data))


def file_names(root: Path, folder: str = "blobs/sha256") -> set[str]:
    """Return the names of the files in a folder of the cache; by default, the digests of its complete blobs."""
    return {path.name for path in (root / folder).iterdir()}


def bytes_read() -> int:
    """Return the number of bytes that this thread has read so far, from files and sockets."""
    fields = Path("/proc/thread-self/io").read_text().split()
    return int(fields[fields.index("rchar:") + 1])
