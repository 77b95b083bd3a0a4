"""The plans of a release. Each is read, opened and refit once, and gives one engine for each profile."""

import logging
from collections.abc import Mapping

import torch

from model.engines.tensorrt.execution import PlanError
from model.engines.tensorrt.libraries import LIBRARIES
from model.engines.tensorrt.plan_engine import TensorRTEngine, TensorRTPlan, Workspace, named_tensors
from model.engines.tensorrt.runtime_caches import RuntimeCacheFolder
from model.errors import CorruptBlob
from model.store.manifest import Blob, EngineRecord
from model.store.store import Store
from model.weights.stream import tensors_in

logger = logging.getLogger("preheat.tensorrt")


class Plans:
    """Opens engines of plans. Plans hold copies of the weights, so tensors that only they use can be freed."""

    def __init__(self, store: Store, device: torch.device, caches: RuntimeCacheFolder | None = None) -> None:
        """`caches`: the folder of kernels that are compiled on this GPU; None: they are not kept."""
        self._store = store
        self._device = device
        self._caches = caches
        self._plans: dict[tuple[str, str], TensorRTPlan] = {}
        self._workspaces: dict[str, Workspace] = {}

    def open(self, record: EngineRecord, weights: Mapping[str, torch.Tensor], stream: str) -> TensorRTEngine:
        """Open the engine of a plan's record. Engines of one `stream` never overlap, and share a workspace.

        `weights` is not read if the plan holds its weights. Raises TensorRTUnavailable, EngineError, CorruptBlob or
        StoreError.
        """
        assert record.tensorrt is not None
        key = (record.component, record.blob.sha256)
        if key not in self._plans:
            self._plans[key] = self._open_plan(record, weights)
        workspace = self._workspaces.setdefault(stream, Workspace(self._device))
        return TensorRTEngine(self._plans[key], record.tensorrt.profile, record.bucket, workspace)

    def keep_compiled_kernels(self) -> None:
        """Write the kernels that were compiled on this GPU to the folder of caches. Call it after the warm-up.

        A file is written again if this start compiled more, for example for buckets that an earlier start did not have.
        """
        if self._caches is None:
            return
        for (_, digest), plan in self._plans.items():
            if plan.runtime_cache is None:
                continue
            try:
                self._caches.write(digest, plan.runtime_cache.serialize())
            except Exception:  # the library's; the server works without the file
                logger.warning("the compiled kernels of a plan cannot be kept", exc_info=True)

    def _open_plan(self, record: EngineRecord, weights: Mapping[str, torch.Tensor]) -> TensorRTPlan:
        assert record.tensorrt is not None
        tensors = None
        if not record.holds_weights:
            literals = self._literals(record.component, record.tensorrt.literals)
            constants = bytes(self._read(record.constants))
            tensors = named_tensors(record.component, constants, weights, literals, self._device)
        return TensorRTPlan(
            LIBRARIES[record.runtime],
            record.component,
            self._read(record.blob),
            record.runtime_version,
            record.signature,
            tensors,
            self._device,
            self._caches.read(record.blob.sha256) if self._caches else b"",
        )

    def _literals(self, component: str, blob: Blob) -> dict[str, torch.Tensor]:
        try:
            return {name: tensor.to(self._device) for name, tensor in tensors_in(self._read(blob), blob).items()}
        except CorruptBlob as error:
            raise PlanError(f"The constants of the {component} plan cannot be used. {error.args[0]}") from error

    def _read(self, blob: Blob) -> bytearray:
        """Read a whole blob. The verified bytes are the bytes that are used."""
        buffer = bytearray(blob.bytes)
        self._store.read(blob.sha256, memoryview(buffer))
        return buffer
