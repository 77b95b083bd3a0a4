"""Delete the blobs of a store that nothing names any more. Promises never to delete what a release names.

A publish that is going on has blobs in the store that nothing names yet. They are younger than the age limit: a blob
that a build puts is new, and one that it finds already there is made to look new. What cannot be read (a damaged
manifest, a newer schema) may name anything, so then nothing is deleted at all.
"""

import re
import time
from dataclasses import dataclass

from model.errors import PreheatError
from model.store.local import REFRESH_AGE
from model.store.store import Store

DAY = 24 * 3600
_KINDS = ("engines", "drafts", "onnx", "timing")
_LEAST_AGE = 2 * REFRESH_AGE
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": DAY, "w": 7 * DAY}


class BadAge(PreheatError):
    """An age that cannot be read, or is too short to be safe."""


@dataclass(frozen=True)
class Garbage:
    """What nothing names: bytes by digest."""

    blobs: dict[str, int]
    kept: int
    """How many blobs are named."""
    young: int
    """How many are not, and are too young to be deleted."""
    limit: float
    """Nothing put after this time (seconds since 1970) is deleted."""

    @property
    def bytes(self) -> int:
        return sum(self.blobs.values())


def find_garbage(store: Store, older_than: float = DAY, now: float | None = None) -> Garbage:
    """What no release, draft or engine record names and nobody has put for `older_than` seconds.

    Raises ManifestError or StoreError where it cannot be known what is named.
    """
    limit = (time.time() if now is None else now) - older_than
    # First what is there, then what is named: what is published in between is found among the names.
    there = list(store.blobs())
    named = named_blobs(store)
    unnamed = [(digest, size, put) for digest, size, put in there if digest not in named]
    old = {digest: size for digest, size, put in unnamed if put <= limit}
    return Garbage(old, len(there) - len(unnamed), len(unnamed) - len(old), limit)


def delete_garbage(store: Store, garbage: Garbage) -> int:
    """Delete it; returns the bytes that are free now. What was put again, or named, in the meantime stays."""
    named = named_blobs(store)
    freed = 0
    for digest, size in garbage.blobs.items():
        if digest not in named and store.delete_blob(digest, garbage.limit):
            freed += size
    store.delete_unfinished(garbage.limit)
    return freed


def named_blobs(store: Store) -> set[str]:
    """Every digest that a release, a draft or an engine record names."""
    named = {digest for name in store.releases() for digest in store.read_release(name).blobs()}
    for kind in _KINDS:
        for record in store.records(kind):
            # Whatever looks like a digest: a note of another version's is not parsed, and still counts.
            named.update(re.findall(r"[0-9a-f]{64}", (store.read_record(kind, record) or b"").decode(errors="replace")))
    return named


def read_age(text: str) -> float:
    """ "36h" -> seconds. Raises BadAge, also for less than a running build may leave a blob untouched."""
    found = re.fullmatch(r"([0-9]{1,6})([smhdw])", text.strip())
    if found is None:
        raise BadAge(f"{text!r} is no age: write a number and s, m, h, d or w, for example 24h or 7d.")
    seconds = float(int(found[1]) * _UNITS[found[2]])
    if seconds < _LEAST_AGE:
        raise BadAge(f"{text} is too short: what is younger than 2h may belong to a build that is running.")
    return seconds
