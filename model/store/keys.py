"""The layout of a store, the same in a folder, a bucket and a cache: which key a blob, a release, a record lies under.

Names are data: whatever could leave the store is refused here, before it becomes a path or a key.
"""

import re

from model.errors import ManifestError, ReleaseNotFound, StoreError
from model.store.manifest_json import split_name

BLOBS = "blobs/sha256"
RELEASES = "releases"
RECORDS = "records"
_LISTED = 20  # release names in one message


def blob_key(digest: str) -> str:
    """Raises ManifestError for what is no SHA-256."""
    if not is_digest(digest):
        raise ManifestError(f"{digest!r} is no SHA-256 digest.")
    return f"{BLOBS}/{digest}"


def release_key(name: str) -> str:
    """Raises ManifestError for what is not "model/version"."""
    model, version = split_name(name)
    return f"{RELEASES}/{model}/{version}.json"


def record_key(kind: str, name: str) -> str:
    """Raises StoreError for what is no name."""
    # Longer than a release's, because a draft is called after its model, target and precision together.
    if not all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,219}", part) for part in (kind, name)):
        raise StoreError(f"{kind}/{name} is no name for a record: give the model a short one (letters and digits).")
    return f"{RECORDS}/{kind}/{name}.json"


def is_digest(text: str) -> bool:
    """64 characters of lower-case hex."""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def is_release_name(name: str) -> bool:
    """False for what strangers put between the releases."""
    try:
        split_name(name)
    except ManifestError:
        return False
    return True


def release_not_found(name: str, url: str, names: list[str]) -> ReleaseNotFound:
    """The sentence that names what is there instead."""
    there = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if names[_LISTED:] else "")
    return ReleaseNotFound(
        f"No release {name} in {url} (releases there: {there or 'none'}): name one of them, or publish it "
        f"with `preheat publish {name} --store {url}`."
    )
