"""One protocol, one file per runtime. An engine is native code: it is opened only after its digest was checked."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from model.errors import EngineError
from model.store.manifest import Bucket, Signature

__all__ = ["Engine", "EngineSet"]


class Engine(Protocol):
    """Compiled code of one component and one bucket, with weights mapped into it."""

    component: str
    signature: Signature
    bucket: Bucket

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Named tensors in, named tensors out, on the current stream. Raises EngineError for inputs it does not take."""


class EngineSet:
    """All loaded buckets of one component. Any number of rows runs: in the smallest bucket that holds them, padded,
    or in several calls where no bucket is large enough."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = sorted(engines, key=lambda engine: engine.bucket.rows.max)
        self.component = engines[0].component
        self.signature = engines[0].signature

    def run(self, inputs: Mapping[str, torch.Tensor], height: int = 0, width: int = 0) -> dict[str, torch.Tensor]:
        """Run inputs [rows, ...] at `height` x `width` pixels (0 for a text encoder). Raises EngineError."""
        serving = [engine for engine in self.engines if _serves(engine.bucket, height, width)]
        if not serving:
            raise EngineError(f"No loaded {self.component} engine serves {width}x{height}.")
        rows = len(next(iter(inputs.values())))
        parts: list[dict[str, torch.Tensor]] = []
        done = 0
        while done < rows:
            left = rows - done
            engine = next((engine for engine in serving if engine.bucket.rows.max >= left), serving[-1])
            taken = min(left, engine.bucket.rows.max)
            padding = max(0, engine.bucket.rows.min - taken)
            part = {name: _pad(tensor[done : done + taken], padding) for name, tensor in inputs.items()}
            parts.append({name: tensor[:taken] for name, tensor in engine.run(part).items()})
            done += taken
        if len(parts) == 1:
            return parts[0]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _serves(bucket: Bucket, height: int, width: int) -> bool:
    return bucket.holds(bucket.rows.min, height, width)


def _pad(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Repeat the last row: a static engine runs a fixed number of rows, and copies of a real row are always valid."""
    return torch.cat([tensor, tensor[-1:].expand(rows, *tensor.shape[1:])]) if rows else tensor
