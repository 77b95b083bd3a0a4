"""Keys of blobs, releases and adapters, the same in a folder, a bucket and a cache; and errors that name them.

Names are untrusted: a name that could leave the store is refused before it becomes a path or a key.
"""

import re
from collections.abc import Sequence

from model.errors import REBUILD, AdapterNotFound, CorruptBlob, ManifestError, ReleaseNotFound
from model.store.manifest_json import split_name

BLOBS = "blobs/sha256"
RELEASES = "releases"
ADAPTERS = "adapters"
_MAX_LISTED = 20  # names of releases or adapters in one message


def blob_key(digest: str) -> str:
    """Return the key of a blob. Raises ManifestError for text that is not a SHA-256 digest."""
    if not is_digest(digest):
        raise ManifestError(f"{digest!r} is not a SHA-256 digest.")
    return f"{BLOBS}/{digest}"


def release_key(name: str) -> str:
    """Return the key of "model/version". Raises ManifestError for any other name."""
    model, version = split_name(name)
    return f"{RELEASES}/{model}/{version}.json"


def adapter_key(name: str) -> str:
    """Return the key of an adapter's record. Raises AdapterNotFound for a name that could leave the store."""
    if not is_adapter_name(name):
        raise AdapterNotFound(f"{name!r:.80} is not the name of an adapter.", "Use letters, digits, '.', '_' and '-'.")
    return f"{ADAPTERS}/{name}.json"


def is_adapter_name(name: str) -> bool:
    """True for 1 to 128 letters, digits, '.', '_' and '-', the first of them a letter or a digit."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name) is not None


def is_digest(text: str) -> bool:
    """True for 64 characters of lower-case hex."""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def is_release_name(name: str) -> bool:
    """True for "model/version". Other files may lie among the releases."""
    try:
        split_name(name)
    except ManifestError:
        return False
    return True


def release_not_found(name: str, url: str, names: list[str] | None) -> ReleaseNotFound:
    """Return the error for a missing release. It lists the available `names`, unless they cannot be listed (None)."""
    publish = f"`preheat publish {name.removesuffix('/*')} --store {url}`"
    if names is None:
        return ReleaseNotFound(f"Release {name} was not found in {url}.", f"Check the name, or run {publish}.")
    if not names:
        return ReleaseNotFound(f"Release {name} was not found in {url}, which has no release.", f"Run {publish}.")
    return ReleaseNotFound(
        f"Release {name} was not found in {url}. Available: {listed(names)}.",
        f"Name one of them, or run {publish}.",
    )


def adapter_not_found(name: str, url: str, names: list[str] | None) -> AdapterNotFound:
    """Return the error for a missing adapter. It lists the available `names`, unless they cannot be listed (None)."""
    available = ""
    if names is not None:
        available = f" Available: {listed(names)}." if names else " It has no adapter."
    add = f"`preheat add-lora {name} FILE --store {url}`"
    return AdapterNotFound(f"Adapter {name} was not found in {url}.{available}", f"Name another one, or run {add}.")


def listed(names: Sequence[str]) -> str:
    """Return the first names of a list for a message, and the number of the others."""
    unlisted = f" and {len(names) - _MAX_LISTED} more" if names[_MAX_LISTED:] else ""
    return f"{', '.join(names[:_MAX_LISTED])}{unlisted}"


def blob_missing(digest: str, url: str) -> CorruptBlob:
    """Return the error for a blob that a release names and the store lacks."""
    remedy = f"{REBUILD} Add an adapter again (`preheat add-lora`)."
    return CorruptBlob(f"Blob {digest[:12]} is missing from {url}.", remedy)


def blob_damaged(digest: str, url: str, cause: str) -> CorruptBlob:
    """Return the error for wrong bytes. Its remedy deletes the file, because a build reuses the blobs that exist."""
    return CorruptBlob(
        f"Blob {digest[:12]} in {url} is damaged: {cause}.",
        f"Find all damage with `preheat verify` and delete it ({BLOBS}/{digest}). Then build again (`preheat build`), "
        "or add the adapter again (`preheat add-lora`).",
    )
