"""Zip-slip: torch's own loader writes an entry of a .pt2 package where its name leads."""

import pytest

from model.errors import EngineError
from tests.attacks.conftest import Victim, everywhere
from tests.attacks.packages import with_entry

pytestmark = everywhere

MODEL = "toy/data/aotinductor/model/"


@pytest.mark.parametrize(
    "name",
    [
        MODEL + "../" * 12 + "{}",
        "../{}",
        "toy/../../{}",
        "{}",
        "C:\\{}",
        MODEL + "..\\..\\{}",
        "toy//x",
        MODEL + "x\nforged",
    ],
)
def test_it_is_not_unpacked(victim: Victim, name: str) -> None:
    # Beside what the fixture watches: had it been unpacked, this file would be there.
    escaped = victim.cache.parent.parent / "escaped"
    package = with_entry(name.format(str(escaped)), b"escaped")
    victim.entries["engines"][2]["blob"] = victim.keep(package)
    victim.refused(EngineError, "leads out of the folder it is unpacked in")
    assert not escaped.exists()
