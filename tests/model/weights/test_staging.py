"""Weights are streamed to a device through small slots, in any pieces, by several threads, and verified.

On the CPU each copy is complete on return. `LateLane` imitates a device that copies late.
"""

import json
import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from engine_builder.stores.local import WritableLocalStore
from model.cold_start import ColdStart
from model.errors import CorruptBlob, StoreError, Unavailable
from model.store.manifest import Blob, WeightsRecord
from model.store.sink import Sink
from model.weights import stream
from model.weights.cache import WeightsCache
from model.weights.safetensors_header import Extent
from model.weights.stream import MAX_THREADS, CopyLane, lane_stream, stream_weights, tensor_view
from tests.support import releases
from tests.support.components import BASE_COMPONENTS
from tests.support.deployments import deployed, load_release
from tests.support.releases import RELEASE_NAME, cpu_target, put_blob
from tests.support.waiting import TIMEOUT_SECONDS

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def store(tmp_path: Path) -> WritableLocalStore:
    return WritableLocalStore(tmp_path / "store")


def make_tensors(seed: int, count: int = 12) -> Tensors:
    """Return tensors of odd sizes and several dtypes, with an empty and a scalar one."""
    rng = random.Random(seed)
    tensors: Tensors = {"empty": torch.zeros(0, 4), "scalar": torch.tensor(float(seed)), "many": torch.arange(20_000)}
    for number in range(count):
        shape = [rng.randrange(1, 40) for _ in range(rng.randrange(1, 4))]
        dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.bool])
        tensors[f"{number}"] = (torch.rand(shape, generator=torch.Generator().manual_seed(number)) * 9).to(dtype)
    return tensors


