"""A manifest of gigabytes, to fill memory: no more is read than a release can need."""

import json

from model.errors import ManifestError
from model.store.manifest import MANIFEST_LIMIT
from tests.attacks.conftest import Victim, everywhere

pytestmark = everywhere


def test_it_is_refused_unread(victim: Victim) -> None:
    text = json.dumps(victim.entries).encode()
    victim.raw = text[:-1] + b" " * (20 * MANIFEST_LIMIT) + b"}"
    victim.refused(ManifestError, f"has more than {MANIFEST_LIMIT} bytes")


def test_many_small_entries_cost_no_more(victim: Victim) -> None:
    victim.entries["builder"] = {str(number): "" for number in range(400_000)}
    victim.refused(ManifestError, f"has more than {MANIFEST_LIMIT} bytes")
