"""Engines compiled by AOTInductor (`.pt2`), opened through the C++ loader.

The public Python loader is not used: it compiles and runs probe programs to learn this machine's CPU, which takes up
to a minute, and importing its wrapper takes seconds. The target was checked before an engine comes here.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from model.components import DTYPES, dtype_name, solve
from model.errors import EngineError
from model.store.manifest import Bucket, Signature


class AotInductorEngine:
    """One `.pt2` package without weights. `weights` are aliased, never copied, and must outlive the engine."""

    def __init__(
        self,
        component: str,
        path: Path,
        signature: Signature,
        bucket: Bucket,
        constants: bytes,
        weights: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        """`constants` is the JSON of the engine record's constants blob. Raises EngineError where anything disagrees."""
        self.component = component
        self.signature = signature
        self.bucket = bucket
        mapped = _map_constants(component, constants, weights)
        index = (device.index or 0) if device.type == "cuda" else -1
        # One runner, single-threaded: a lock of its own and the only mode that a CUDA graph can capture.
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, index)
        if set(loader.get_constant_fqns()) != set(mapped):
            raise EngineError(
                f"The {component} engine and its constant map disagree: build it again (`preheat build`)."
            )
        # A call before constants are loaded, or with some missing, would be a segmentation fault.
        loader.load_constants(mapped, False, True, True)
        self._loader = loader
        self._weights = mapped

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sizes = solve(self.signature, inputs, self.component)
        rows, height, width = sizes["rows"], sizes.get("height", 0), sizes.get("width", 0)
        if not self.bucket.holds(rows, height, width):
            raise EngineError(f"The {self.component} engine has no bucket for {rows} rows at {width}x{height}.")
        # Kernels were compiled for contiguous inputs and do not look at strides.
        flat = [inputs[spec.name].contiguous() for spec in self.signature.inputs]
        outputs = self._loader.run(flat)
        return {spec.name: tensor for spec, tensor in zip(self.signature.outputs, outputs, strict=True)}


def _map_constants(component: str, constants: bytes, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Constant of the compiled code -> tensor, with every name, shape and dtype checked (the loader checks none)."""
    mapped: dict[str, torch.Tensor] = {}
    for constant, expected in json.loads(constants).items():
        tensor = weights.get(expected["tensor"])
        if tensor is None:
            raise EngineError(f"The weights of {component} lack {expected['tensor']}: build the release again.")
        if list(tensor.shape) != expected["shape"] or tensor.dtype != DTYPES.get(expected["dtype"]):
            raise EngineError(
                f"The weights of {component} do not fit its engine: {expected['tensor']} is {dtype_name(tensor.dtype)} "
                f"{list(tensor.shape)}, expected {expected['dtype']} {expected['shape']}. Build the release again."
            )
        mapped[constant] = tensor
    return mapped
