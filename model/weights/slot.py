"""The weights of a release at fixed addresses on the device, which another release's may replace in place.

Engines and CUDA graphs read weights at fixed addresses, so other weights need no new engine and no new capture.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from model.errors import EngineError
from model.store.manifest import WeightsKey, WeightsRecord
from model.store.store import Store
from model.weights.stream import Tensors, default_threads, stream_weights


@dataclass(frozen=True, eq=False)
class WeightSlot:
    """tensors: as stored, by the weights' key and by name. fixed: by digest, those that all releases have in common."""

    tensors: Mapping[WeightsKey, Tensors]
    fixed: Mapping[str, Tensors]

    def fill(
        self,
        store: Store,
        records: Iterable[WeightsRecord],
        device: torch.device,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Replace the weights by `records`, all that a release has. Nothing may use the slot meanwhile.

        After an error it holds a mixture. Raises EngineError for tensors of other names, shapes or dtypes, CorruptBlob
        or StoreError, and Unavailable soon after `is_stopped` is true.
        """
        records = list({record.key: record for record in records}.values())
        own = {
            blob.sha256: (blob, self.tensors[record.key])
            for record in records
            for blob in record.blobs
            if blob.sha256 not in self.fixed
        }
        into = {digest: tensors for digest, (_, tensors) in own.items()}
        blobs = [blob for blob, _ in own.values()]
        threads = max(1, default_threads() // 2)  # other releases generate meanwhile, and need cores
        filled = stream_weights(store, blobs, device, threads, is_stopped=is_stopped, into=into)
        for record in records:
            names = {name for blob in record.blobs for name in {**filled, **self.fixed}[blob.sha256]}
            if missing := sorted(self.tensors[record.key].keys() - names):
                raise EngineError(f"The weights of {record.component} lack {missing[0]}.")
