"""Streaming of weights to a device: through small slots, in any pieces, by several threads, verified.

On the CPU each copy is complete on return. `LateLane` imitates a device that copies late.
"""

import math
import random
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from engine_builder.stores.local import WritableLocalStore
from model.cold_start import ColdStart
from model.errors import CorruptBlob, StoreError
from model.loading.load import load_release
from model.store.manifest import Blob
from model.store.sink import Sink
from model.weights import stream as streaming
from model.weights.cache import WeightsCache
from model.weights.safetensors_header import Extent
from model.weights.stream import SLOTS, CopyLane, stream_weights, tensor_view
from tests.support import releases
from tests.support.components import BASE_COMPONENTS
from tests.support.releases import NAME, cpu_target, put_blob

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def store(tmp_path: Path) -> WritableLocalStore:
    return WritableLocalStore(tmp_path / "store")


def some(seed: int, count: int = 12) -> Tensors:
    """Make tensors of odd sizes and several dtypes, with an empty and a scalar one."""
    rng = random.Random(seed)
    made: Tensors = {"empty": torch.zeros(0, 4), "scalar": torch.tensor(float(seed)), "many": torch.arange(20_000)}
    for number in range(count):
        shape = [rng.randrange(1, 40) for _ in range(rng.randrange(1, 4))]
        dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.bool])
        made[f"{number}"] = (torch.rand(shape, generator=torch.Generator().manual_seed(number)) * 9).to(dtype)
    return made


def same(given: Tensors, expected: Tensors) -> None:
    assert given.keys() == expected.keys()
    for name, tensor in expected.items():
        assert given[name].dtype == tensor.dtype and given[name].shape == tensor.shape, name
        assert torch.equal(given[name], tensor), name


class SmallLane(CopyLane):
    """Slots of 4 KiB, so that headers and most tensors span several."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, slot_bytes=4096)


class LateLane(CopyLane):
    """Copies as late as allowed: when the slot is reused, or when all copies are awaited."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, slot_bytes=4096)
        self._ordered: list[list[tuple[torch.Tensor, int]]] = [[] for _ in range(SLOTS)]

    def _copy_now(self, slot: int) -> None:
        for target, at in self._ordered[slot]:
            target.copy_(self._slots[slot][at : at + target.numel()])
        self._ordered[slot] = []

    def free_slot(self) -> memoryview:
        self._copy_now((self._current + 1) % SLOTS)
        return super().free_slot()

    def copy(self, pieces: Iterable[tuple[torch.Tensor, int]]) -> None:
        self._ordered[self._current] += pieces

    def finish(self) -> None:
        for turn in range(SLOTS):
            self._copy_now((self._current + 1 + turn) % SLOTS)


@pytest.mark.parametrize("lane", [CopyLane, SmallLane, LateLane])
@pytest.mark.parametrize("threads", [1, 3, None])
def test_tensors_arrive_unchanged(store: WritableLocalStore, lane: type[CopyLane], threads: int | None) -> None:
    groups = [some(seed) for seed in range(5)]
    blobs = [put_blob(store, save(group)) for group in groups]
    arrived = stream_weights(store, blobs + blobs[:1], CPU, threads, lane)
    for blob, group in zip(blobs, groups, strict=True):
        same(arrived[blob.sha256], group)


def test_empty_tensor_is_on_the_device() -> None:
    """`meta` represents any device other than the CPU."""
    for shape in ((0, 4), (3,)):
        data = torch.empty(4 * math.prod(shape), dtype=torch.uint8, device="meta")
        made = tensor_view(data, Extent("F32", shape, 0, data.numel()))
        assert made.shape == shape and made.device.type == "meta" and made.dtype == torch.float32


def test_tensors_are_aligned_to_256_bytes(store: WritableLocalStore) -> None:
    blob = put_blob(store, save(some(1)))
    [tensors] = stream_weights(store, [blob], CPU).values()
    base = min(tensor.data_ptr() for tensor in tensors.values() if tensor.numel())
    assert all((tensor.data_ptr() - base) % 256 == 0 for tensor in tensors.values() if tensor.numel())


