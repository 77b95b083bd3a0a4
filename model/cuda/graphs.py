"""CUDA graphs: work that runs often at one shape is captured once and then started by one call.

A graph is replayed only on the stream that was current when it was captured. All graphs of a stream share one memory
pool. That is safe because they run one after the other, and only their callers' buffers outlive a replay. Graphs of
different streams may overlap and have separate pools.

A graph must also own the cuBLAS workspaces that its matrix products use. PyTorch caches one for each stream.
torch.compile's CUDA graphs clear that cache. Newer versions also clear it when a graph of the same stream is destroyed
(github.com/pytorch/pytorch/issues/193402). A graph that used a cached workspace would then write to freed memory. So
the cache is cleared before and after a capture. The capture then allocates its workspaces from the graph's pool, which
lives as long as the graph.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from model.cold_start import warm_up_part

CAPTURING = threading.RLock()
"""Held during a capture. Hold it also to free page-locked memory of a copy that a side stream made: torch's allocator
records an event on that stream, which a capture would make invalid."""

_WARM_UPS = 2  # kernels are loaded at their first call, which a capture does not allow
_NO_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}


@cache
def _capture_context(replay_stream: torch.cuda.Stream) -> tuple[Any, torch.cuda.Stream]:
    """Return the memory pool of the graphs that are replayed on a stream, and the stream that captures them.

    Both streams are the same, except for the default stream, which cannot be captured.
    """
    stream = replay_stream
    if stream == torch.cuda.default_stream(stream.device):
        stream = torch.cuda.Stream(stream.device)  # type: ignore[no-untyped-call]
    return torch.cuda.graph_pool_handle(), stream


def capture(work: Callable[[], None], workspace: bool = True, name: str = "graph") -> Callable[[], None]:
    """Capture `work`, and return a function that replays it. Call that on the stream that is current now.

    `work` runs three times. `workspace`: true if cuBLAS may use a workspace. Small products are then faster, because
    they can be split. Large products then distribute their tiles by a counter in the workspace, which is cleared before
    each product. Without a workspace they need no counter, because the tiles are assigned in advance. `name`: of the
    parts of the warm-up that are timed.
    """
    replay_stream = torch.cuda.current_stream()
    pool, stream = _capture_context(replay_stream)
    graph = torch.cuda.CUDAGraph()
    with nullcontext() if workspace else _no_workspace(), _fresh_workspaces():
        stream.wait_stream(replay_stream)
        with torch.cuda.stream(stream):
            for number in range(_WARM_UPS):
                with warm_up_part(f"{name}_run_{number + 1}"):
                    work()
        replay_stream.wait_stream(stream)
        with warm_up_part(f"{name}_wait"):
            torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        with warm_up_part(f"{name}_capture"), CAPTURING:
            # Other threads encode images and answer requests meanwhile, so only this thread's calls are restricted. The
            # outer statement makes the stream current again if the end of the capture fails.
            recording = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
            with torch.cuda.stream(replay_stream), recording:
                work()

    def replay() -> None:
        assert torch.cuda.current_stream() == replay_stream, "a graph is replayed on another stream"
        graph.replay()

    return replay


@contextmanager
def _fresh_workspaces() -> Iterator[None]:
    """Clear the cached workspaces of all streams before and after. Work that already runs keeps its memory."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def _no_workspace() -> Iterator[None]:
    """Set the size of cuBLAS's workspace to 0. PyTorch reads it from the environment at each product."""
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


class StepQueue:
    """Queues the steps of a loop: as CUDA graphs on a GPU. On a CPU they run when they are called."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def capture(self, work: Callable[[], None], workspace: bool, name: str) -> Callable[[], None]:
        """Return a function that queues `work`. `workspace`, `name`: see the module's `capture`."""
        return capture(work, workspace, name) if self._on_gpu else work

    def mark(self) -> Callable[[], None]:
        """Return a function that waits until the device has finished everything that is queued now."""
        if not self._on_gpu:
            return lambda: None
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize
