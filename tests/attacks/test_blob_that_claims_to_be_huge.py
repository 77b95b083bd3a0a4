"""A size that would fill the disk, or memory, before a byte has come."""

import pytest

from model.errors import CorruptBlob, ManifestError
from model.store.manifest import BLOB_LIMIT, ENGINE_LIMIT, SMALL_BLOB_LIMIT
from tests.attacks.conftest import Victim, everywhere

pytestmark = everywhere


@pytest.mark.parametrize("size", [ENGINE_LIMIT + 1, 2**50, 2**63, 10**400, -1])
def test_an_engine_past_all_measure_is_refused_by_the_manifest(victim: Victim, size: int) -> None:
    for engine in victim.entries["engines"]:
        engine["blob"]["bytes"] = size
    victim.refused(ManifestError, "damaged at engines.0")


def test_so_is_what_is_read_into_memory_whole(victim: Victim) -> None:
    victim.entries["weights"][0]["blobs"][0]["bytes"] = BLOB_LIMIT + 1
    victim.refused(ManifestError, f"a blob of weights has at most {BLOB_LIMIT} bytes")
    victim.entries["weights"][0]["blobs"][0]["bytes"] = 1
    victim.entries["tokenizers"]["tokenizer"]["blob"]["bytes"] = SMALL_BLOB_LIMIT + 1
    victim.refused(ManifestError, f"a tokenizer has at most {SMALL_BLOB_LIMIT} bytes")


def test_a_claim_that_is_allowed_and_untrue_takes_no_room(victim: Victim) -> None:
    """The service is asked how much there is before the cache is filled, and the claim is held against it."""
    for engine in victim.entries["engines"]:
        engine["blob"]["bytes"] = 2**30
    truth = victim.manifest.engines[0].blob.bytes
    victim.refused(CorruptBlob, f"it has {truth} bytes instead of {2**30}")
