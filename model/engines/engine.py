"""One protocol, one file per runtime. An engine is native code: it is opened only after its digest was checked."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from model.engines.components import solve
from model.errors import EngineError
from model.store.manifest import Bucket, Signature, Span

__all__ = ["Engine", "EngineSet"]


class Engine(Protocol):
    """Compiled code of one component and one bucket, with weights mapped into it."""

    component: str
    signature: Signature
    bucket: Bucket
    overlaps: bool
    """Whether two of its runs, or one of its and one of its component's other engines, may be under way at once, on
    streams beside each other. Not where they work in memory that they share."""

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Named tensors in and out, on the current stream. Raises EngineError for inputs it does not take."""


class EngineSet:
    """All loaded buckets of one component. Any number of rows runs: in the smallest bucket that holds them, padded,
    or in several calls where no bucket is large enough."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        """`engines`: at least one, all of one component. Raises EngineError where they do not take the same inputs."""
        self.engines = sorted(engines, key=lambda engine: engine.bucket.rows.max)
        self.component = engines[0].component
        self.signature = engines[0].signature
        if any(engine.signature != self.signature for engine in engines):
            raise EngineError(
                f"The {self.component} engines differ in what they take and give: build them again with one version "
                "(`preheat build`)."
            )

    def run(self, inputs: Mapping[str, torch.Tensor], height: int = 0, width: int = 0) -> dict[str, torch.Tensor]:
        """Run inputs [rows, ...] at `height` x `width` pixels (0 for a text encoder). Raises EngineError.

        Inputs are checked here as a whole: cut into calls, a tensor with too many rows would lose the last ones.
        """
        rows = solve(self.signature, inputs, self.component)["rows"]
        if not rows:
            raise EngineError(f"{self.component} was given no rows.")
        serving = self.serving(height, width)
        parts: list[dict[str, torch.Tensor]] = []
        done = 0
        while done < rows:
            left = rows - done
            engine = next((engine for engine in serving if engine.bucket.rows.max >= left), serving[-1])
            taken = min(left, engine.bucket.rows.max)
            padding = _rows_run(engine.bucket.rows, taken) - taken
            part = {name: _pad(tensor[done : done + taken], padding) for name, tensor in inputs.items()}
            parts.append({name: tensor[:taken] for name, tensor in engine.run(part).items()})
            done += taken
        if len(parts) == 1:
            return parts[0]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def most_rows(self, height: int, width: int) -> int:
        """The most rows of one call at `height` x `width` pixels. Raises EngineError where no engine serves them."""
        return self.serving(height, width)[-1].bucket.rows.max

    def is_static(self, height: int, width: int) -> bool:
        """Whether each engine for that size takes one number of rows only, as a CUDA graph needs it."""
        return all(engine.bucket.rows.min == engine.bucket.rows.max for engine in self.serving(height, width))

    def serving(self, height: int, width: int) -> list[Engine]:
        """The engines for `height` x `width` pixels, the smallest bucket first. Raises EngineError for none."""
        serving = self.of_size(height, width)
        if not serving:
            raise EngineError(f"No loaded {self.component} engine serves {width}x{height}.")
        return serving

    def of_size(self, height: int, width: int) -> list[Engine]:
        """As `serving`, and none where there is none."""
        return [engine for engine in self.engines if _serves(engine.bucket, height, width)]


def _serves(bucket: Bucket, height: int, width: int) -> bool:
    return bucket.holds(bucket.rows.min, height, width)


def _rows_run(span: Span, rows: int) -> int:
    """The fewest rows that an engine runs which are at least `rows`."""
    return max(span.min, -(-rows // span.multiple) * span.multiple)


def _pad(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Repeat the last row: a static engine runs a fixed number of rows, and copies of a real row are always valid."""
    return torch.cat([tensor, tensor[-1:].expand(rows, *tensor.shape[1:])]) if rows else tensor
