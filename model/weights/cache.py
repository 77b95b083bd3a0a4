"""Blobs of weights -> tensors on the device, one copy of each however many engines or components name it.

On the CPU tensors are views of the mapped, verified files; to a GPU they are streamed (model/weights/stream.py).
"""

import mmap
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Self

import torch

from model.cold_start import ColdStart
from model.errors import CorruptBlob, StoreError
from model.store.manifest import Blob, WeightsRecord
from model.store.store import Store
from model.weights.safetensors_header import (
    BadHeader,
    damaged,
    read_header,
    refuse_empty,
)
from model.weights.stream import (
    Tensors,
    stream_weights,
    view,
)


class WeightsCache:
    """Holds what was loaded, by the digests of its blobs: equal weights are mapped once.

    Used in a `with`: where that is left by an error, what `begin` began is stopped and waited for, so that who
    loads again finds the device free.
    """

    def __init__(self, store: Store, device: torch.device) -> None:
        self._store = store
        self._device = device
        self._streaming: Future[dict[str, Tensors]] | None = None
        self._loaded: dict[tuple[str, ...], Tensors] = {}
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._streaming is not None:
            self._stopped.set()
            wait([self._streaming])
            self._streaming = None

    def begin(self, records: Iterable[WeightsRecord], cold_start: ColdStart) -> bool:
        """Start to stream all that these name to the device, beside what the caller does next; `load` waits for it.

        False on the CPU, where nothing is to be copied and the blobs must be fetched first.
        """
        if not copies_to(self._device):
            return False
        blobs = [blob for record in records for blob in record.blobs]

        def stream() -> dict[str, Tensors]:
            with cold_start.phase("stream"):
                return stream_weights(self._store, blobs, self._device, stopped=self._stopped)

        pool = ThreadPoolExecutor(1, thread_name_prefix="preheat-stream")
        self._streaming = pool.submit(stream)
        pool.shutdown(wait=False)
        return True

    def load(self, record: WeightsRecord) -> Tensors:
        """Tensors by name. Raises CorruptBlob or StoreError."""
        if record.identity not in self._loaded:
            tensors: Tensors = {}
            for read in self._blobs(record):
                if twice := tensors.keys() & read.keys():
                    raise CorruptBlob(
                        f"The weights of {record.component} have {min(twice)} in two blobs: build and publish the "
                        "release again (`preheat build`, `preheat publish`)."
                    )
                tensors |= read
            self._loaded[record.identity] = tensors
        return self._loaded[record.identity]

    def _blobs(self, record: WeightsRecord) -> list[Tensors]:
        if copies_to(self._device):
            streaming = self._streaming
            streamed = streaming.result() if streaming else stream_weights(self._store, record.blobs, self._device)
            return [streamed[blob.sha256] for blob in record.blobs]
        # Hashing releases the interpreter lock, so blobs are verified side by side.
        with ThreadPoolExecutor(max_workers=8) as pool:
            paths = list(pool.map(lambda blob: self._store.get(blob.sha256, blob.bytes), record.blobs))
        return [map_file(path, blob) for path, blob in zip(paths, record.blobs, strict=True)]

    @property
    def bytes(self) -> int:
        """Bytes of all tensors held."""
        return sum(t.nbytes for tensors in self._loaded.values() for t in tensors.values())


def copies_to(device: torch.device) -> bool:
    """Whether weights must be copied to get there, and so need not be mapped."""
    return device.type != "cpu"


def map_file(path: Path, blob: Blob) -> Tensors:
    """The tensors of a verified file, as views of it. Raises CorruptBlob or StoreError."""
    refuse_empty(blob)
    try:
        with path.open("rb") as file:
            # Private, so that nobody can change the file through a tensor.
            mapped = mmap.mmap(file.fileno(), blob.bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise StoreError(
            f"Blob {path.name[:12]} cannot be mapped ({error}): start again, and look at the disk if it stays so."
        ) from error
    return tensors_in(mapped, blob)


def tensors_in(held: mmap.mmap | bytearray, blob: Blob) -> Tensors:
    """The tensors of a blob's verified bytes, as views of them. Raises CorruptBlob."""
    refuse_empty(blob)
    try:
        extents = read_header(memoryview(held), blob.bytes)
    except BadHeader as error:
        raise damaged(blob.sha256, error) from error
    data = torch.frombuffer(held, dtype=torch.uint8)
    return {name: view(data[extent.start : extent.end], extent) for name, extent in extents.items()}
