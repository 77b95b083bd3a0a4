"""A manifest copied to another version's place: going forward to what was withdrawn."""

from model.errors import ManifestError
from tests.attacks.conftest import Victim, everywhere
from tests.stand_ins import releases

pytestmark = everywhere


def test_it_says_whose_it_is(victim: Victim) -> None:
    releases.write_raw(victim.store.root, victim.manifest.to_json(), "toy/2")
    victim.refused(ManifestError, "under the name toy/2 is that of toy/1", "toy/2")
