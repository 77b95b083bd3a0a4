"""Blobs with a correct digest and harmful content: engine packages, maps of constants, tokenizers, weights."""

import _ctypes
import io
import json
import os
import pickle
import stat
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from model.errors import CorruptBlob, EngineError, MissingComponent
from model.weights.safetensors_header import HEADER_LIMIT
from tests.attacks.conftest import AttackedRelease
from tests.support import releases

# -- engine packages: archives that torch's own loader would unpack ---------------------------------------------------

MODEL = "toy/data/aotinductor/model/"


def package_with(name: str, data: bytes = b"x", compression: int = zipfile.ZIP_STORED, mode: int = 0o644) -> bytes:
    """Return a valid engine package with one more entry."""
    buffer = io.BytesIO(releases.compiled_toy().engine)
    with zipfile.ZipFile(buffer, "a") as archive:
        entry = zipfile.ZipInfo(name)
        entry.external_attr = (mode if stat.S_IFMT(mode) else stat.S_IFREG | mode) << 16
        archive.writestr(entry, data, compress_type=compression)
    return buffer.getvalue()


def package_with_untrue_size() -> bytes:
    package = bytearray(package_with("toy/bomb", b"1234"))
    at = package.rindex(b"PK\x01\x02")
    assert struct.unpack_from("<II", package, at + 20) == (4, 4)
    struct.pack_into("<II", package, at + 20, 2**31, 2**31)
    return bytes(package)


def package_with_repeated_name() -> bytes:
    with warnings.catch_warnings(action="ignore"):
        return package_with("toy/byteorder", b"big")


def package_with_library(change: Callable[[bytes], bytes]) -> bytes:
    """Return a valid engine package with its shared library changed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(releases.compiled_toy().engine)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, change(data) if name.endswith(".so") else data)
    return buffer.getvalue()


PACKAGES: tuple[tuple[Callable[[], bytes], str], ...] = (
    # A later entry could be written through the link.
    (lambda: package_with(MODEL + "link", b"/tmp", mode=stat.S_IFLNK | 0o777), "which is a link"),
    (lambda: package_with("toy/bomb", bytes(2**24), zipfile.ZIP_DEFLATED), "which is compressed"),
    (package_with_untrue_size, "claim more bytes than the file has"),
    (package_with_repeated_name, "two files with the same name"),
    (lambda: b"", "engine cannot be opened"),
    (lambda: b"PK\x05\x06" + bytes(18), "engine cannot be opened"),
    (lambda: releases.FAKE_ENGINE.engine, "engine cannot be opened"),
    # The dynamic linker would end the process for a library that is cut.
    (lambda: package_with_library(lambda _: Path(_ctypes.__file__).read_bytes()), "no AOTInductorModelContainer"),
    (
        lambda: package_with_library(lambda library: library[: len(library) // 10]),
        "its library is shorter than its header states",
    ),
    (lambda: package_with_library(lambda library: library[:60]), "its library is shorter than its header states"),
)


def test_refuses_harmful_package(attacked: AttackedRelease) -> None:
    for make, words in PACKAGES:
        attacked.entries["engines"][2]["blob"] = attacked.put(make())
        attacked.assert_refused(EngineError, words)


@pytest.mark.parametrize("attacked", ["folder", "bucket"], indirect=True)
def test_refuses_entry_outside_the_folder(attacked: AttackedRelease) -> None:
    """torch's own loader writes an entry wherever its name leads."""
    escaped = attacked.cache.parent.parent / "escaped"
    for name in (
        MODEL + "../" * 12 + "{}",
        "toy/../../{}",
        "{}",
        "C:\\{}",
        MODEL + "..\\..\\{}",
        "toy//x",
        "x\nforged",
    ):
        package = package_with(name.format(str(escaped)), b"escaped")
        attacked.entries["engines"][2]["blob"] = attacked.put(package)
        attacked.assert_refused(EngineError, "leads out of the folder it is unpacked in")
        assert not escaped.exists()


