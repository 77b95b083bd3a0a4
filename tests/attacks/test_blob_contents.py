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

from model.errors import CorruptBlob, EngineError, ManifestError, MissingComponent
from model.store.manifest import Blob
from model.weights.safetensors_header import HEADER_LIMIT
from model.weights.stream import stream_weights
from tests.attacks.conftest import AttackedRelease, from_folder_and_bucket
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


def package_with_link() -> bytes:
    """A later entry could be written through the link."""
    return package_with(MODEL + "link", b"/tmp", mode=stat.S_IFLNK | 0o777)


def package_with_zip_bomb() -> bytes:
    package = package_with("toy/bomb", bytes(2**24), zipfile.ZIP_DEFLATED)
    assert len(package) < 2**22
    return package


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


PACKAGES: dict[str, tuple[Callable[[], bytes], str]] = {
    "link": (package_with_link, "which is a link"),
    "compressed entry": (package_with_zip_bomb, "which is compressed"),
    "untrue size": (package_with_untrue_size, "claim more bytes than the file has"),
    "two files with one name": (package_with_repeated_name, "two files with the same name"),
    "empty": (lambda: b"", "engine cannot be opened"),
    "archive without files": (lambda: b"PK\x05\x06" + bytes(18), "engine cannot be opened"),
    "ELF": (lambda: b"\x7fELF" + bytes(100), "engine cannot be opened"),
    "text": (lambda: releases.FAKE_ENGINE.engine, "engine cannot be opened"),
    # The dynamic linker would end the process for a library that is cut.
    "another library": (
        lambda: package_with_library(lambda library: Path(_ctypes.__file__).read_bytes()),
        "its library has no AOTInductorModelContainer",
    ),
    "library cut in a segment": (
        lambda: package_with_library(lambda library: library[: len(library) // 10]),
        "its library is shorter than its header states",
    ),
    "library cut in the header": (
        lambda: package_with_library(lambda library: library[:60]),
        "its library is shorter than its header states",
    ),
    "library of text": (lambda: package_with_library(lambda library: b"text" * 100), "engine cannot be opened"),
}


@pytest.mark.parametrize("make, words", PACKAGES.values(), ids=PACKAGES)
def test_refuses_harmful_package(attacked: AttackedRelease, make: Callable[[], bytes], words: str) -> None:
    attacked.entries["engines"][2]["blob"] = attacked.put(make())
    attacked.assert_refused(EngineError, words)


@from_folder_and_bucket
@pytest.mark.parametrize(
    "name",
    [
        MODEL + "../" * 12 + "{}", "../{}", "toy/../../{}", "{}", "C:\\{}", MODEL + "..\\..\\{}", "toy//x",
        MODEL + "x\nforged",
    ],
)  # fmt: skip
def test_refuses_entry_outside_the_folder(attacked: AttackedRelease, name: str) -> None:
    """torch's own loader writes an entry wherever its name leads."""
    escaped = attacked.cache.parent.parent / "escaped"
    package = package_with(name.format(str(escaped)), b"escaped")
    attacked.entries["engines"][2]["blob"] = attacked.put(package)
    attacked.assert_refused(EngineError, "leads out of the folder it is unpacked in")
    assert not escaped.exists()


def test_refuses_package_too_large_for_memory(attacked: AttackedRelease) -> None:
    attacked.entries["engines"][2]["blob"] = {"sha256": "0" * 64, "bytes": 2**28 + 1}
    attacked.assert_refused(ManifestError, "the engine has more than 268435456 bytes")


# -- maps of constants: torch's loader checks no name, shape or dtype, and would read beyond a tensor's end ------------

CHANGED_MAPS: dict[str, tuple[dict[str, Any], str]] = {
    "larger shape": ({"a.weight": {"shape": [8, 400]}}, "do not fit its engine"),
    "other tensor": ({"a.weight": {"tensor": "b.weight"}}, "do not fit its engine"),
    "other dtype": ({"a.weight": {"dtype": "float16"}}, "do not fit its engine"),
    "missing tensor": ({"a.weight": {"tensor": "../../x"}}, "lack ../../x"),
    "additional constant": ({"extra": {"tensor": "a.bias", "dtype": "float32", "shape": [8]}}, "constant map disagree"),
    "negative shape": ({"a.weight": {"shape": [-8, 4]}}, "map of constants is damaged"),
}
INVALID_MAPS = {
    "nested lists": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "number": b'{"a": 1}',
    "pickle": b"\x80\x04pickle",
}


@pytest.mark.parametrize("changes, words", CHANGED_MAPS.values(), ids=CHANGED_MAPS)
def test_refuses_changed_map_of_constants(attacked: AttackedRelease, changes: dict[str, Any], words: str) -> None:
    attacked.entries["engines"][2]["constants"] = attacked.put(releases.toy_constants(changes))
    attacked.assert_refused(EngineError, words)


@pytest.mark.parametrize("data", INVALID_MAPS.values(), ids=INVALID_MAPS)
def test_refuses_invalid_map_of_constants(attacked: AttackedRelease, data: bytes) -> None:
    attacked.entries["engines"][2]["constants"] = attacked.put(data)
    attacked.assert_refused(EngineError, "map of constants is damaged")


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
INVALID_TOKENIZERS = {
    "nested lists": b"[" * 100_000,
    "nested normalizers": b'{"normalizer":' + b'{"type":"Sequence","normalizers":[' * 50_000,
    "not text": b"\xff" * 100,
    "empty": b"",
}


@pytest.mark.parametrize("change", HARMFUL_TOKENIZERS.values(), ids=HARMFUL_TOKENIZERS)
def test_refuses_harmful_tokenizer(attacked: AttackedRelease, change: dict[str, Any]) -> None:
    tokenizer = json.loads(releases.tokenizer_json()) | change
    attacked.entries["tokenizers"]["tokenizer"]["blob"] = attacked.put(json.dumps(tokenizer).encode())
    attacked.assert_refused(MissingComponent, "tokenizer.json cannot be read or used")


@pytest.mark.parametrize("data", INVALID_TOKENIZERS.values(), ids=INVALID_TOKENIZERS)
def test_refuses_invalid_tokenizer(attacked: AttackedRelease, data: bytes) -> None:
    attacked.entries["tokenizers"]["tokenizer_2"]["blob"] = attacked.put(data)
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


INVALID_WEIGHTS: dict[str, tuple[bytes, str]] = {
    "overlap": (weights_file({"a": tensor(0, 16), "b": tensor(8, 24)}, bytes(24)), "'b' do not begin where"),
    "the same bytes twice": (weights_file({"a": tensor(0, 16), "b": tensor(0, 16)}), "do not begin where"),
    "a gap": (weights_file({"a": tensor(0, 16), "b": tensor(20, 36)}, bytes(36)), "'b' do not begin where"),
    "a gap in front": (weights_file({"a": tensor(4, 20)}, bytes(20)), "'a' do not begin where"),
    "trailing bytes": (weights_file({"a": tensor(0, 16)}, bytes(24)), "its tensors end at byte"),
    "past the end": (weights_file({"a": tensor(0, 32, [8])}), "its tensors end at byte"),
    "far past the end": (weights_file({"a": tensor(0, 2**40, [2**38])}), "its tensors end at byte"),
    "backwards": (weights_file({"a": tensor(16, 0)}), "'a' has invalid offsets"),
    "negative offsets": (weights_file({"a": tensor(-16, 0)}), "'a' has invalid offsets"),
    "offsets in fractions": (weights_file({"a": tensor(0.0, 16.0)}), "'a' has invalid offsets"),
    "one offset": (weights_file({"a": tensor(0, 16) | {"data_offsets": [16]}}), "'a' has invalid offsets"),
    "offsets past what a file has": (weights_file({"a": tensor(2**63, 2**63 + 16)}), "'a' has invalid offsets"),
    "a shape that overflows": (
        weights_file({"a": tensor(0, 16, [2**33, 2**33])}),
        "shape and the bytes of 'a' disagree",
    ),
    "a shape that overflows to the right size": (
        weights_file({"a": tensor(0, 16, [2**32, 2**32, 4])}),
        "the shape and the bytes of 'a' disagree",
    ),
    "a negative shape": (weights_file({"a": tensor(0, 16, [-2, -2])}), "'a' has an invalid shape"),
    "a shape as text": (weights_file({"a": tensor(0, 16, "4")}), "'a' has an invalid shape"),
    "a shape with a boolean": (weights_file({"a": tensor(0, 16, [4, True])}), "'a' has an invalid shape"),
    "a shape of 5001 dimensions": (weights_file({"a": tensor(0, 16, [4] + [1] * 5000)}), "'a' has an invalid shape"),
    "unaligned": (
        weights_file({"a": tensor(0, 1, [1], "U8"), "b": tensor(1, 17)}, bytes(17)),
        "'b' is not aligned",
    ),
    "an unknown dtype": (weights_file({"a": tensor(0, 16, None, "C64")}), "unknown dtype"),
    "a dtype that is a list": (weights_file({"a": tensor(0, 16, None, ["F32"])}), "unknown dtype"),
    "an additional entry": (weights_file({"a": tensor(0, 16) | {"strides": [9]}}), "not described by"),
    "a missing entry": (weights_file({"a": {"dtype": "F32", "shape": [4]}}), "not described by"),
    "no entry": (weights_file({"a": None}), "not described by"),
    "no name": (weights_file({"": tensor(0, 16)}), "name has 0 characters"),
    "a long name": (weights_file({"a" * 100_000: tensor(0, 16)}), "name has 100000 characters"),
    "a name twice": (
        weights_file(b'{"a": %s, "a": %s}' % ((json.dumps(tensor(0, 16)).encode(),) * 2)),
        "a key is repeated",
    ),
    "a list": (weights_file([]), "its header is not an object"),
    "deeply nested": (weights_file(b'{"a": ' + b"[" * 200_000), "its header is not JSON"),
    "not utf-8": (weights_file(b'{"\xff": 1}'), "its header is not JSON"),
    "half a header": (weights_file(b'{"a": '), "its header is not JSON"),
    "a header longer than the file": (weights_file({}, b"", 1000), "its header is longer than the file"),
    "a header of 2**63 bytes": (weights_file({}, b"", 2**63), f"more than {HEADER_LIMIT}"),
    "a header that fills memory": (weights_file(b" " * (HEADER_LIMIT + 8)), f"more than {HEADER_LIMIT}"),
    "too many tensors": (
        weights_file({str(i): tensor(0, 0, [0]) for i in range(2**14 + 1)}, b""),
        "it names more than",
    ),
    "seven bytes": (bytes(7), "it has 7 bytes"),
    "empty": (b"", "it has 0 bytes"),
}


@pytest.mark.parametrize("data, words", INVALID_WEIGHTS.values(), ids=INVALID_WEIGHTS)
def test_refuses_invalid_weights(attacked: AttackedRelease, data: bytes, words: str) -> None:
    """Both by the cache of weights, which a load uses, and by the stream alone."""
    attacked.entries["weights"][2]["blobs"] = [attacked.put(data)]
    assert words in attacked.assert_refused(CorruptBlob, "is not a safetensors file of weights")
    blob = Blob.model_validate(attacked.entries["weights"][2]["blobs"][0])
    with pytest.raises(CorruptBlob) as caught:
        stream_weights(attacked.store, [blob], torch.device("cpu"))
    assert words in str(caught.value)


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


@from_folder_and_bucket
@pytest.mark.parametrize("serialize", [pickle.dumps, torch_saved], ids=["pickle", "torch.save"])
def test_unpickles_nothing(attacked: AttackedRelease, outside: Path, serialize: Callable[[object], bytes]) -> None:
    attacked.entries["weights"][2]["blobs"] = [attacked.put(serialize(Payload(outside)))]
    attacked.assert_refused(CorruptBlob, "is not a safetensors file of weights")
    assert outside.exists()
