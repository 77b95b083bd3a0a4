"""What a deployment may say of its store beside the URL: cache folder, endpoint, credentials. Nothing is opened here.

The environment comes first (PREHEAT_CACHE_DIR, PREHEAT_CACHE_BYTES and boto3's own AWS_* names), then the Truss secrets
and model_metadata.preheat; what neither says is left to boto3 (its config files, the machine's role).
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import ManifestError

Report = Callable[[int], None]
"""Bytes moved since the last call; below zero where they must be moved again."""

_SECRET_NAMES = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")


def _nobody(moved: int) -> None:
    pass


@dataclass(frozen=True)
class StoreOptions:
    """How to open a store; a local folder needs none of it."""

    cache_dir: Path | None = None
    """Where fetched blobs are kept; None: XDG_CACHE_HOME/preheat."""
    cache_bytes: int | None = None
    """What that folder may hold; None: all the disk has."""
    endpoint: str | None = None
    """URL of an S3-compatible service; None: Amazon's."""
    region: str | None = None
    profile: str | None = None
    """A profile of boto3's config files."""
    access_key_id: str | None = None
    secret_access_key: str | None = None
    session_token: str | None = None
    attempts: int = 5
    """How often one request, or one part of a body, is tried."""
    timeout: float = 30.0
    """Seconds without a byte after which a connection is given up."""
    report: Report = _nobody
    """Called from several threads."""

    @classmethod
    def from_deployment(
        cls, settings: Mapping[str, Any] | None = None, secrets: Mapping[str, str] | None = None
    ) -> "StoreOptions":
        """The environment's, then `settings` (model_metadata.preheat) and Truss `secrets`. Raises ManifestError."""
        settings = settings or {}
        folder = _text(settings, "cache_dir", "PREHEAT_CACHE_DIR")
        size = os.environ.get("PREHEAT_CACHE_BYTES") or settings.get("cache_bytes")
        # Only both halves of a key open anything; where the environment has its own, the secrets are not looked at.
        keys: list[str | None] = [None, None, None]
        if not (os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_PROFILE")):
            found = [_secret(secrets, name) for name in _SECRET_NAMES]
            keys = found if found[0] and found[1] else keys
        return cls(
            cache_dir=Path(folder).expanduser() if folder else None,
            cache_bytes=_whole(size),
            endpoint=_text(settings, "endpoint", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
            region=_text(settings, "region", "AWS_REGION", "AWS_DEFAULT_REGION"),
            profile=None if keys[0] else _text(settings, "profile", "AWS_PROFILE"),
            access_key_id=keys[0],
            secret_access_key=keys[1],
            session_token=keys[2],
        )

    @property
    def cache_folder(self) -> Path:
        """Where fetched blobs are kept."""
        if self.cache_dir is not None:
            return self.cache_dir
        home = os.environ.get("XDG_CACHE_HOME")
        return (Path(home) if home else Path.home() / ".cache") / "preheat"


def _text(settings: Mapping[str, Any], name: str, *variables: str) -> str | None:
    for variable in variables:
        if value := os.environ.get(variable):
            return value
    value = settings.get(name)
    return str(value) if value else None


def _whole(size: Any) -> int | None:
    """10000000000 or "10GiB" -> bytes."""
    if size is None or size == "":
        return None
    units = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    text = str(size).strip()
    digits = text.rstrip("KMGTiB ")
    unit = text[len(digits) :].strip()
    if isinstance(size, bool) or not digits.isdecimal() or unit not in units or not int(digits):
        raise ManifestError(
            f"config: cache_bytes is a whole number of bytes or one like 20GiB, not {size!r:.80}: mend "
            "model_metadata.preheat.cache_bytes in config.yaml, or PREHEAT_CACHE_BYTES."
        )
    return int(digits) * units[unit]


def _secret(secrets: Mapping[str, str] | None, name: str) -> str | None:
    """A Truss secret, or None where it is not set: Truss raises a class of its own then, of a module of the server."""
    if secrets is None:
        return None
    try:
        value = secrets[name]
    except KeyError:
        return None
    except Exception as error:
        if type(error).__name__ != "SecretNotFound":
            raise
        return None
    return value.strip() or None  # a mounted secret is a file, and files end in a line break
