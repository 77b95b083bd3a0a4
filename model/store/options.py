"""The options of a store: cache folder, endpoint, credentials. This module opens nothing and reads no settings."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from model.errors import StoreError

Report = Callable[[int], None]
"""Receives the number of bytes moved since the last call. It is negative for bytes that must be moved again."""


def expand_cache_folder(folder: str) -> Path:
    """Return the path of a cache folder, in which a home folder is expanded (~). Raises StoreError."""
    try:
        if "\0" in folder:
            raise ValueError("the name contains a NUL character")
        return Path(folder).expanduser()
    except (RuntimeError, ValueError) as error:
        cause = f"{error}".rstrip(".")
        raise StoreError(
            f"The cache folder {folder!r} cannot be used: {cause[:1].lower()}{cause[1:]}.",
            "Name another folder (PREHEAT_CACHE_DIR, cache_dir in config.yaml, --cache-dir).",
        ) from error


@dataclass(frozen=True)
class StoreOptions:
    """Options of an s3:// store. A local store uses none. For None, boto3 reads its own files or the machine's role."""

    cache_dir: Path | None = None
    """Folder of fetched blobs; None: XDG_CACHE_HOME/preheat."""
    cache_bytes: int | None = None
    """Limit of that folder; None: the size of its disk."""
    endpoint: str | None = None
    """URL of an S3-compatible service; None: Amazon S3."""
    region: str | None = None
    """None: the region of boto3's files, else us-east-1."""
    profile: str | None = None
    """Profile in boto3's config files."""
    access_key_id: str | None = None
    secret_access_key: str | None = None
    session_token: str | None = None
    machine_defaults: bool = True
    """False: a missing endpoint or region is not read from this machine's environment and boto3's files."""
    part_bytes: int = 16 * 2**20
    """Bytes of one range: large compared with a request's latency, small enough to share connections."""
    attempts: int = 5
    """Tries of one request, or of one part of a body."""
    retry_pause: float = 0.1
    """Seconds before the first retry; doubled for each further one."""
    timeout: float = 30.0
    """Seconds without a byte after which a connection is closed."""
    report: Report = lambda moved: None
    """Called from several threads."""

    @property
    def cache_folder(self) -> Path:
        """The folder of fetched blobs. Raises StoreError if it cannot be a folder."""
        if self.cache_dir is not None:
            return expand_cache_folder(str(self.cache_dir))
        cache_home = os.environ.get("XDG_CACHE_HOME")
        return expand_cache_folder(f"{cache_home or '~/.cache'}/preheat")
