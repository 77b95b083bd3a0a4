"""A few kilobytes that unpack to gigabytes; one file under two names; no archive at all."""

import struct
import warnings
import zipfile

import pytest

from model.errors import EngineError
from tests.attacks.conftest import Victim
from tests.attacks.packages import with_entry
from tests.stand_ins import releases


def test_what_is_compressed_is_refused(victim: Victim) -> None:
    package = with_entry("toy/bomb", bytes(2**24), zipfile.ZIP_DEFLATED)
    assert len(package) < 2**22
    victim.entries["engines"][2]["blob"] = victim.keep(package)
    victim.refused(EngineError, "which is compressed")


def test_what_claims_to_be_more_than_it_is_is_refused(victim: Victim) -> None:
    package = bytearray(with_entry("toy/bomb", b"1234"))
    at = package.rindex(b"PK\x01\x02")
    assert struct.unpack_from("<II", package, at + 20) == (4, 4)
    struct.pack_into("<II", package, at + 20, 2**31, 2**31)
    victim.entries["engines"][2]["blob"] = victim.keep(bytes(package))
    victim.refused(EngineError, "claims to hold more than it has bytes")


def test_two_files_of_one_name_are_refused(victim: Victim) -> None:
    with warnings.catch_warnings(action="ignore"):
        package = with_entry("toy/byteorder", b"big")
    victim.entries["engines"][2]["blob"] = victim.keep(package)
    victim.refused(EngineError, "two files of one name")


@pytest.mark.parametrize("data", [b"", b"PK\x05\x06" + bytes(18), b"\x7fELF" + bytes(100), releases.FAKE.engine])
def test_what_is_no_package_is_refused(victim: Victim, data: bytes) -> None:
    victim.entries["engines"][2]["blob"] = victim.keep(data)
    victim.refused(EngineError, "engine cannot be opened")
