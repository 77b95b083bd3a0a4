"""CUDA graphs: what runs often at one shape is captured once and then started by one call.

A graph belongs to the stream that was current when it was captured and is replayed on that one only. All graphs of a
stream draw their memory from one pool and share the workspaces of the libraries they call, so components that never run
together need not have their own. That is sound because they run one after the other and nothing but buffers of their
callers outlives a replay. Graphs of different streams, which may run at the same time, share neither: each stream has a
pool, and one stream to capture on, by which both the allocator and the libraries tell memory apart. It has a second of
both for graphs that are captured without a workspace.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch

from model.engines.engine import Engine

Result = TypeVar("Result")

_WARM_UPS = 2  # kernels load at their first call, which a capture does not allow
_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}  # none at all


@cache
def _capturing(home: torch.cuda.Stream, workspace: bool) -> tuple[Any, torch.cuda.Stream]:
    """The memory pool of the graphs that are replayed on `home`, and the stream they are captured on: `home` itself,
    but for the default stream, which cannot be captured, and for graphs without a workspace, as streams keep theirs."""
    if home == torch.cuda.default_stream(home.device) or not workspace:
        return torch.cuda.graph_pool_handle(), torch.cuda.Stream(home.device)  # type: ignore[no-untyped-call]
    return torch.cuda.graph_pool_handle(), home


def capture(work: Callable[[], None], workspace: bool = True) -> Callable[[], None]:
    """`work` as a graph: calling the result replays it on the current stream, which must be the one that is current
    now. `work` runs three times on the way.

    `workspace`: whether cuBLAS is given memory to work in. Its large products then hand out their tiles by a counter
    in it, which is cleared before each of them; without, each program knows its tiles from the beginning. Small ones
    are faster with it, for they can be split.
    """
    home = torch.cuda.current_stream()
    pool, stream = _capturing(home, workspace)
    graph = torch.cuda.CUDAGraph()
    with nullcontext() if workspace else _no_workspace():
        stream.wait_stream(home)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                work()
        home.wait_stream(stream)
        torch.cuda.synchronize()
        # Other threads may use the device meanwhile: they encode images and answer requests.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            work()

    def replay() -> None:
        assert torch.cuda.current_stream() == home, "a graph is replayed on another stream than it was captured for"
        graph.replay()

    return replay


@contextmanager
def _no_workspace() -> Iterator[None]:
    """PyTorch asks the environment at each product how large cuBLAS's workspace is to be."""
    before = {name: os.environ.get(name) for name in _WORKSPACES}
    os.environ.update(_WORKSPACES)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def beside(works: Sequence[Callable[[], Result]]) -> list[Result]:
    """What `works` give: the first runs on the current stream, each other on a stream that leaves it here and joins it
    again. In a graph these are branches, and where one waits for its next kernel another computes."""
    if len(works) == 1 or not torch.cuda.is_available():
        return [work() for work in works]
    home = torch.cuda.current_stream()
    branches = [_branch(home, number) for number in range(1, len(works))]
    others = []
    for branch, work in zip(branches, works[1:], strict=True):
        branch.wait_stream(home)
        with torch.cuda.stream(branch):
            others.append(work())
    first = works[0]()
    for branch in branches:
        home.wait_stream(branch)
    return [first, *others]


@cache
def _branch(home: torch.cuda.Stream, number: int) -> torch.cuda.Stream:
    """Always the same one, whose memory the next graph may use again."""
    return torch.cuda.Stream(home.device)  # type: ignore[no-untyped-call]


class GraphedEngine:
    """An engine of one static bucket on a GPU, behind a graph that is captured at its first run, for its stream."""

    overlaps = False  # its inputs and outputs are one buffer each

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
