"""CUDA graphs: what runs often at one shape is captured once and then started by one call.

All graphs draw their memory from one pool, so components that never run together share it. That is sound because they
run one after the other on one stream and nothing but buffers of their callers outlives a replay.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from model.engines import Engine

_WARM_UPS = 2  # kernels load at their first call, which a capture does not allow


@cache
def _pool() -> Any:
    return torch.cuda.graph_pool_handle()


def capture(work: Callable[[], None]) -> Callable[[], None]:
    """`work` as a graph: calling the result replays it on the current stream. `work` runs three times on the way."""
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the device meanwhile: they encode images and answer requests.
    with torch.cuda.graph(graph, pool=_pool(), stream=stream, capture_error_mode="thread_local"):
        work()
    replay: Callable[[], None] = graph.replay
    return replay


class GraphedEngine:
    """An engine of one static bucket on a GPU, behind a graph that is captured at its first run."""

    def __init__(self, engine: Engine) -> None:
        self.component = engine.component
        self.signature = engine.signature
        self.bucket = engine.bucket
        self._engine = engine
        self._inputs: dict[str, torch.Tensor] = {}
        self._outputs: dict[str, torch.Tensor] = {}
        self._replay: Callable[[], None] | None = None

    @torch.inference_mode()
    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As the engine's own; what is returned is the caller's."""
        if self._replay is None:
            self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
            results = {name: tensor.clone() for name, tensor in self._engine.run(self._inputs).items()}  # checks them
            self._outputs = {name: torch.empty_like(tensor) for name, tensor in results.items()}
            self._replay = capture(self._work)
            return results
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor)
        self._replay()
        return {name: tensor.clone() for name, tensor in self._outputs.items()}

    def _work(self) -> None:
        for name, tensor in self._engine.run(self._inputs).items():
            self._outputs[name].copy_(tensor)
