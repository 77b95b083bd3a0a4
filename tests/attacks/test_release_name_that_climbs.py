"""The name of a release comes from a config or an environment; it may only ever name a release."""

import pytest

from model.errors import ManifestError
from tests.attacks.conftest import Victim


@pytest.mark.parametrize(
    "name",
    [
        "../../outside",
        "toy/../../../outside",
        "/etc/passwd",
        "toy/1/../1",
        "toy/%2e%2e",
        "toy\\1",
        "toy/1\0",
        "toy/1\nx",
    ],
)
def test_it_is_no_release_name(victim: Victim, name: str) -> None:
    victim.refused(ManifestError, "is no release name: write model/version", name)
