"""Engine packages that an attacker wrote: zip bombs, entries that leave the folder, links; and maps of constants."""

import _ctypes
import io
import json
import stat
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from model.errors import EngineError, ManifestError
from tests.attacks.conftest import Victim, in_folder_and_bucket
from tests.support import releases

MODEL = "toy/data/aotinductor/model/"


def with_entry(name: str, data: bytes = b"x", compression: int = zipfile.ZIP_STORED, mode: int = 0o644) -> bytes:
    """Return a valid engine package with one more entry."""
    buffer = io.BytesIO(releases.compiled_toy().engine)
    with zipfile.ZipFile(buffer, "a") as archive:
        entry = zipfile.ZipInfo(name)
        entry.external_attr = (mode if stat.S_IFMT(mode) else stat.S_IFREG | mode) << 16
        archive.writestr(entry, data, compress_type=compression)
    return buffer.getvalue()


@in_folder_and_bucket
@pytest.mark.parametrize(
    "name",
    [
        MODEL + "../" * 12 + "{}", "../{}", "toy/../../{}", "{}", "C:\\{}", MODEL + "..\\..\\{}", "toy//x",
        MODEL + "x\nforged",
    ],
)  # fmt: skip
def test_refuses_entry_outside_the_folder(victim: Victim, name: str) -> None:
    """torch's own loader writes an entry wherever its name leads."""
    escaped = victim.cache.parent.parent / "escaped"
    victim.entries["engines"][2]["blob"] = victim.keep(with_entry(name.format(str(escaped)), b"escaped"))
    victim.refused(EngineError, "leads out of the folder it is unpacked in")
    assert not escaped.exists()


def test_refuses_link(victim: Victim, outside: Path) -> None:
    """A later entry could be written through it."""
    package = with_entry(MODEL + "link", str(outside).encode(), mode=stat.S_IFLNK | 0o777)
    victim.entries["engines"][2]["blob"] = victim.keep(package)
    victim.refused(EngineError, "which is a link")


def test_refuses_compressed_entry(victim: Victim) -> None:
    package = with_entry("toy/bomb", bytes(2**24), zipfile.ZIP_DEFLATED)
    assert len(package) < 2**22
    victim.entries["engines"][2]["blob"] = victim.keep(package)
    victim.refused(EngineError, "which is compressed")


def test_refuses_entry_with_untrue_size(victim: Victim) -> None:
    package = bytearray(with_entry("toy/bomb", b"1234"))
    at = package.rindex(b"PK\x01\x02")
    assert struct.unpack_from("<II", package, at + 20) == (4, 4)
    struct.pack_into("<II", package, at + 20, 2**31, 2**31)
    victim.entries["engines"][2]["blob"] = victim.keep(bytes(package))
    victim.refused(EngineError, "claim more bytes than the file has")


def test_refuses_two_files_with_one_name(victim: Victim) -> None:
    with warnings.catch_warnings(action="ignore"):
        package = with_entry("toy/byteorder", b"big")
    victim.entries["engines"][2]["blob"] = victim.keep(package)
    victim.refused(EngineError, "two files with the same name")


@pytest.mark.parametrize("data", [b"", b"PK\x05\x06" + bytes(18), b"\x7fELF" + bytes(100), releases.FAKE_ENGINE.engine])
def test_refuses_invalid_package(victim: Victim, data: bytes) -> None:
    victim.entries["engines"][2]["blob"] = victim.keep(data)
    victim.refused(EngineError, "engine cannot be opened")


def with_library(data: bytes) -> bytes:
    """Return a valid engine package with another shared library."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(releases.compiled_toy().engine)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            new.writestr(name, data if name.endswith(".so") else old.read(name))
    return buffer.getvalue()


def library() -> bytes:
    """Return the shared library of a valid engine package."""
    with zipfile.ZipFile(io.BytesIO(releases.compiled_toy().engine)) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".so")]
        return archive.read(name)


LIBRARIES: dict[str, tuple[Callable[[], bytes], str]] = {
    "another library": (lambda: Path(_ctypes.__file__).read_bytes(), "its library has no AOTInductorModelContainer"),
    "cut in a segment": (lambda: library()[: len(library()) // 10], "its library is shorter than its header states"),
    "cut in the header": (lambda: library()[:60], "its library is shorter than its header states"),
    "text": (lambda: b"text" * 100, "engine cannot be opened"),
}


@pytest.mark.parametrize("make, words", LIBRARIES.values(), ids=LIBRARIES)
def test_refuses_invalid_library(victim: Victim, make: Callable[[], bytes], words: str) -> None:
    """The dynamic linker would end the process for one that is cut."""
    victim.entries["engines"][2]["blob"] = victim.keep(with_library(make()))
    victim.refused(EngineError, words)


def test_refuses_package_too_large_for_memory(victim: Victim) -> None:
    victim.entries["engines"][2]["blob"] = {"sha256": "0" * 64, "bytes": 2**28 + 1}
    victim.refused(ManifestError, "the engine has more than 268435456 bytes")


CHANGED_MAPS: dict[str, tuple[dict[str, Any], str]] = {
    "larger shape": ({"a.weight": {"shape": [8, 400]}}, "do not fit its engine"),
    "other tensor": ({"a.weight": {"tensor": "b.weight"}}, "do not fit its engine"),
    "other dtype": ({"a.weight": {"dtype": "float16"}}, "do not fit its engine"),
    "missing tensor": ({"a.weight": {"tensor": "../../x"}}, "lack ../../x"),
    "additional constant": ({"extra": {"tensor": "a.bias", "dtype": "float32", "shape": [8]}}, "constant map disagree"),
    "negative shape": ({"a.weight": {"shape": [-8, 4]}}, "map of constants is damaged"),
}


@pytest.mark.parametrize("change, words", CHANGED_MAPS.values(), ids=CHANGED_MAPS)
def test_refuses_changed_map_of_constants(victim: Victim, change: dict[str, Any], words: str) -> None:
    """torch's loader checks no name, shape or dtype, and would read beyond a tensor's end."""
    victim.entries["engines"][2]["constants"] = victim.keep(releases.toy_constants(change))
    victim.refused(EngineError, words)


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 100_000, json.dumps({"a": 1}).encode(), b"\x80\x04pickle"])
def test_refuses_invalid_map_of_constants(victim: Victim, data: bytes) -> None:
    victim.entries["engines"][2]["constants"] = victim.keep(data)
    victim.refused(EngineError, "map of constants is damaged")
