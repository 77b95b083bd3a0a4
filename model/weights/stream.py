"""Stream blobs of weights to the device: read them into a few page-locked slots, hash them there, and copy them.

Each thread has its own lane of two slots and one CUDA stream, so it fills and hashes one slot while the other is
copied. One SHA-256 runs at about 2 GB/s and the rest is faster, so the number of threads decides the speed. Pinning
memory for all weights, and not for a few slots, would take longer than reading, hashing and copying together.

Bytes reach the device before their digest is verified, but `stream_weights` returns tensors only after all are.
"""

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import torch

from model.errors import EngineError, PreheatError
from model.store.manifest import Blob
from model.store.sink import StoppableSink, load_stopped
from model.store.store import Store
from model.weights.safetensors_header import HEADER_LIMIT, Extent, InvalidHeader, invalid_weights, read_header

SLOT_BYTES = 8 * 2**20  # a header must fit; larger slots take longer to pin and copy no faster
SLOTS = 2
MAX_THREADS = 16
_ALIGNMENT_BYTES = 256  # of each tensor on the device; compiled kernels require at least 16
_TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

Tensors = dict[str, torch.Tensor]
assert HEADER_LIMIT < SLOT_BYTES


_lane_streams: dict[int, Iterator[torch.cuda.Stream]] = {}  # by the GPU's index
_lane_streams_lock = threading.Lock()


def lane_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the next stream for copies, always of the same MAX_THREADS streams of a GPU.

    A new stream for each lane would one day be the stream that captures graphs, because torch has 32 streams, which it
    gives out in turn. A copy would then become a part of a graph.
    """
    with _lane_streams_lock:
        index = device.index or 0
        if index not in _lane_streams:
            made = [torch.cuda.Stream(device) for _ in range(MAX_THREADS)]  # type: ignore[no-untyped-call]
            _lane_streams[index] = itertools.cycle(made)
        return next(_lane_streams[index])


class CopyLane:
    """Copies one thread's bytes to the device. All CUDA calls are here; on the CPU each copy is complete on return."""

    def __init__(self, device: torch.device, slot_bytes: int = SLOT_BYTES) -> None:
        cuda = device.type == "cuda"
        self._device = device
        self._stream = lane_stream(device) if cuda else None
        self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(SLOTS)]
        self._views = [slot.numpy().data for slot in self._slots]
        self._copied = [torch.cuda.Event() if cuda else None for _ in range(SLOTS)]  # type: ignore[no-untyped-call]
        self._current = 0  # index of the slot in use

    def allocate(self, count: int) -> torch.Tensor:
        """Wait for earlier copies, then return `count` uninitialized bytes on the device."""
        self.finish()
        memory = torch.empty(count, dtype=torch.uint8, device=self._device)
        if self._stream is not None:
            # The allocator may reuse memory whose last use is still queued on the current stream.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return memory

    def free_slot(self) -> memoryview:
        """Return the next slot, after its earlier content has been copied."""
        self._current = (self._current + 1) % SLOTS
        event = self._copied[self._current]
        if event is not None:
            event.synchronize()
        return self._views[self._current]

    def copy(self, pieces: Iterable[tuple[torch.Tensor, int]]) -> None:
        """Fill each tensor (bytes on the device) from an offset of the current slot. Returns before the copy ends."""
        slot, event = self._slots[self._current], self._copied[self._current]
        with torch.cuda.stream(self._stream):  # no effect for None
            for target, at in pieces:
                target.copy_(slot[at : at + target.numel()], non_blocking=True)
        if event is not None:
            event.record(self._stream)

    def finish(self) -> None:
        """Wait for all copies."""
        if self._stream is not None:
            self._stream.synchronize()


