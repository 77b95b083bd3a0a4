"""Checks and names that both kinds of writable store share."""

import re
import time

from model.errors import AdapterExists, ManifestError, ReleaseExists, StoreError
from model.store.adapter_record import AdapterRecord
from model.store.keys import adapter_key
from model.store.manifest import Manifest
from model.store.manifest_json import parse_manifest

RECORDS = "records"
REFRESH_AGE_SECONDS = 3600  # `put` refreshes an older blob, so that `preheat gc` keeps it for the running build


def needs_refresh(put_at: float) -> bool:
    """True if a blob put at that time (seconds since 1970) must be refreshed."""
    return time.time() - put_at > REFRESH_AGE_SECONDS


def record_key(kind: str, name: str) -> str:
    """Return the key of a record. Raises StoreError for an unsafe name."""
    # Longer than a release's name, because a draft's name joins its model, target and precision.
    if not all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,219}", part) for part in (kind, name)):
        raise StoreError(
            f"{kind}/{name} is not a valid name for a record.", "Give the model a short name (letters and digits)."
        )
    return f"{RECORDS}/{kind}/{name}.json"


def checked_json(manifest: Manifest) -> bytes:
    """Return the manifest's JSON. Raises ManifestError if a server would read another manifest from it."""
    data = manifest.to_json()
    if parse_manifest(data, manifest.name) != manifest:
        raise ManifestError(f"A server would read another manifest from the JSON of {manifest.name}.")
    return data


def release_exists(name: str) -> ReleaseExists:
    return ReleaseExists(f"{name} is already published, and releases are written once.")


def adapter_exists(existing: AdapterRecord, record: AdapterRecord) -> AdapterExists:
    """Return the error for a record whose name is taken by `existing`, another adapter or another signature."""
    if existing.model_copy(update={"signature": record.signature}) != record:
        return AdapterExists(f"The store has another adapter {record.name}, and adapters are written once.")
    signed = f"signed by {existing.signature.key_id}" if existing.signature else "not signed"
    return AdapterExists(
        f"The store has this adapter {record.name} already, {signed}, and adapters are written once.",
        f"Choose another name, or delete {adapter_key(record.name)} from the store and run the command again.",
    )


def source_changed(source: str) -> StoreError:
    return StoreError(f"{source} changed while it was stored.", "Run the command again.")
