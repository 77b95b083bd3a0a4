"""An entry that is a link, and one that would then be written through it."""

import stat
from pathlib import Path

from model.errors import EngineError
from tests.attacks.conftest import Victim
from tests.attacks.packages import with_entry


def test_it_is_not_unpacked(victim: Victim, outside: Path) -> None:
    package = with_entry("toy/data/aotinductor/model/link", str(outside).encode(), mode=stat.S_IFLNK | 0o777)
    victim.entries["engines"][2]["blob"] = victim.keep(package)
    victim.refused(EngineError, "which is a link")
