"""A newer schema may mean anything; an older one than the first never was."""

import pytest

from model.errors import ManifestError
from tests.attacks.conftest import Victim


@pytest.mark.parametrize(
    "version, words",
    [(2, "has schema 2"), (10**30, "reads up to 1"), (0, "damaged"), (-1, "damaged"), ("1", "does not say"),
     (1.0, "does not say"), (True, "does not say"), (None, "does not say")],
)  # fmt: skip
def test_it_is_refused(victim: Victim, version: object, words: str) -> None:
    victim.entries["schema_version"] = version
    victim.refused(ManifestError, words)