# -- maps of constants: torch's loader checks no name, shape or dtype, and would read beyond a tensor's end ------------

CHANGED_MAPS: tuple[tuple[bytes, str], ...] = (
    (releases.toy_constants({"a.weight": {"shape": [8, 400]}}), "do not fit its engine"),
    (releases.toy_constants({"a.weight": {"tensor": "b.weight"}}), "do not fit its engine"),
    (releases.toy_constants({"a.weight": {"dtype": "float16"}}), "do not fit its engine"),
    (releases.toy_constants({"a.weight": {"tensor": "../../x"}}), "lack ../../x"),
    (
        releases.toy_constants({"extra": {"tensor": "a.bias", "dtype": "float32", "shape": [8]}}),
        "constant map disagree",
    ),
    (releases.toy_constants({"a.weight": {"shape": [-8, 4]}}), "map of constants is damaged"),
    (b"[" * 100_000, "map of constants is damaged"),
    (b"\x80\x04pickle", "map of constants is damaged"),
)


def test_refuses_changed_map_of_constants(attacked: AttackedRelease) -> None:
    for data, words in CHANGED_MAPS:
        attacked.entries["engines"][2]["constants"] = attacked.put(data)
        attacked.assert_refused(EngineError, words)


# -- tokenizers: the library that parses them may panic, recurse, and accept any id ------------------------------------

