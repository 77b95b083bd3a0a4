"""CUDA graphs: work that runs often at one shape is captured once and then started by one call.

A graph is replayed only on the stream that was current when it was captured. All graphs of a stream share one memory
pool. That is safe because they run one after the other, and only their callers' buffers outlive a replay. Graphs of
different streams may run concurrently and have separate pools.

A graph also owns the cuBLAS workspaces that its products use. PyTorch keeps one for each stream and frees it when
anything clears that cache. torch.compile's CUDA graphs do, and newer versions when a graph of the same stream ends
(github.com/pytorch/pytorch/issues/193402). A graph that used such a workspace would then write to freed memory. So the
cache is cleared around a capture: its workspaces are allocated from its graph's pool, which lives as long as the graph.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

_WARM_UPS = 2  # kernels are loaded at their first call, which a capture does not allow
_NO_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}


@cache
def _capturing(home: torch.cuda.Stream) -> tuple[Any, torch.cuda.Stream]:
    """Return the memory pool of the graphs that are replayed on `home`, and the stream they are captured on.

    That is `home` itself, except for the default stream, which cannot be captured.
    """
    if home == torch.cuda.default_stream(home.device):
        return torch.cuda.graph_pool_handle(), torch.cuda.Stream(home.device)  # type: ignore[no-untyped-call]
    return torch.cuda.graph_pool_handle(), home


def capture(work: Callable[[], None], workspace: bool = True) -> Callable[[], None]:
    """Capture `work`; the result replays it on the current stream, which must be the one that is current now.

    `work` runs three times. `workspace`: whether cuBLAS may use a workspace. Its large products then distribute tiles
    by a counter in it, which is cleared before each product; without it each program knows its tiles from the start.
    Small products are faster with a workspace, because they can be split.
    """
    home = torch.cuda.current_stream()
    pool, stream = _capturing(home)
    graph = torch.cuda.CUDAGraph()
    with nullcontext() if workspace else _no_workspace(), _fresh_workspaces():
        stream.wait_stream(home)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                work()
        home.wait_stream(stream)
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        # Other threads encode images and answer requests meanwhile, so only this thread's calls are restricted.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            work()

    def replay() -> None:
        assert torch.cuda.current_stream() == home, "a graph is replayed on another stream than it was captured for"
        graph.replay()

    return replay


@contextmanager
def _fresh_workspaces() -> Iterator[None]:
    """Forget the workspaces of all streams before and after. Work that already runs keeps its memory."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def _no_workspace() -> Iterator[None]:
    """Switch cuBLAS's workspace off: PyTorch reads its size from the environment at each product."""
    before = {name: os.environ.get(name) for name in _NO_WORKSPACE}
    os.environ.update(_NO_WORKSPACE)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run_concurrently(works: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run each of `works` on a stream of its own and join them: the first on the current stream, the others on forks.

    In a captured graph the forks become branches: while one waits for its next kernel, another computes.
    """
    if len(works) == 1 or not torch.cuda.is_available():
        return [work() for work in works]
    home = torch.cuda.current_stream()
    forks = [_fork(home, number) for number in range(1, len(works))]
    others = []
    for fork, work in zip(forks, works[1:], strict=True):
        fork.wait_stream(home)
        with torch.cuda.stream(fork):
            others.append(work())
    first = works[0]()
    for fork in forks:
        home.wait_stream(fork)
    return [first, *others]


@cache
def _fork(home: torch.cuda.Stream, number: int) -> torch.cuda.Stream:
    """The same stream for every call, so that the next graph can use its memory again."""
    return torch.cuda.Stream(home.device)  # type: ignore[no-untyped-call]