class BlobReceiver:
    """A `Sink` (model/store) that copies one blob's tensors to the device.

    New tensors share one allocation, in which each is aligned to 256 bytes. In the file it is aligned to its item size.
    """

    def __init__(self, blob: Blob, lane: CopyLane, into: Tensors | None = None) -> None:
        """`into`: existing tensors by name, which receive the bytes; None: new ones do."""
        if not blob.bytes:  # `filled`, which reads the header, would never be called
            raise invalid_weights(blob.sha256, InvalidHeader("it has 0 bytes"))
        self._blob, self._lane, self._into = blob, lane, into
        self._problem: PreheatError | None = None
        self._extents: dict[str, Extent] = {}
        self._targets: list[tuple[Extent, torch.Tensor]] = []  # the bytes of each tensor on the device
        self._first = 0  # index in `_targets` of the first tensor that is not complete

    def buffer(self, at: int) -> memoryview:
        return self._lane.free_slot()

    def filled(self, at: int, data: memoryview) -> None:
        if at == 0:
            self._begin(data)
        end = at + len(data)
        pieces = []
        for extent, target in self._targets[self._first :]:
            if extent.start >= end:
                break
            first, stop = max(extent.start, at), min(extent.end, end)
            if first < stop:
                pieces.append((target[first - extent.start : stop - extent.start], first - at))
            self._first += extent.end <= end
        self._lane.copy(pieces)

    def _begin(self, data: memoryview) -> None:
        self._problem, self._extents, self._targets, self._first = None, {}, [], 0
        try:
            self._extents = read_header(data, self._blob.bytes)
            self._targets = [*zip(self._extents.values(), self._bytes_of_targets(), strict=True)]
        # Raised by `tensors`: the store may find this copy damaged and send another.
        except InvalidHeader as error:
            self._problem = invalid_weights(self._blob.sha256, error)
        except EngineError as error:
            self._problem = error

    def _bytes_of_targets(self) -> Iterator[torch.Tensor]:
        """Yield the memory (uint8) of each tensor of the blob."""
        if self._into is not None:
            for name, extent in self._extents.items():
                yield _bytes_of(self._into.get(name), name, extent)
            return
        sizes = [extent.end - extent.start for extent in self._extents.values()]
        offsets = accumulate((-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes), initial=0)
        *starts, total = offsets
        memory = self._lane.allocate(total)
        for start, size in zip(starts, sizes, strict=True):
            yield memory[start : start + size]

    def tensors(self) -> Tensors:
        """Return the tensors by name. Call it after the bytes were verified.

        Raises CorruptBlob for an invalid file, EngineError for tensors that do not fit `into`.
        """
        self._lane.finish()
        if self._problem is not None:
            raise self._problem
        return {
            name: tensor_view(target, extent)
            for name, (extent, target) in zip(self._extents, self._targets, strict=True)
        }


def _bytes_of(tensor: torch.Tensor | None, name: str, extent: Extent) -> torch.Tensor:
    """View a tensor as bytes. Raises EngineError unless it has the dtype and shape of `extent`."""
    if tensor is None or tuple(tensor.shape) != tuple(extent.shape) or tensor.dtype != _TORCH_DTYPES[extent.dtype]:
        has = "no such tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
        raise EngineError(
            f"Weights cannot replace those on the device: {name} is {_TORCH_DTYPES[extent.dtype]} "
            f"{list(extent.shape)}, and the device has {has}."
        )
    return tensor.flatten().view(torch.uint8)


def tensor_view(data: torch.Tensor, extent: Extent) -> torch.Tensor:
    """View a tensor's bytes (uint8) in the dtype and shape of `extent`."""
    dtype = _TORCH_DTYPES[extent.dtype]
    if not data.numel():
        return torch.empty(extent.shape, dtype=dtype, device=data.device)
    return data.view(dtype).view(extent.shape)


def tensors_in(data: bytearray, blob: Blob) -> Tensors:
    """Return the tensors of a blob's verified bytes in CPU memory as views. Raises CorruptBlob."""
    try:
        extents = read_header(memoryview(data), blob.bytes)
    except InvalidHeader as error:
        raise invalid_weights(blob.sha256, error) from error
    flat = torch.frombuffer(data, dtype=torch.uint8)
    return {name: tensor_view(flat[extent.start : extent.end], extent) for name, extent in extents.items()}


def default_threads() -> int:
    """Return the number of threads that read, hash and copy blobs when nothing else runs."""
    return min(MAX_THREADS, os.cpu_count() or 1)


def stream_weights(
    store: Store,
    blobs: Iterable[Blob],
    device: torch.device,
    threads: int | None = None,
    make_lane: Callable[[torch.device], CopyLane] = CopyLane,
    stopped: threading.Event | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    into: Mapping[str, Tensors] | None = None,
) -> dict[str, Tensors]:
    """Copy blobs to `device` and verify them. Returns the tensors of each blob by its digest.

    `into`: by digest, existing tensors that receive a blob's bytes; None: new ones do. After an error they hold a
    mixture. `threads`: None: `default_threads`. Raises CorruptBlob or StoreError of the
    first failing blob; then no new tensor stays on the device. Raises EngineError for a tensor that does not fit
    `into`. Raises Unavailable soon after `is_stopped` is true, and once the blobs that have begun are finished after
    `stopped` is set.
    """
    by_digest = {blob.sha256: blob for blob in blobs}
    waiting = deque(sorted(by_digest.values(), key=lambda blob: -blob.bytes))
    count = max(1, min(threads or default_threads(), len(waiting)))
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
                receiver = BlobReceiver(blob, lane, None if into is None else into[blob.sha256])
                store.stream(blob.sha256, blob.bytes, StoppableSink(receiver, is_stopped))
                done[blob.sha256] = receiver.tensors()
        except BaseException:
            stopped.set()
            raise
        finally:
            lane.finish()

    with ThreadPoolExecutor(count, thread_name_prefix="preheat-weights") as pool:
        tasks = [pool.submit(work) for _ in range(count)]
    for task in tasks:
        task.result()
    if done.keys() != by_digest.keys():
        raise load_stopped()
    return done
