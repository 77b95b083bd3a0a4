"""Names in a manifest: of components, targets, layouts, of the release itself."""

import pytest

from model.errors import ManifestError
from tests.attacks.conftest import Victim

NAMES = [
    "..",
    "../unet",
    "/etc/passwd",
    "unet/../../x",
    "unet\\..\\x",
    ".hidden",
    "unet\n",
    "",
    "x" * 200,
    "un\u202eet",
]


@pytest.mark.parametrize("name", NAMES)
def test_they_are_no_names(victim: Victim, name: str) -> None:
    for table, key in (
        ("engines", "component"), ("engines", "target"), ("engines", "layout"), ("weights", "component"),
    ):  # fmt: skip
        before = victim.entries[table][0][key]
        victim.entries[table][0][key] = name
        victim.refused(ManifestError, f"damaged at {table}.0.{key}")
        victim.entries[table][0][key] = before
    for key in ("model", "version"):
        before = victim.entries[key]
        victim.entries[key] = name
        victim.refused(ManifestError, f"damaged at {key}")
        victim.entries[key] = before
    victim.entries["architectures"][name] = "0" * 64
    victim.refused(ManifestError, "damaged at architectures")
