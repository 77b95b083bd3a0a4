"""Time work on the GPU of this machine, in CUDA graphs, so that the host's time does not count."""

from collections.abc import Callable, Sequence

import torch

_ROUNDS, _REPLAYS = 5, 20  # calls of each work in a graph, timed launches of the graph
Work = Callable[[], object]
Timer = Callable[[Sequence[Work]], list[float]]
"""Return microseconds of one call, once for each repetition. The given calls do the same work on other tensors."""


def time_on_gpu(works: Sequence[Work]) -> list[float]:
    """Time calls in a CUDA graph. See `Timer`."""
    for work in works:  # compiles
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_ROUNDS):
            for work in works:
                work()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    calls = _ROUNDS * len(works)
    return [start.elapsed_time(end) * 1000 / calls for start, end in zip(events, events[1:], strict=False)]
