"""The TensorRT plans of a release, each read, opened and refit once, however many engines are made of it."""

from collections.abc import Mapping, Sequence

import torch

from model.engines import components
from model.engines.tensorrt.engine import (
    TensorRTEngine,
    TensorRTPlan,
    Workspace,
)
from model.errors import CorruptBlob, EngineError
from model.store.manifest import Blob, EngineRecord
from model.store.store import Store
from model.weights.cache import tensors_in

# Which components take turns, and so share device memory: those whose work is queued on one stream (model/cuda/streams.py).
# All others read text, beside the first text encoder.
_TURNS = {
    components.TEXT_ENCODER: "first text",
    components.UNET: "denoising",
    components.REFINER_UNET: "denoising",
    components.VAE_DECODER: "decoding",
}


def turn_of(component: str) -> str:
    """The group that a component takes turns with."""
    return _TURNS.get(component, "text")


class Plans:
    """Makes TensorRT engines. Plans hold copies of the weights, so what was loaded for them alone can be let go."""

    def __init__(self, store: Store, device: torch.device) -> None:
        self._store = store
        self._device = device
        self._plans: dict[tuple[str, str], TensorRTPlan] = {}
        self._workspaces: dict[str, Workspace] = {}

    def open(self, record: EngineRecord, weights: Mapping[str, torch.Tensor]) -> TensorRTEngine:
        """The engine of a record that has TensorRT's part. Raises TensorRTUnavailable, EngineError, CorruptBlob or
        StoreError."""
        assert record.tensorrt is not None
        identity = (record.component, record.blob.sha256)
        if identity not in self._plans:
            self._plans[identity] = TensorRTPlan(
                record.component,
                self._read(record.blob),
                record.runtime_version,
                record.signature,
                self._read(record.constants),
                weights,
                self._literals(record.component, record.tensorrt.literals),
                self._device,
            )
        workspace = self._workspaces.setdefault(turn_of(record.component), Workspace(self._device))
        return TensorRTEngine(self._plans[identity], record.tensorrt.profile, record.bucket, workspace)

    def _literals(self, component: str, blob: Blob) -> dict[str, torch.Tensor]:
        try:
            return {name: tensor.to(self._device) for name, tensor in tensors_in(self._buffer(blob), blob).items()}
        except CorruptBlob as error:
            raise EngineError(f"The constants of the {component} plan cannot be used. {error}") from error

    def _read(self, blob: Blob) -> bytes:
        return bytes(self._buffer(blob))

    def _buffer(self, blob: Blob) -> bytearray:
        """A blob whole; the bytes that were checked are the bytes that are used."""
        buffer = bytearray(blob.bytes)
        self._store.read(blob.sha256, memoryview(buffer))
        return buffer


def extra_blobs(engines: Sequence[EngineRecord]) -> list[Blob]:
    """What engines read beside their code and their map of constants."""
    return [engine.tensorrt.literals for engine in engines if engine.tensorrt]


def extra_bytes(engines: Sequence[EngineRecord], weight_bytes: Mapping[str, int]) -> int:
    """Device memory of TensorRT engines beside the weights that they are refit from: each plan's own copy of them, and
    the largest workspace of those that take turns. `weight_bytes` is by component."""
    plans = {engine.component for engine in engines if engine.tensorrt}
    workspaces: dict[str, int] = {}
    for engine in engines:
        if engine.tensorrt:
            turn = turn_of(engine.component)
            workspaces[turn] = max(workspaces.get(turn, 0), engine.tensorrt.workspace_bytes)
    return sum(weight_bytes[component] for component in plans) + sum(workspaces.values())
