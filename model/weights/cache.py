"""Blobs of weights -> tensors on the device, one copy of each for all engines and components that name it.

They are streamed (model/weights/stream.py), on the CPU too: the verified bytes are the bytes that are used. Files are
not mapped, so a file that changes or shrinks after the load cannot harm the server.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Self

import torch

from model.cold_start import ColdStart
from model.errors import CorruptBlob
from model.store.manifest import WeightsRecord
from model.store.store import Store
from model.weights.stream import Tensors, stream_weights


class WeightsCache:
    """Holds the loaded tensors by the digests of their blobs, so equal weights are loaded once.

    Use it in a `with` statement. If an error leaves the statement, streaming is stopped first, so that the device's
    memory is free for the next load.
    """

    def __init__(
        self,
        store: Store,
        device: torch.device,
        shared: Mapping[str, Tensors] | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """`shared`: by digest, tensors that were loaded before. `is_stopped`: see `stream_weights`."""
        self._store = store
        self._device = device
        self._earlier = shared or {}
        self.tensors: dict[str, Tensors] = dict(self._earlier)
        """By digest."""
        self._streaming: Future[dict[str, Tensors]] | None = None
        self._loaded: dict[tuple[str, ...], Tensors] = {}
        self._is_stopped = is_stopped
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._streaming is not None:
            self._stopped.set()
            wait([self._streaming])
            self._streaming = None

    def begin(self, records: Iterable[WeightsRecord], cold_start: ColdStart) -> None:
        """Start streaming all weights of `records` to the device in the background; `load` waits for them."""
        blobs = [blob for record in records for blob in record.blobs if blob.sha256 not in self.tensors]

        def stream() -> dict[str, Tensors]:
            with cold_start.phase("stream"):
                return stream_weights(
                    self._store, blobs, self._device, stopped=self._stopped, is_stopped=self._is_stopped
                )

        pool = ThreadPoolExecutor(1, thread_name_prefix="preheat-stream")
        self._streaming = pool.submit(stream)
        pool.shutdown(wait=False)

    def load(self, record: WeightsRecord) -> Tensors:
        """Return the tensors of a component by name. Raises CorruptBlob or StoreError."""
        if record.identity not in self._loaded:
            tensors: Tensors = {}
            for blob_tensors in self._tensors_by_blob(record):
                if repeated := tensors.keys() & blob_tensors.keys():
                    raise CorruptBlob(f"The weights of {record.component} have {min(repeated)} in two blobs.")
                tensors |= blob_tensors
            self._loaded[record.identity] = tensors
        return self._loaded[record.identity]

    def _tensors_by_blob(self, record: WeightsRecord) -> list[Tensors]:
        streaming = self._streaming
        if streaming is not None:
            self.tensors |= streaming.result()
        if missing := [blob for blob in record.blobs if blob.sha256 not in self.tensors]:
            self.tensors |= stream_weights(self._store, missing, self._device)
        return [self.tensors[blob.sha256] for blob in record.blobs]

    @property
    def bytes(self) -> int:
        """Bytes of the tensors that this cache has loaded."""
        own = [tensors for digest, tensors in self.tensors.items() if digest not in self._earlier]
        return sum(tensor.nbytes for tensors in own for tensor in tensors.values())
