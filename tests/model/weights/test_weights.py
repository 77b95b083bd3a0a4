"""Blobs of weights are loaded once and unchanged, and invalid files are refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from engine_builder.stores.local import WritableLocalStore
from model.errors import CorruptBlob
from model.store.manifest import WeightsRecord
from model.weights.cache import WeightsCache
from tests.support.releases import put_blob

CPU = torch.device("cpu")
ONE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2], dtype=torch.int64)}
TWO = {"c": torch.tensor(3.0, dtype=torch.bfloat16), "d": torch.zeros(0, 4)}


@pytest.fixture
def store(tmp_path: Path) -> WritableLocalStore:
    return WritableLocalStore(tmp_path / "store")


def record(store: WritableLocalStore, *blobs: bytes, component: str = "unet") -> WeightsRecord:
    entries = tuple(put_blob(store, data) for data in blobs)
    return WeightsRecord(component=component, precision="fp32", layout="plain", blobs=entries)


def test_loads_tensors_unchanged(store: WritableLocalStore) -> None:
    loaded = WeightsCache(store, CPU).load(record(store, save(ONE), save(TWO)))
    assert loaded.keys() == ONE.keys() | TWO.keys()
    for name, tensor in (ONE | TWO).items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)


def test_equal_weights_are_loaded_once(store: WritableLocalStore) -> None:
    cache = WeightsCache(store, CPU)
    first = cache.load(record(store, save(ONE)))
    second = cache.load(record(store, save(ONE), component="refiner_unet"))
    assert all(first[name].data_ptr() == second[name].data_ptr() for name in ONE)
    assert cache.bytes == sum(tensor.nbytes for tensor in ONE.values())
    cache.load(record(store, save(TWO)))
    assert cache.bytes == sum(tensor.nbytes for tensor in (ONE | TWO).values())


def test_refuses_tensor_in_two_blobs(store: WritableLocalStore) -> None:
    other = save({"a": torch.ones(2, 3), "z": torch.ones(1)})
    with pytest.raises(CorruptBlob, match="weights of unet have a in two blobs.*`preheat build`"):
        WeightsCache(store, CPU).load(record(store, save(ONE), other))


def header(entries: object, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes


SOUND = save(ONE)
NOT_SAFETENSORS = {
    "empty": b"",
    "text": b"this text is not a weights file",
    "half": SOUND[: len(SOUND) // 2],
    "cut": SOUND[:-1],
    "longer": SOUND + b"\0",
    "a header of 2**63 bytes": (2**63).to_bytes(8, "little") + b"{}",
    "a header longer than the file": (2**20).to_bytes(8, "little") + b"{}",
    "past the end": header({"a": entry()}),
    "shape and size disagree": header({"a": entry(shape=[5])}, bytes(16)),
    "overlapping": header({"a": entry(), "b": entry(data_offsets=[8, 24])}, bytes(24)),
    "unknown dtype": header({"a": entry(dtype="F33")}, bytes(16)),
    "a pickle": b"\x80\x04\x95" + bytes(60),
}


@pytest.mark.parametrize("data", NOT_SAFETENSORS.values(), ids=NOT_SAFETENSORS)
def test_refuses_invalid_safetensors_file(store: WritableLocalStore, data: bytes) -> None:
    """Its digest is correct, because it was published like this."""
    with pytest.raises(CorruptBlob, match="is not a safetensors file.*`preheat build`, `preheat publish`"):
        WeightsCache(store, CPU).load(record(store, data))


def test_refuses_damaged_blob_and_keeps_nothing(store: WritableLocalStore) -> None:
    wanted = record(store, save(ONE), save(TWO))
    path = store.root / "blobs" / "sha256" / wanted.blobs[1].sha256
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    cache = WeightsCache(WritableLocalStore(store.root), CPU)
    with pytest.raises(CorruptBlob, match=wanted.blobs[1].sha256[:12]):
        cache.load(wanted)
    assert cache.bytes == 0
    path.write_bytes(data)
    assert cache.load(wanted).keys() == ONE.keys() | TWO.keys(), "a repeated load, as by Truss, works after the repair"
