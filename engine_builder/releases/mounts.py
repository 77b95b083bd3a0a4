"""The `weights` of a Truss config: the files of a release that the platform mounts before a replica starts.

The mount is a store in a folder, which is only read. All releases share the store's folder of blobs, so the entry lists
the files that a server reads, each by its key.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from model.errors import ConfigError
from model.store.adapter_record import AdapterRecord
from model.store.keys import adapter_key, blob_key, release_key
from model.store.manifest import Blob, Manifest
from model.store.store import local_store_folder


@dataclass(frozen=True)
class Mount:
    """The part of a config's `weights` that a store in a folder lies in.

    location: the mounted folder. store: the URL of the same store at its source. prefix: of its keys in the folder.
    allowed, ignored: the patterns of the files that are mounted (None: all) and of those that are left out.
    """

    location: str
    store: str
    prefix: str
    allowed: tuple[str, ...] | None
    ignored: tuple[str, ...]

    def lacks(self, keys: Iterable[str]) -> list[str]:
        """Return the keys of the files that are not mounted."""
        return [key for key in keys if not self._has(self.prefix + key)]

    def _has(self, path: str) -> bool:
        is_allowed = self.allowed is None or any(fnmatchcase(path, pattern) for pattern in self.allowed)
        return is_allowed and not any(fnmatchcase(path, pattern) for pattern in self.ignored)


def find_mount(config: Any, store: str) -> Mount | None:
    """Return the mount of a TrussConfig that a store lies in, or None. Raises StoreError for an invalid URL."""
    folder = local_store_folder(store) if store else None
    for entry in config.weights.sources if folder is not None else ():
        location = PurePosixPath(entry.mount_location)
        if PurePosixPath(str(folder)).is_relative_to(location):
            inner = PurePosixPath(str(folder)).relative_to(location)
            prefix = "" if inner == PurePosixPath(".") else f"{inner}/"
            allowed = None if entry.allow_patterns is None else tuple(entry.allow_patterns)
            source = f"{entry.source.rstrip('/')}/{prefix}".rstrip("/")
            return Mount(entry.mount_location, source, prefix, allowed, tuple(entry.ignore_patterns or ()))
    return None


def files_of(
    manifest: Manifest, adapters: Sequence[AdapterRecord] = (), blobs: Iterable[Blob] | None = None
) -> list[str]:
    """Return the keys of the files that a server of a release reads.

    blobs: the release's blobs that the server reads; None: all that some server of the release may read.
    """
    if blobs is None:
        builders = [engine.tensorrt.onnx for engine in manifest.engines if engine.tensorrt]
        builders += [manifest.validation.report, manifest.validation.pictures] if manifest.validation else []
        unread = {blob.sha256 for blob in builders}
        blobs = [blob for digest, blob in manifest.blobs().items() if digest not in unread]
    digests = {blob.sha256 for blob in blobs} | {blob.sha256 for record in adapters for blob in record.blobs}
    records = [release_key(manifest.name), *(adapter_key(record.name) for record in adapters)]
    return [*records, *sorted(map(blob_key, digests))]


def mounting_entries(store: str, releases: Sequence[str], location: str, files: Sequence[str]) -> dict[str, Any]:
    """Return the entries of a Truss config that mount these files of a store, and read the releases from the mount.

    Raises ConfigError for a store or a folder that a platform cannot mount.
    """
    if local_store_folder(store) is not None:
        raise ConfigError(
            f"The store {store} is a folder, and the platform mounts buckets.",
            "Name the bucket (--store s3://bucket/prefix), or copy the release there (`preheat copy`).",
        )
    if not PurePosixPath(location).is_absolute() or "," in location:
        raise ConfigError(f"{location!r} is not an absolute folder.", "Name one, such as /app/preheat-store.")
    source = {"source": store.rstrip("/"), "mount_location": location, "allow_patterns": list(files)}
    named = {"releases": [*releases]} if len(releases) > 1 else {"release": releases[0]}
    settings = {"store": Path(location).as_uri()} | named
    return {"weights": [source], "model_metadata": {"preheat": settings}}
