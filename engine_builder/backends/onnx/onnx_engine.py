"""Run an ONNX graph as an engine, in ONNX Runtime on the CPU. Exported graphs are checked with it.

Not for serving: ONNX Runtime computes fp16 in fp32 and rounds between operators.
"""

from collections.abc import Mapping
from typing import Any

import onnxruntime  # type: ignore[import-untyped]
import torch
from onnx import TensorProto

from engine_builder.backends.onnx.export_graph import OnnxGraph
from engine_builder.building.eager_engine import ANY_BUCKET
from model.engines.shapes import bind_shapes
from model.errors import EngineError
from model.store.manifest import Signature


class OnnxEngine:
    """An engine of a graph. Its weights are mapped into the graph without a copy."""

    def __init__(
        self, component: str, graph: OnnxGraph, signature: Signature, weights: Mapping[str, torch.Tensor]
    ) -> None:
        """Raises EngineError if the weights are not those that the graph names."""
        self.component = component
        self.signature = signature
        self.bucket = ANY_BUCKET
        names, values = [], []
        for name, constant in graph.constants.items():
            tensor = weights.get(constant["tensor"])
            if tensor is None or list(tensor.shape) != constant["shape"]:
                raise EngineError(
                    f"The weights of {component} lack {constant['tensor']}, or its shape differs from the ONNX graph's."
                )
            names.append(name)
            values.append(_ort_value(tensor.detach().cpu().contiguous()))
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        # The optimizer makes a product of integers of every quantized product, also of one in E4M3, and then fails.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        options.add_external_initializers(names, values)
        self._weights = values  # the session reads them during its whole life
        self._session: Any = onnxruntime.InferenceSession(graph.model, options, providers=["CPUExecutionProvider"])

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        bind_shapes(self.signature, inputs, self.component)
        outputs = self._session.run(None, {name: tensor.cpu().numpy() for name, tensor in inputs.items()})
        return {
            spec.name: torch.from_numpy(output) for spec, output in zip(self.signature.outputs, outputs, strict=True)
        }


def _ort_value(tensor: torch.Tensor) -> Any:
    """Return a tensor for ONNX Runtime. NumPy has no E4M3."""
    value = onnxruntime.OrtValue
    if tensor.dtype != torch.float8_e4m3fn:
        return value.ortvalue_from_numpy(tensor.numpy())
    return value.ortvalue_from_numpy_with_onnx_type(tensor.view(torch.uint8).numpy(), TensorProto.FLOAT8E4M3FN)
