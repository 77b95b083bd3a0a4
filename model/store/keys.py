"""Keys of blobs and releases, the same in a folder, a bucket and a cache; and errors that name them.

Names are untrusted: a name that could leave the store is refused before it becomes a path or a key.
"""

from model.errors import CorruptBlob, ManifestError, ReleaseNotFound
from model.store.manifest_json import split_name

BLOBS = "blobs/sha256"
RELEASES = "releases"
_MAX_LISTED = 20  # release names in one message


def blob_key(digest: str) -> str:
    """Return the key of a blob. Raises ManifestError for text that is not a SHA-256 digest."""
    if not is_digest(digest):
        raise ManifestError(f"{digest!r} is not a SHA-256 digest.")
    return f"{BLOBS}/{digest}"


def release_key(name: str) -> str:
    """Return the key of "model/version". Raises ManifestError for any other name."""
    model, version = split_name(name)
    return f"{RELEASES}/{model}/{version}.json"


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


def release_not_found(name: str, url: str, names: list[str]) -> ReleaseNotFound:
    """Return the error for a missing release. It lists the available `names`."""
    publish = f"`preheat publish {name} --store {url}`"
    if not names:
        return ReleaseNotFound(f"Release {name} was not found in {url}, which has no release.", f"Run {publish}.")
    unlisted = f" and {len(names) - _MAX_LISTED} more" if names[_MAX_LISTED:] else ""
    return ReleaseNotFound(
        f"Release {name} was not found in {url}. Available: {', '.join(names[:_MAX_LISTED])}{unlisted}.",
        f"Name one of them, or run {publish}.",
    )


def blob_missing(digest: str, url: str) -> CorruptBlob:
    """Return the error for a blob that a release names and the store lacks."""
    return CorruptBlob(f"Blob {digest[:12]} is missing from {url}.")


def blob_damaged(digest: str, url: str, cause: str) -> CorruptBlob:
    """Return the error for wrong bytes. Its remedy deletes the file, because a build reuses the blobs that exist."""
    return CorruptBlob(
        f"Blob {digest[:12]} in {url} is damaged: {cause}.",
        f"Find all damage with `preheat verify`, delete it ({BLOBS}/{digest}), then build again (`preheat build`).",
    )
