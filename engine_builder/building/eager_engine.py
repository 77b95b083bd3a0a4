"""A PyTorch module behind the engine protocol: the reference that compiled engines are held against.

It is handed a module and imports no model library itself; nothing on the serving path uses it unasked.
"""

from collections.abc import Mapping

import torch
from torch import nn

from model.engines.components import solve
from model.store.manifest import Bucket, Signature, Span

ANY_BUCKET = Bucket(rows=Span(min=1, max=2**16))  # any size, too


class EagerEngine:
    """Runs `module(*inputs)` op by op, at any rows and size. Remembers its inputs in `seen` while `recording`."""

    overlaps = True

    def __init__(self, component: str, module: nn.Module, signature: Signature, recording: bool = False) -> None:
        self.component = component
        self.signature = signature
        self.bucket = ANY_BUCKET
        self.recording = recording
        self.seen: list[dict[str, torch.Tensor]] = []
        self._module = module

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        solve(self.signature, inputs, self.component)
        if self.recording:
            self.seen.append({name: tensor.clone() for name, tensor in inputs.items()})
        outputs = self._module(*(inputs[spec.name] for spec in self.signature.inputs))
        return {spec.name: tensor for spec, tensor in zip(self.signature.outputs, outputs, strict=True)}
