"""The TensorRT plans of a release. Each is read, opened and refit once, and gives one engine for each profile."""

from collections.abc import Mapping

import torch

from model.engines.tensorrt.engine import PlanError, TensorRTEngine, TensorRTPlan, Workspace
from model.errors import CorruptBlob
from model.store.manifest import Blob, EngineRecord
from model.store.store import Store
from model.weights.stream import tensors_in


class Plans:
    """Opens TensorRT engines. Plans hold copies of the weights, so tensors that only they use can be freed."""

    def __init__(self, store: Store, device: torch.device) -> None:
        self._store = store
        self._device = device
        self._plans: dict[tuple[str, str], TensorRTPlan] = {}
        self._workspaces: dict[str, Workspace] = {}

    def open(self, record: EngineRecord, weights: Mapping[str, torch.Tensor], stream: str) -> TensorRTEngine:
        """Open the engine of a TensorRT record. Engines of one `stream` never overlap, and share a workspace.

        Raises TensorRTUnavailable, EngineError, CorruptBlob or StoreError.
        """
        assert record.tensorrt is not None
        key = (record.component, record.blob.sha256)
        if key not in self._plans:
            self._plans[key] = TensorRTPlan(
                record.component,
                self._read(record.blob),
                record.runtime_version,
                record.signature,
                self._read(record.constants),
                weights,
                self._literals(record.component, record.tensorrt.literals),
                self._device,
            )
        workspace = self._workspaces.setdefault(stream, Workspace(self._device))
        return TensorRTEngine(self._plans[key], record.tensorrt.profile, record.bucket, workspace)

    def _literals(self, component: str, blob: Blob) -> dict[str, torch.Tensor]:
        try:
            return {name: tensor.to(self._device) for name, tensor in tensors_in(self._buffer(blob), blob).items()}
        except CorruptBlob as error:
            raise PlanError(f"The constants of the {component} plan cannot be used. {error.args[0]}") from error

    def _read(self, blob: Blob) -> bytes:
        return bytes(self._buffer(blob))

    def _buffer(self, blob: Blob) -> bytearray:
        """Read a whole blob. The verified bytes are the bytes that are used."""
        buffer = bytearray(blob.bytes)
        self._store.read(blob.sha256, memoryview(buffer))
        return buffer
