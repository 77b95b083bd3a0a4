"""A key with line breaks and terminal codes in it, which a message repeats."""

from model.errors import ManifestError
from tests.attacks.conftest import Victim


def test_they_are_shown_harmlessly(victim: Victim) -> None:
    victim.entries['x\n{"event": "loaded"}\x1b[2J\u202e' + "y" * 5000] = 1
    victim.refused(ManifestError, "damaged at x")
