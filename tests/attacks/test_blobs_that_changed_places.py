"""One component's weights under another's digest: same size, same form, another model."""

from model.errors import CorruptBlob
from tests.attacks.conftest import Victim, everywhere

pytestmark = everywhere


def test_in_the_store_they_are_refused(victim: Victim) -> None:
    one, two = (victim.blob(victim.manifest.weights[index].blobs[0].sha256) for index in (0, 2))
    first, second = one.read_bytes(), two.read_bytes()
    assert len(first) == len(second) and first != second
    one.write_bytes(second)
    two.write_bytes(first)
    victim.refused(CorruptBlob, "its bytes have changed")