def assert_equal(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and actual[name].shape == tensor.shape, name
        assert torch.equal(actual[name], tensor), name


class SmallLane(CopyLane):
    """Slots of 4 KiB, so that headers and most tensors span several."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, slot_bytes=4096)


class LateLane(SmallLane):
    """Copies as late as allowed: when the slot is reused, or when all copies are awaited."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._slot = memoryview(b"")
        self._delayed: list[tuple[memoryview, torch.Tensor, int]] = []  # slot, target, offset in the slot

    def free_slot(self) -> memoryview:
        self._slot = super().free_slot()
        self._copy([entry for entry in self._delayed if entry[0] is self._slot])
        self._delayed = [entry for entry in self._delayed if entry[0] is not self._slot]
        return self._slot

    def copy(self, pieces: Iterable[tuple[torch.Tensor, int]]) -> None:
        self._delayed += [(self._slot, target, offset) for target, offset in pieces]

    def finish(self) -> None:
        self._copy(self._delayed)
        self._delayed = []

    def _copy(self, delayed: list[tuple[memoryview, torch.Tensor, int]]) -> None:
        for slot, target, offset in delayed:
            target.copy_(torch.frombuffer(slot, dtype=torch.uint8, count=target.numel(), offset=offset))


class RecordingStore(WritableLocalStore):
    """Records the digests of streamed blobs."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.streamed: list[str] = []

    def stream(self, digest: str, size: int, sink: Sink) -> None:
        super().stream(digest, size, sink)
        self.streamed.append(digest)


@pytest.mark.parametrize(("lane", "threads"), [(CopyLane, 1), (SmallLane, 3), (LateLane, None), (LateLane, 1)])
def test_tensors_arrive_unchanged(store: WritableLocalStore, lane: type[CopyLane], threads: int | None) -> None:
    expected = [make_tensors(seed) for seed in range(5)]
    blobs = [put_blob(store, save(tensors)) for tensors in expected]
    streamed = stream_weights(store, blobs + blobs[:1], CPU, threads, lane)
    for blob, tensors in zip(blobs, expected, strict=True):
        assert_equal(streamed[blob.sha256], tensors)
        places = [tensor.data_ptr() for tensor in streamed[blob.sha256].values() if tensor.numel()]
        assert all((place - min(places)) % 256 == 0 for place in places), "unaligned for kernels"


def test_empty_tensor_is_on_the_device() -> None:
    """`meta` represents any device other than the CPU."""
    for shape in ((0, 4), (3,)):
        data = torch.empty(4 * math.prod(shape), dtype=torch.uint8, device="meta")
        tensor = tensor_view(data, Extent("F32", shape, 0, data.numel()))
        assert tensor.shape == shape and tensor.device.type == "meta" and tensor.dtype == torch.float32


@pytest.mark.parametrize("threads", [1, 4])
def test_one_wrong_byte_returns_nothing(store: WritableLocalStore, threads: int) -> None:
    blobs = [put_blob(store, save(make_tensors(seed))) for seed in range(4)]
    path = store.root / "blobs" / "sha256" / blobs[2].sha256
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptBlob, match=blobs[2].sha256[:12]):
        stream_weights(store, blobs, CPU, threads)
    path.write_bytes(data)
    assert stream_weights(store, blobs, CPU, threads).keys() == {blob.sha256 for blob in blobs}


@pytest.mark.parametrize("readable", [True, False])
def test_second_copy_replaces_damaged_one(readable: bool, store: WritableLocalStore) -> None:
    """An S3 store may stream a blob twice. The first copy here has another header, or an invalid one."""
    good = save(make_tensors(2, 5))
    overhead = len(save({"x": torch.zeros(len(good), dtype=torch.uint8)})) - len(good)
    bad = save({"x": torch.ones(len(good) - overhead, dtype=torch.uint8)})
    assert len(bad) == len(good)
    bad = bad if readable else bytes([1]) * len(good)

    class RepeatingStore(WritableLocalStore):
        def stream(self, digest: str, size: int, sink: Sink) -> None:
            for data in (bad, good):
                at = 0
                while at < size:
                    buffer = sink.buffer(at)[: size - at]
                    buffer[:] = data[at : at + len(buffer)]
                    sink.filled(at, buffer)
                    at += len(buffer)

    blob = Blob(sha256="0" * 64, bytes=len(good))
    [tensors] = stream_weights(RepeatingStore(store.root), [blob], CPU, 1, LateLane).values()
    assert_equal(tensors, make_tensors(2, 5))


def test_load_streams_weights_and_verifies_them(store: WritableLocalStore) -> None:
    """Weights stream while other blobs are fetched and verified."""
    store.write_release(releases.draft_release(store, releases.compiled_toy()))
    cold_start = ColdStart()
    loaded = load_release(store, deployed(RELEASE_NAME), [cpu_target()], cold_start)
    x = torch.randn(2, 4, 8, 8)
    for seed, name in enumerate(BASE_COMPONENTS):
        torch.testing.assert_close(loaded.model.engines[name].run({"x": x}, 64, 64)["y"], releases.Toy(seed)(x)[0])
    assert {"resolve", "fetch", "verify", "stream", "weights", "engines"} <= cold_start.phases.keys()
    digest = store.read_release(RELEASE_NAME).weights[0].blobs[0].sha256
    file = store.root / "blobs" / "sha256" / digest
    file.write_bytes(file.read_bytes()[:-1] + b"\7")
    with pytest.raises(CorruptBlob, match=digest[:12]):
        load_release(store, deployed(RELEASE_NAME), [cpu_target()], ColdStart())


@pytest.mark.parametrize("blobs", [1, 3])
def test_a_stopped_stream_ends_within_a_blob(store: WritableLocalStore, blobs: int) -> None:
    """It counts as no success."""
    buffers: list[memoryview] = []

    class CountingLane(SmallLane):
        def free_slot(self) -> memoryview:
            buffers.append(super().free_slot())
            return buffers[-1]

    entries = [put_blob(store, save({"a": torch.full((40960,), float(seed))})) for seed in range(blobs)]
    with pytest.raises(Unavailable, match="stopped"):
        stream_weights(store, entries, CPU, 1, CountingLane, is_stopped=lambda: len(buffers) >= 3)
    assert len(buffers) == 3 < 40960 * 4 // 4096


def test_failing_load_stops_streaming(tmp_path: Path) -> None:
    begun, failed, ended = threading.Event(), threading.Event(), threading.Event()

    class FailingStore(RecordingStore):
        def stream(self, digest: str, size: int, sink: Sink) -> None:
            begun.set()
            if failed.is_set():
                ended.wait(1)  # gives the failed load the time to stop the others
            assert failed.wait(TIMEOUT_SECONDS)
            super().stream(digest, size, sink)

        def fetch(self, blobs: Iterable[Blob], is_stopped: Callable[[], bool] = lambda: False) -> None:
            assert begun.wait(TIMEOUT_SECONDS)
            failed.set()
            raise StoreError("The store is offline.")

    store = FailingStore(tmp_path / "store")
    manifest = releases.draft_release(store, refiner=True)
    store.write_release(manifest)
    with pytest.raises(StoreError, match="offline"):
        load_release(store, deployed(RELEASE_NAME), [cpu_target()], ColdStart())
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("preheat-weights")]
    ended.set()
    assert not threads
    assert len(store.streamed) < len({blob.sha256 for record in manifest.weights for blob in record.blobs})


def record(store: WritableLocalStore, *blobs: bytes, component: str = "unet") -> WeightsRecord:
    entries = tuple(put_blob(store, data) for data in blobs)
    return WeightsRecord(component=component, precision="fp32", layout="plain", blobs=entries)


def test_shared_weights_are_streamed_once(tmp_path: Path) -> None:
    store = RecordingStore(tmp_path / "store")
    cache = WeightsCache(store, CPU)
    files = [save({name: torch.ones(3)}) for name in "ab"]
    one, other = (record(store, *files, component=name) for name in ("unet", "refiner_unet"))
    cache.begin([one, other], ColdStart())
    first, second = cache.load(one), cache.load(other)
    assert first.keys() == {"a", "b"} and all(first[name] is second[name] for name in first)
    assert sorted(store.streamed) == sorted(blob.sha256 for blob in one.blobs) and cache.bytes == 24


def test_refuses_tensor_in_two_blobs(store: WritableLocalStore) -> None:
    files = [save({"a": torch.ones(2, 3) * number}) for number in range(2)]
    with pytest.raises(CorruptBlob, match="weights of unet have a in two blobs.*`preheat build`"):
        WeightsCache(store, CPU).load(record(store, *files))


def header(entries: object, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes


SOUND = save(make_tensors(1, 3))
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


def test_copies_have_the_same_streams_at_every_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has 32 streams. If a GPU's lanes took more of them, one would be the stream that captures graphs."""
    monkeypatch.setattr(stream, "_lane_streams", {})
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: object())
    devices = [torch.device(name) for name in ("cuda", "cuda:0")] * MAX_THREADS
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        used = Counter(pool.map(lane_stream, devices))
    assert len(used) == MAX_THREADS and {*used.values()} == {2}
