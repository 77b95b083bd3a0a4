"""A digest is part of a path; one with ../ in it would name any file."""

import pytest

from model.errors import ManifestError
from tests.attacks.conftest import Victim


@pytest.mark.parametrize(
    "digest",
    ["../" * 20 + "0000", "../../../outside", "/etc/passwd", "0" * 63 + "/", "0" * 64 + "\0", "0" * 62 + "..", ""],
)
@pytest.mark.parametrize("where", ["blob", "constants"])
def test_it_is_no_digest(victim: Victim, digest: str, where: str) -> None:
    victim.entries["engines"][0][where]["sha256"] = digest
    victim.refused(ManifestError, f"damaged at engines.0.{where}.sha256")
