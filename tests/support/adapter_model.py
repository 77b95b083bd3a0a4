"""Linear networks whose noise depends on a weight, and adapters that change the weight, in a store."""

import hashlib
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save

from engine_builder.stores.local import WritableLocalStore
from model.adapters.layers import find_layers
from model.adapters.library import AdapterLibrary
from model.adapters.merge import AdaptableWeights
from model.pipeline import spec
from model.pipeline.loaded_model import LoadedModel
from model.store.adapter_record import AdapterLayer, AdapterRecord
from model.store.manifest import Blob
from model.store.sink import Sink
from tests.support.linear_networks import Stub, linear_model
from tests.support.waiting import TIMEOUT_SECONDS

WEIGHT = "mid_block.attentions.0.proj_in.weight"
ADAPTER_BYTES = 2 * 2 * 4  # of the factors of one adapter in float32
STRENGTHS = {"a": 1.0, "b": 2.0, "c": 3.0}
"""What each adapter adds to each element of the weight, at scale 1."""


class HeldStore(WritableLocalStore):
    """A store whose blobs can be held: a read of one of them waits until it is let go."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[str] = []
        self.unpinned: list[str] = []
        self._held: dict[str, threading.Event] = {}

    def hold(self, digest: str) -> threading.Event:
        """Return an event that lets the blob go once it is set."""
        return self._held.setdefault(digest, threading.Event())

    def unpin(self, blobs: Iterable[Blob]) -> None:
        self.unpinned += [blob.sha256 for blob in blobs]

    def stream(self, digest: str, size: int, sink: Sink) -> None:
        if digest in self._held:
            assert self._held[digest].wait(TIMEOUT_SECONDS)
        try:
            super().stream(digest, size, sink)
        finally:
            self.reads.append(digest)


@dataclass
class WeightedUnet(Stub):
    """Adds the mean of a weight to the noise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weight = torch.zeros(2, 2)

    def outputs(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"noise": super().outputs(inputs)["noise"] + 0.1 * self.weight.mean()}


@dataclass
class AdapterModel:
    """`blobs`: the digest of each adapter's blob."""

    model: LoadedModel
    store: HeldStore
    library: AdapterLibrary
    blobs: dict[str, str]


def put_adapter(store: WritableLocalStore, name: str, strength: float) -> AdapterRecord:
    """Write an adapter of rank 1 that adds `strength` to each element of a weight [2, 2]."""
    layer = f"unet.{WEIGHT.removesuffix('.weight')}"
    data = save({f"{layer}.down": torch.ones(1, 2), f"{layer}.up": torch.full((2, 1), strength)})
    record = AdapterRecord(
        name=name,
        source=hashlib.sha256(name.encode()).hexdigest(),
        layers={layer: AdapterLayer(rank=1, scale=1.0, shape=(2, 2))},
        blobs=(Blob(sha256=store.put_bytes(data), bytes=len(data)),),
    )
    store.write_adapter(record)
    return record


def adapter_model(folder: Path, cache_bytes: int = 2**20) -> AdapterModel:
    """Return linear networks with the adapters a, b and c."""
    model, store = linear_model(), HeldStore(folder)
    unet = WeightedUnet(spec.UNET, model.engines[spec.UNET].signature)
    model.engines[spec.UNET].engines[:] = [unet]
    records = [put_adapter(store, name, strength) for name, strength in STRENGTHS.items()]
    layers = find_layers({"unet": {WEIGHT: (2, 2)}})
    weights = AdaptableWeights({"unet": [{WEIGHT: unet.weight}]}, layers.values())
    model.adapters = AdapterLibrary(store, records, weights, torch.device("cpu"), cache_bytes)
    return AdapterModel(model, store, model.adapters, {record.name: record.blobs[0].sha256 for record in records})
