"""NaN and the infinite pass every comparison the wrong way."""

import pytest

from model.errors import ManifestError
from tests.attacks.conftest import Victim


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e400"])
@pytest.mark.parametrize("where", [b'"vae_scaling_factor": 0.13025', b'"num_inference_steps": 4', b'"relative": 0.0'])
def test_they_are_refused(victim: Victim, number: bytes, where: bytes) -> None:
    text = victim.manifest.to_json()
    assert where in text
    victim.raw = text.replace(where, where.partition(b":")[0] + b": " + number)
    victim.refused(ManifestError, number.decode())
