"""Weights that an attacker wrote: invalid safetensors headers, and pickles.

Each is loaded by the cache of weights, and by the stream alone.
"""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from model.errors import CorruptBlob
from model.store.manifest import Blob
from model.weights.safetensors_header import HEADER_LIMIT
from model.weights.stream import stream_weights
from tests.attacks.conftest import Victim, in_folder_and_bucket


def file(entries: Any, data: bytes = bytes(16), length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(begin: Any, end: Any, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [4] if shape is None else shape, "data_offsets": [begin, end]}


INVALID_FILES: dict[str, tuple[bytes, str]] = {
    "overlap": (file({"a": tensor(0, 16), "b": tensor(8, 24)}, bytes(24)), "'b' do not begin where"),
    "the same bytes twice": (file({"a": tensor(0, 16), "b": tensor(0, 16)}), "do not begin where"),
    "a gap": (file({"a": tensor(0, 16), "b": tensor(20, 36)}, bytes(36)), "'b' do not begin where"),
    "a gap in front": (file({"a": tensor(4, 20)}, bytes(20)), "'a' do not begin where"),
    "trailing bytes": (file({"a": tensor(0, 16)}, bytes(24)), "its tensors end at byte"),
    "past the end": (file({"a": tensor(0, 32, [8])}), "its tensors end at byte"),
    "far past the end": (file({"a": tensor(0, 2**40, [2**38])}), "its tensors end at byte"),
    "backwards": (file({"a": tensor(16, 0)}), "'a' has invalid offsets"),
    "negative offsets": (file({"a": tensor(-16, 0)}), "'a' has invalid offsets"),
    "offsets in fractions": (file({"a": tensor(0.0, 16.0)}), "'a' has invalid offsets"),
    "one offset": (file({"a": {"dtype": "F32", "shape": [4], "data_offsets": [16]}}), "'a' has invalid offsets"),
    "offsets past what a file has": (file({"a": tensor(2**63, 2**63 + 16)}), "'a' has invalid offsets"),
    "a shape that overflows": (file({"a": tensor(0, 16, [2**33, 2**33])}), "the shape and the bytes of 'a' disagree"),
    "a shape that overflows to the right size": (
        file({"a": tensor(0, 16, [2**32, 2**32, 4])}),
        "the shape and the bytes of 'a' disagree",
    ),
    "a negative shape": (file({"a": tensor(0, 16, [-2, -2])}), "'a' has an invalid shape"),
    "a shape as text": (file({"a": tensor(0, 16, "4")}), "'a' has an invalid shape"),
    "a shape with a boolean": (file({"a": tensor(0, 16, [4, True])}), "'a' has an invalid shape"),
    "a shape of 5001 dimensions": (file({"a": tensor(0, 16, [4] + [1] * 5000)}), "'a' has an invalid shape"),
    "unaligned": (file({"a": tensor(0, 1, [1], "U8"), "b": tensor(1, 17)}, bytes(17)), "'b' is not aligned"),
    "an unknown dtype": (file({"a": tensor(0, 16, None, "C64")}), "unknown dtype"),
    "a dtype that is a list": (file({"a": tensor(0, 16, None, ["F32"])}), "unknown dtype"),
    "an additional entry": (file({"a": tensor(0, 16) | {"strides": [9]}}), "not described by"),
    "a missing entry": (file({"a": {"dtype": "F32", "shape": [4]}}), "not described by"),
    "no entry": (file({"a": None}), "not described by"),
    "no name": (file({"": tensor(0, 16)}), "name has 0 characters"),
    "a long name": (file({"a" * 100_000: tensor(0, 16)}), "name has 100000 characters"),
    "a name twice": (file(b'{"a": %s, "a": %s}' % ((json.dumps(tensor(0, 16)).encode(),) * 2)), "a key is repeated"),
    "a list": (file([]), "its header is not an object"),
    "deeply nested": (file(b'{"a": ' + b"[" * 200_000), "its header is not JSON"),
    "not utf-8": (file(b'{"\xff": 1}'), "its header is not JSON"),
    "half a header": (file(b'{"a": '), "its header is not JSON"),
    "a header longer than the file": (file({}, b"", 1000), "its header is longer than the file"),
    "a header of 2**63 bytes": (file({}, b"", 2**63), f"more than {HEADER_LIMIT}"),
    "a header that fills memory": (file(b" " * (HEADER_LIMIT + 8)), f"more than {HEADER_LIMIT}"),
    "too many tensors": (file({str(i): tensor(0, 0, [0]) for i in range(2**14 + 1)}, b""), "it names more than"),
    "seven bytes": (bytes(7), "it has 7 bytes"),
    "empty": (b"", "it has 0 bytes"),
}


@pytest.mark.parametrize("data, words", INVALID_FILES.values(), ids=INVALID_FILES)
def test_refuses_invalid_header(victim: Victim, data: bytes, words: str) -> None:
    victim.entries["weights"][2]["blobs"] = [victim.keep(data)]
    assert words in victim.refused(CorruptBlob, "is not a safetensors file of weights")
    blob = Blob.model_validate(victim.entries["weights"][2]["blobs"][0])
    with pytest.raises(CorruptBlob) as caught:
        stream_weights(victim.store, [blob], torch.device("cpu"))
    assert words in str(caught.value)


def test_refuses_tensor_in_two_blobs(victim: Victim) -> None:
    blobs = [victim.keep(file({"a.bias": tensor(0, 16)}, bytes([n]) * 16)) for n in range(2)]
    victim.entries["weights"][2]["blobs"] = blobs
    victim.refused(CorruptBlob, "have a.bias in two blobs")


class Payload:
    """Deletes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.unlink, (str(self.path),)


@in_folder_and_bucket
@pytest.mark.parametrize("kind", ["pickle", "torch.save"])
def test_unpickles_nothing(victim: Victim, outside: Path, kind: str, tmp_path: Path) -> None:
    if kind == "pickle":
        data = pickle.dumps(Payload(outside))
    else:
        path = tmp_path / "inside" / "weights.pt"
        torch.save({"a": Payload(outside)}, path)
        data = path.read_bytes()
    victim.entries["weights"][2]["blobs"] = [victim.keep(data)]
    victim.refused(CorruptBlob, "is not a safetensors file of weights")
    assert outside.exists()