def test_each_thread_has_its_own_lane(store: WritableLocalStore) -> None:
    together = threading.Barrier(3, timeout=60)

    class Meeting(WritableLocalStore):
        def stream(self, digest: str, size: int, sink: Sink) -> None:
            together.wait()  # passes only if three blobs are read concurrently
            super().stream(digest, size, sink)

    blobs = [put_blob(store, save(some(seed))) for seed in range(3)]
    made: list[CopyLane] = []

    def lane(device: torch.device) -> CopyLane:
        made.append(CopyLane(device))
        return made[-1]

    assert len(stream_weights(Meeting(store.root), blobs, CPU, 3, lane)) == len(made) == 3


@pytest.mark.parametrize("threads", [1, 4])
def test_one_wrong_byte_returns_nothing(store: WritableLocalStore, threads: int) -> None:
    blobs = [put_blob(store, save(some(seed))) for seed in range(4)]
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
    good = save(some(2, 5))
    overhead = len(save({"x": torch.zeros(len(good), dtype=torch.uint8)})) - len(good)
    bad = save({"x": torch.ones(len(good) - overhead, dtype=torch.uint8)})
    assert len(bad) == len(good)
    bad = bad if readable else bytes([1]) * len(good)

    class Twice(WritableLocalStore):
        def stream(self, digest: str, size: int, sink: Sink) -> None:
            for data in (bad, good):
                at = 0
                while at < size:
                    buffer = sink.buffer()[: size - at]
                    buffer[:] = data[at : at + len(buffer)]
                    sink.filled(at, buffer)
                    at += len(buffer)

    [tensors] = stream_weights(Twice(store.root), [Blob(sha256="0" * 64, bytes=len(good))], CPU, 1, LateLane).values()
    same(tensors, some(2, 5))


def test_loads_release_through_the_slots(store: WritableLocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: weights stream while other blobs are fetched and verified."""
    store.write_release(releases.draft(store, releases.compiled_toy()))
    cold_start = ColdStart()
    loaded = load_release(store, NAME, [cpu_target()], [], cold_start)
    x = torch.randn(2, 4, 8, 8)
    for seed, name in enumerate(BASE_COMPONENTS):
        torch.testing.assert_close(loaded.model.engines[name].run({"x": x}, 64, 64)["y"], releases.Toy(seed)(x)[0])
    assert {"resolve", "fetch", "verify", "stream", "weights", "engines"} <= cold_start.phases.keys()
    path = next(iter(store.read_release(NAME).weights[0].blobs)).sha256
    file = store.root / "blobs" / "sha256" / path
    file.write_bytes(file.read_bytes()[:-1] + b"\7")
    with pytest.raises(CorruptBlob, match=path[:12]):
        load_release(store, NAME, [cpu_target()], [], ColdStart())


def test_failing_load_stops_streaming(store: WritableLocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write_release(releases.draft(store, releases.compiled_toy()))
    monkeypatch.setattr(streaming, "MAX_THREADS", 1)
    begun, failed = threading.Event(), threading.Event()
    streamed: list[str] = []

    def stream(self: WritableLocalStore, digest: str, size: int, sink: Sink) -> None:
        begun.set()
        assert failed.wait(60)
        streamed.append(digest)

    def fetch(self: WritableLocalStore, blobs: Iterable[Blob]) -> None:
        assert begun.wait(60)
        threading.Timer(0.2, failed.set).start()  # the load waits for the running blob
        raise StoreError("The store is offline.")

    monkeypatch.setattr(WritableLocalStore, "stream", stream)
    monkeypatch.setattr(WritableLocalStore, "fetch", fetch)
    with pytest.raises(StoreError, match="offline"):
        load_release(store, NAME, [cpu_target()], [], ColdStart())
    assert len(streamed) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("preheat-weights")]


def test_shared_weights_are_streamed_once(store: WritableLocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = releases.draft(store)
    streamed: list[str] = []
    stream = WritableLocalStore.stream
    monkeypatch.setattr(
        WritableLocalStore,
        "stream",
        lambda self, digest, size, sink: (streamed.append(digest), stream(self, digest, size, sink)),
    )
    cache = WeightsCache(store, CPU)
    one = manifest.weights[0]
    other = manifest.weights[1].model_copy(update={"blobs": one.blobs})
    cache.begin([one, other], ColdStart())
    first, second = cache.load(one), cache.load(other)
    assert all(first[name] is second[name] for name in first)
    assert sorted(streamed) == sorted(blob.sha256 for blob in one.blobs)
