"""A key twice: one reader takes the first, another the last, and who checked is not who uses."""

from model.errors import ManifestError
from tests.attacks.conftest import Victim


def test_it_is_refused(victim: Victim) -> None:
    text = victim.manifest.to_json()
    digest = victim.manifest.engines[0].blob.sha256.encode()
    for found, doubled in (
        (b'"model": "toy"', b'"model": "toy", "model": "toy"'),
        (b'"sha256": "' + digest + b'"', b'"sha256": "' + digest + b'", "sha256": "' + b"0" * 64 + b'"'),
    ):
        assert found in text
        victim.raw = text.replace(found, doubled)
        victim.refused(ManifestError, "a key is there twice")
