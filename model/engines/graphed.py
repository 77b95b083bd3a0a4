"""An engine of one static bucket on a GPU, replayed as a CUDA graph."""

from collections.abc import Callable, Mapping

import torch

from model.cold_start import warm_up_part
from model.cuda import graphs
from model.engines.engine import Engine

Work = Callable[[], None]


def _capture(work: Work, name: str) -> Work:
    return graphs.capture(work, name=name)


class GraphedEngine:
    """Captures the engine at its first run, for the stream that is current then."""

    def __init__(self, engine: Engine, capture: Callable[[Work, str], Work] = _capture) -> None:
        """`capture` makes the graph of some work, given a name for it; see `model.cuda.graphs.capture`."""
        self.component = engine.component
        self.signature = engine.signature
        self.bucket = engine.bucket
        self._engine = engine
        self._capture = capture
        self._inputs: dict[str, torch.Tensor] = {}
        self._outputs: dict[str, torch.Tensor] = {}
        self._replay: Work | None = None

    @torch.inference_mode()
    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Like the engine's own `run`; the caller owns the returned tensors."""
        if self._replay is None:
            self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
            part = f"{self.component}_{self.bucket.batch.max}"
            with warm_up_part(f"{part}_first_run"):  # which checks the inputs
                results = {name: tensor.clone() for name, tensor in self._engine.run(self._inputs).items()}
            self._outputs = {name: torch.empty_like(tensor) for name, tensor in results.items()}
            self._replay = self._capture(self._run_into_buffers, part)
            return results
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor)
        self._replay()
        return {name: tensor.clone() for name, tensor in self._outputs.items()}

    def _run_into_buffers(self) -> None:
        for name, tensor in self._engine.run(self._inputs).items():
            self._outputs[name].copy_(tensor)
