"""Delete the blobs of a store that no release, adapter or record names.

The blobs of a running build may be unnamed. They are younger than the age limit, because `put` refreshes blobs that
already exist. A manifest or an adapter that cannot be read (damaged, or of a newer schema) may name any blob. So then
nothing is deleted.
"""

import re
import time
from dataclasses import dataclass

from engine_builder.stores.store import WritableStore
from engine_builder.stores.writing import REFRESH_AGE_SECONDS
from model.errors import PreheatError

DAY_SECONDS = 24 * 3600
_RECORD_KINDS = ("engines", "drafts", "onnx", "timing", "calibrations", "validations")
_MIN_AGE_SECONDS = 2 * REFRESH_AGE_SECONDS
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": DAY_SECONDS, "w": 7 * DAY_SECONDS}


class BadAge(PreheatError):
    """An age is invalid, or too short to be safe."""

    remedy = "Write a number and s, m, h, d or w, at least 2h: for example 24h or 7d."


@dataclass(frozen=True)
class Garbage:
    """Unnamed blobs that are old enough to be deleted: bytes by digest."""

    blobs: dict[str, int]
    named_count: int
    """Number of named blobs."""
    young_count: int
    """Number of unnamed blobs that are too young."""
    keep_after: float
    """Blobs put after this time (seconds since 1970) are kept."""

    @property
    def bytes(self) -> int:
        """Total size of the blobs."""
        return sum(self.blobs.values())


def find_garbage(store: WritableStore, older_than: float = DAY_SECONDS, now: float | None = None) -> Garbage:
    """Find the blobs that no release, adapter or record names, and that were last put over `older_than` seconds ago.

    Raises ManifestError, AdapterError or StoreError if a release, an adapter or a record cannot be read.
    """
    keep_after = (time.time() if now is None else now) - older_than
    # Blobs are listed before names are read, so a release published meanwhile counts.
    blobs = list(store.blobs())
    named = named_blobs(store)
    unnamed = [(digest, size, put_at) for digest, size, put_at in blobs if digest not in named]
    old = {digest: size for digest, size, put_at in unnamed if put_at <= keep_after}
    return Garbage(old, len(blobs) - len(unnamed), len(unnamed) - len(old), keep_after)


def delete_garbage(store: WritableStore, garbage: Garbage) -> int:
    """Delete garbage, except blobs put again or named meanwhile. Returns the bytes freed."""
    named = named_blobs(store)
    freed = 0
    for digest, size in garbage.blobs.items():
        if digest not in named and store.delete_blob(digest, garbage.keep_after):
            freed += size
    store.delete_unfinished(garbage.keep_after)
    return freed


def named_blobs(store: WritableStore) -> set[str]:
    """Return every digest that a release, an adapter or a record names."""
    named = {digest for name in store.releases() for digest in store.read_release(name).blobs()}
    named.update(blob.sha256 for name in store.adapters() for blob in store.read_adapter(name).blobs)
    for kind in _RECORD_KINDS:
        for record in store.records(kind):
            # All text that looks like a digest counts, because records of other versions may not parse.
            named.update(re.findall(r"[0-9a-f]{64}", (store.read_record(kind, record) or b"").decode(errors="replace")))
    return named


def read_age(text: str) -> float:
    """Parse an age such as "36h" into seconds. Raises BadAge, also if a running build's blobs may reach that age."""
    match = re.fullmatch(r"([0-9]{1,6})([smhdw])", text.strip())
    if match is None:
        raise BadAge(f"{text!r} is not an age.")
    seconds = float(int(match[1]) * _UNIT_SECONDS[match[2]])
    if seconds < _MIN_AGE_SECONDS:
        raise BadAge(f"{text} is too short: younger blobs may belong to a running build.")
    return seconds
