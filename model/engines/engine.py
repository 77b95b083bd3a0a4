"""The engine protocol, and all engines of one component behind one call. Each runtime implements it in its folder.

An engine is native code: it is opened only after its digest was checked.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from model.engines.shapes import bind_shapes
from model.errors import EngineError
from model.store.manifest import Bucket, Signature, Span


class Engine(Protocol):
    """Compiled code of one component and one bucket, with weights mapped into it."""

    component: str
    signature: Signature
    bucket: Bucket

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run named tensors on the current stream. Raises EngineError for inputs outside of signature or bucket."""


class EngineSet:
    """All loaded engines of one component.

    A batch runs in the smallest bucket that holds it, padded. If no bucket is large enough, it runs in several calls.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        """`engines`: at least one, all of one component. Raises EngineError if their signatures differ."""
        self.engines = sorted(engines, key=lambda engine: engine.bucket.batch.max)
        self.component = engines[0].component
        self.signature = engines[0].signature
        if any(engine.signature != self.signature for engine in engines):
            raise EngineError(f"The {self.component} engines differ in what they take and return.")

    def run(self, inputs: Mapping[str, torch.Tensor], height: int = 0, width: int = 0) -> dict[str, torch.Tensor]:
        """Run inputs [batch, ...] at `height` x `width` pixels (0 for a text encoder). Raises EngineError.

        Inputs are checked before they are split into calls, which would drop the last entries of a longer tensor.
        """
        batch = bind_shapes(self.signature, inputs, self.component)["rows"]
        if not batch:
            raise EngineError(f"{self.component} received an empty batch.", "")
        serving = self.serving(height, width)
        parts: list[dict[str, torch.Tensor]] = []
        done = 0
        while done < batch:
            remaining = batch - done
            engine = next((engine for engine in serving if engine.bucket.batch.max >= remaining), serving[-1])
            count = min(remaining, engine.bucket.batch.max)
            padding = _smallest_batch(engine.bucket.batch, count) - count
            part = {name: _pad(tensor[done : done + count], padding) for name, tensor in inputs.items()}
            parts.append({name: tensor[:count] for name, tensor in engine.run(part).items()})
            done += count
        if len(parts) == 1:
            return parts[0]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def max_batch(self, height: int, width: int) -> int:
        """Return the largest batch of one call at `height` x `width` pixels. Raises EngineError like `serving`."""
        return self.serving(height, width)[-1].bucket.batch.max

    def is_static(self, height: int, width: int) -> bool:
        """True if each engine for that size takes one batch size only, as a CUDA graph requires."""
        return all(engine.bucket.batch.min == engine.bucket.batch.max for engine in self.serving(height, width))

    def serving(self, height: int, width: int) -> list[Engine]:
        """Return the engines for `height` x `width` pixels, the smallest bucket first.

        Raises EngineError if no engine serves that size.
        """
        serving = self.of_size(height, width)
        if not serving:
            raise EngineError(f"No loaded {self.component} engine serves {width}x{height}.", "")
        return serving

    def of_size(self, height: int, width: int) -> list[Engine]:
        """Return the engines for that size. The list may be empty."""
        return [engine for engine in self.engines if engine.bucket.holds(engine.bucket.batch.min, height, width)]


def _smallest_batch(span: Span, needed: int) -> int:
    """Return the smallest batch of a span that has at least `needed` entries."""
    return max(span.min, -(-needed // span.multiple) * span.multiple)


def _pad(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Repeat the last entry `count` times: copies of a real input are always valid."""
    return torch.cat([tensor, tensor[-1:].expand(count, *tensor.shape[1:])]) if count else tensor
