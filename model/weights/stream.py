"""Blobs of weights -> device memory: read into a few page-locked slots, hashed there, copied from there.

Each thread has a lane of its own: two slots and one stream, so that one slot is filled and hashed while the other is on
its way. One SHA-256 runs at about 2 GB/s and the rest is faster, so it is the number of threads that counts. Pinning
all of the weights instead of a few slots would take longer than everything else here together.

Bytes reach the device before their digest is known to be right; no tensor leaves `stream_weights` before all are.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from model.store.manifest import Blob
from model.store.store import Store
from model.weights.safetensors_header import (
    HEADER_LIMIT,
    BadHeader,
    Extent,
    damaged,
    read_header,
    refuse_empty,
)

SLOT_BYTES = 8 * 2**20  # a header must fit; larger ones take longer to pin and copy no faster
SLOTS = 2
MOST_THREADS = 16
_ALIGNMENT = 256  # bytes, of each tensor on the device; compiled kernels count on at least 16
_TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

Tensors = dict[str, torch.Tensor]
assert HEADER_LIMIT < SLOT_BYTES


class Lane:
    """One thread's way to the device. All that is CUDA's is in here; on the CPU a copy is done when it returns."""

    def __init__(self, device: torch.device, slot_bytes: int = SLOT_BYTES) -> None:
        cuda = device.type == "cuda"
        self._device = device
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(SLOTS)]
        self._views = [slot.numpy().data for slot in self._slots]
        self._copied = [torch.cuda.Event() if cuda else None for _ in range(SLOTS)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def allocate(self, count: int) -> torch.Tensor:
        """Bytes on the device, to be copied to. What was under way before is done first."""
        self.finish()
        memory = torch.empty(count, dtype=torch.uint8, device=self._device)
        if self._stream is not None:
            # The allocator may give memory back whose last use is queued on the current stream.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return memory

    def free_slot(self) -> memoryview:
        """The next slot, once what was in it has been copied."""
        self._turn = (self._turn + 1) % SLOTS
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        return self._views[self._turn]

    def copy(self, pieces: Iterable[tuple[torch.Tensor, int]]) -> None:
        """Copy from the current slot: to each tensor (bytes on the device) as many as it holds, from a place on."""
        slot, event = self._slots[self._turn], self._copied[self._turn]
        with torch.cuda.stream(self._stream):  # of None: nothing
            for target, at in pieces:
                target.copy_(slot[at : at + target.numel()], non_blocking=True)
        if event is not None:
            event.record(self._stream)

    def finish(self) -> None:
        """Return once all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()


class BlobOnItsWay:
    """A `Sink` (model/store): takes one blob's bytes in order and puts its tensors on the device.

    They lie in one piece of device memory, each at a multiple of 256 bytes (in the file it is 8).
    """

    def __init__(self, blob: Blob, lane: Lane) -> None:
        refuse_empty(blob)
        self._blob, self._lane = blob, lane
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._bad: BadHeader | None = None
        self._extents: dict[str, Extent] = {}
        self._places: list[tuple[Extent, int]] = []
        self._first = 0  # of the places that are not filled yet

    def buffer(self) -> memoryview:
        return self._lane.free_slot()

    def filled(self, at: int, data: memoryview) -> None:
        if at == 0:
            self._begin(data)
        end = at + len(data)
        pieces = []
        for extent, place in self._places[self._first :]:
            if extent.start >= end:
                break
            first, last = max(extent.start, at), min(extent.end, end)
            if first < last:
                begin = place + first - extent.start
                pieces.append((self._memory[begin : begin + last - first], first - at))
            self._first += extent.end <= end
        self._lane.copy(pieces)

    def _begin(self, data: memoryview) -> None:
        self._bad, self._extents = None, {}
        try:
            self._extents = read_header(data, self._blob.bytes)
        except BadHeader as error:  # which may be this copy's alone: the store looks at the digest, and comes again
            self._bad = error
        self._places, self._first, total = [], 0, 0
        for extent in self._extents.values():
            self._places.append((extent, total))
            total += -(-(extent.end - extent.start) // _ALIGNMENT) * _ALIGNMENT
        self._memory = self._lane.allocate(total)

    def tensors(self) -> Tensors:
        """By name, once all bytes have been taken and their digest was right. Raises CorruptBlob for no weights."""
        self._lane.finish()
        if self._bad is not None:
            raise damaged(self._blob.sha256, self._bad) from self._bad
        return {
            name: view(self._memory[place : place + extent.end - extent.start], extent)
            for (name, extent), (_, place) in zip(self._extents.items(), self._places, strict=True)
        }


def view(data: torch.Tensor, extent: Extent) -> torch.Tensor:
    """A tensor's bytes as what they are."""
    dtype = _TORCH_DTYPES[extent.dtype]
    if not data.numel():
        return torch.empty(extent.shape, dtype=dtype, device=data.device)
    return data.view(dtype).view(extent.shape)


def stream_weights(
    store: Store,
    blobs: Iterable[Blob],
    device: torch.device,
    threads: int | None = None,
    make_lane: Callable[[torch.device], Lane] = Lane,
    stopped: threading.Event | None = None,
) -> dict[str, Tensors]:
    """The tensors of each blob by its digest, on `device`, every digest checked. Once `stopped` is set no further blob
    is begun, and those that were not are missing.

    Raises CorruptBlob or StoreError, of the first blob that fails; then nothing stays on the device.
    """
    waiting = deque(sorted({blob.sha256: blob for blob in blobs}.values(), key=lambda blob: -blob.bytes))
    count = max(1, min(threads or min(MOST_THREADS, os.cpu_count() or 1), len(waiting)))
    stopped = stopped or threading.Event()
    done: dict[str, Tensors] = {}

    def work() -> None:
        lane = make_lane(device)
        try:
            while not stopped.is_set():
                try:
                    blob = waiting.popleft()
                except IndexError:
                    return
                sink = BlobOnItsWay(blob, lane)
                store.stream(blob.sha256, blob.bytes, sink)
                done[blob.sha256] = sink.tensors()
        except BaseException:
            stopped.set()
            raise
        finally:
            lane.finish()

    with ThreadPoolExecutor(count, thread_name_prefix="preheat-weights") as pool:
        tasks = [pool.submit(work) for _ in range(count)]
    for task in tasks:
        task.result()
    return done
