"""Blobs of weights -> tensors on the device, one copy of each for all engines and components that name it.

On the CPU, tensors are views of mapped, verified files. To a GPU they are streamed (model/weights/stream.py).
"""

import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Self

import torch

from model.cold_start import ColdStart
from model.errors import CorruptBlob
from model.store.manifest import WeightsRecord
from model.store.store import Store
from model.weights.mapped import map_file
from model.weights.stream import Tensors, stream_weights

_HASHING_THREADS = 8


class WeightsCache:
    """Holds the loaded tensors by the digests of their blobs, so equal weights are loaded once.

    Use it in a `with` statement. If an error leaves that statement, streaming stops before it ends, so that the next
    load finds the device's memory free.
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
        """Start streaming all weights of `records` to the device in the background; `load` waits for them.

        Returns False on the CPU, where blobs are mapped and must be fetched first.
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
        """Return the tensors of a component by name. Raises CorruptBlob or StoreError."""
        if record.identity not in self._loaded:
            tensors: Tensors = {}
            for blob_tensors in self._blobs(record):
                if repeated := tensors.keys() & blob_tensors.keys():
                    raise CorruptBlob(f"The weights of {record.component} have {min(repeated)} in two blobs.")
                tensors |= blob_tensors
            self._loaded[record.identity] = tensors
        return self._loaded[record.identity]

    def _blobs(self, record: WeightsRecord) -> list[Tensors]:
        if copies_to(self._device):
            streaming = self._streaming
            streamed = streaming.result() if streaming else stream_weights(self._store, record.blobs, self._device)
            return [streamed[blob.sha256] for blob in record.blobs]
        # Hashing releases the interpreter lock, so blobs are verified in parallel.
        with ThreadPoolExecutor(_HASHING_THREADS) as pool:
            paths = list(pool.map(lambda blob: self._store.get(blob.sha256, blob.bytes), record.blobs))
        return [map_file(path, blob) for path, blob in zip(paths, record.blobs, strict=True)]

    @property
    def bytes(self) -> int:
        """Bytes of all loaded tensors."""
        return sum(t.nbytes for tensors in self._loaded.values() for t in tensors.values())


def copies_to(device: torch.device) -> bool:
    """True if weights must be copied to the device; on the CPU they are mapped."""
    return device.type != "cpu"