INSERT_MISSING_TOKEN = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<q>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}
HARMFUL_TOKENIZERS: dict[str, dict[str, Any]] = {
    "missing token": {"post_processor": INSERT_MISSING_TOKEN},
    "panicking normalizer": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
    "empty pieces": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "empty vocabulary": {"model": {"type": "WordLevel", "unk_token": "", "vocab": {}}},
    "endless pattern": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(" * 5000}, "behavior": "Isolated"}},
    "no model": {"model": None},
}
INVALID_TOKENIZERS = (
    b"[" * 100_000,
    b'{"normalizer":' + b'{"type":"Sequence","normalizers":[' * 50_000,
    b"\xff" * 100,
    b"",
)


def test_refuses_harmful_tokenizer(attacked: AttackedRelease) -> None:
    valid = json.loads(releases.tokenizer_json())
    for data in (*(json.dumps(valid | change).encode() for change in HARMFUL_TOKENIZERS.values()), *INVALID_TOKENIZERS):
        attacked.entries["tokenizers"]["tokenizer"]["blob"] = attacked.put(data)
        attacked.assert_refused(MissingComponent, "tokenizer.json cannot be read or used")


def test_refuses_ids_outside_the_vocabulary(attacked: AttackedRelease) -> None:
    """Ids are used as indices into the embedding table."""
    attacked.entries["tokenizers"]["tokenizer"]["pad_token_id"] = 2**31 - 1
    attacked.assert_refused(MissingComponent, f"has no token {2**31 - 1}")
    attacked.entries["tokenizers"]["tokenizer"] |= {"pad_token_id": 1, "eos_token_id": 2**31 - 1}
    attacked.assert_refused(MissingComponent, "encodes an empty prompt as [0, 1]")


# -- weights: safetensors headers, and pickles -------------------------------------------------------------------------


def weights_file(header: Any, data: bytes = bytes(16), header_bytes: int | None = None) -> bytes:
    """Return a safetensors file. header: JSON or bytes. header_bytes: the stated size of the header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return (len(text) if header_bytes is None else header_bytes).to_bytes(8, "little") + text + data


def tensor(begin: Any, end: Any, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [4] if shape is None else shape, "data_offsets": [begin, end]}


SAME_NAME = b'{"a": %s, "a": %s}' % ((json.dumps(tensor(0, 16)).encode(),) * 2)
INVALID_WEIGHTS: tuple[tuple[bytes, str], ...] = (
    (weights_file({"a": tensor(0, 16), "b": tensor(8, 24)}, bytes(24)), "'b' do not begin where"),
    (weights_file({"a": tensor(0, 16), "b": tensor(20, 36)}, bytes(36)), "'b' do not begin where"),
    (weights_file({"a": tensor(4, 20)}, bytes(20)), "'a' do not begin where"),
    (weights_file({"a": tensor(0, 16)}, bytes(24)), "its tensors end at byte"),
    (weights_file({"a": tensor(0, 2**40, [2**38])}), "its tensors end at byte"),
    (weights_file({"a": tensor(16, 0)}), "'a' has invalid offsets"),
    (weights_file({"a": tensor(-16, 0)}), "'a' has invalid offsets"),
    (weights_file({"a": tensor(0.0, 16.0)}), "'a' has invalid offsets"),
    (weights_file({"a": tensor(0, 16) | {"data_offsets": [16]}}), "'a' has invalid offsets"),
    (weights_file({"a": tensor(2**63, 2**63 + 16)}), "'a' has invalid offsets"),
    (weights_file({"a": tensor(0, 16, [2**33, 2**33])}), "shape and the bytes of 'a' disagree"),
    (weights_file({"a": tensor(0, 16, [2**32, 2**32, 4])}), "the shape and the bytes of 'a' disagree"),
    (weights_file({"a": tensor(0, 16, [-2, -2])}), "'a' has an invalid shape"),
    (weights_file({"a": tensor(0, 16, "4")}), "'a' has an invalid shape"),
    (weights_file({"a": tensor(0, 16, [4, True])}), "'a' has an invalid shape"),
    (weights_file({"a": tensor(0, 16, [4] + [1] * 5000)}), "'a' has an invalid shape"),
    (weights_file({"a": tensor(0, 1, [1], "U8"), "b": tensor(1, 17)}, bytes(17)), "'b' is not aligned"),
    (weights_file({"a": tensor(0, 16, None, "C64")}), "unknown dtype"),
    (weights_file({"a": tensor(0, 16, None, ["F32"])}), "unknown dtype"),
    (weights_file({"a": tensor(0, 16) | {"strides": [9]}}), "not described by"),
    (weights_file({"a": None}), "not described by"),
    (weights_file({"": tensor(0, 16)}), "name has 0 characters"),
    (weights_file({"a" * 100_000: tensor(0, 16)}), "name has 100000 characters"),
    (weights_file(SAME_NAME), "a key is repeated"),
    (weights_file([]), "its header is not an object"),
    (weights_file(b'{"a": ' + b"[" * 200_000), "its header is not JSON"),
    (weights_file(b'{"\xff": 1}'), "its header is not JSON"),
    (weights_file({}, b"", 1000), "its header is longer than the file"),
    (weights_file(b" " * (HEADER_LIMIT + 8)), f"more than {HEADER_LIMIT}"),
    (weights_file({str(i): tensor(0, 0, [0]) for i in range(2**14 + 1)}, b""), "it names more than"),
    (bytes(7), "it has 7 bytes"),
)


def test_refuses_invalid_weights(attacked: AttackedRelease) -> None:
    for data, words in INVALID_WEIGHTS:
        attacked.entries["weights"][2]["blobs"] = [attacked.put(data)]
        assert words in attacked.assert_refused(CorruptBlob, "is not a safetensors file of weights")


def test_refuses_tensor_in_two_blobs(attacked: AttackedRelease) -> None:
    blobs = [attacked.put(weights_file({"a.bias": tensor(0, 16)}, bytes([n]) * 16)) for n in range(2)]
    attacked.entries["weights"][2]["blobs"] = blobs
    attacked.assert_refused(CorruptBlob, "have a.bias in two blobs")


class Payload:
    """Deletes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.unlink, (str(self.path),)


def torch_saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": value}, buffer)
    return buffer.getvalue()


def test_unpickles_nothing(attacked: AttackedRelease, outside: Path) -> None:
    for serialize in (pickle.dumps, torch_saved):
        attacked.entries["weights"][2]["blobs"] = [attacked.put(serialize(Payload(outside)))]
        attacked.assert_refused(CorruptBlob, "is not a safetensors file of weights")
        assert outside.exists()
