"""Run a PyTorch module as an engine. This module imports no model library, and the server does not use it."""

from collections.abc import Mapping

import torch
from torch import nn

from model.engines.shapes import bind_shapes
from model.store.manifest import Bucket, Signature, Span

ANY_BUCKET = Bucket(batch=Span(min=1, max=2**16))  # of any height and width


class EagerEngine:
    """Runs `module(*inputs)` for any batch and size. While `recording`, copies all inputs to `recorded_inputs`."""

    def __init__(self, component: str, module: nn.Module, signature: Signature, recording: bool = False) -> None:
        self.component = component
        self.signature = signature
        self.bucket = ANY_BUCKET
        self.recording = recording
        self.recorded_inputs: list[dict[str, torch.Tensor]] = []
        self._module = module

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        bind_shapes(self.signature, inputs, self.component)
        if self.recording:
            self.recorded_inputs.append({name: tensor.clone() for name, tensor in inputs.items()})
        outputs = self._module(*(inputs[spec.name] for spec in self.signature.inputs))
        return {spec.name: tensor for spec, tensor in zip(self.signature.outputs, outputs, strict=True)}
