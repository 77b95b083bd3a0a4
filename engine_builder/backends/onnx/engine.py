"""An ONNX graph behind the engine protocol, run by ONNX Runtime on the CPU: the check of what is exported.

It is no way to serve: no precision below fp32 is computed as such here (fp16 is rounded between operators).
"""

from collections.abc import Mapping
from typing import Any

import onnxruntime  # type: ignore[import-untyped]
import torch

from engine_builder.backends.onnx.export import OnnxGraph
from engine_builder.building.eager_engine import ANY_BUCKET
from model.engines.components import solve
from model.errors import EngineError
from model.store.manifest import Signature


class OnnxEngine:
    """Runs a graph without weights on `weights`, which are mapped and not copied, as an engine's are."""

    overlaps = True

    def __init__(
        self, component: str, graph: OnnxGraph, signature: Signature, weights: Mapping[str, torch.Tensor]
    ) -> None:
        """Raises EngineError where the weights are not those the graph names."""
        self.component = component
        self.signature = signature
        self.bucket = ANY_BUCKET
        names, values = [], []
        for name, constant in graph.constants.items():
            tensor = weights.get(constant["tensor"])
            if tensor is None or list(tensor.shape) != constant["shape"]:
                raise EngineError(f"The weights of {component} lack {constant['tensor']} as its ONNX graph has it.")
            names.append(name)
            values.append(onnxruntime.OrtValue.ortvalue_from_numpy(tensor.detach().cpu().contiguous().numpy()))
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.add_external_initializers(names, values)
        self._weights = values  # the session reads them for as long as it lives
        self._session: Any = onnxruntime.InferenceSession(graph.model, options, providers=["CPUExecutionProvider"])

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        solve(self.signature, inputs, self.component)
        outputs = self._session.run(None, {name: tensor.cpu().numpy() for name, tensor in inputs.items()})
        return {
            spec.name: torch.from_numpy(output) for spec, output in zip(self.signature.outputs, outputs, strict=True)
        }
