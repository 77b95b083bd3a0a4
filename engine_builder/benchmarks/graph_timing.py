"""Time work on the GPU of this machine, in CUDA graphs, so that the host's time does not count."""

from collections.abc import Callable, Mapping, Sequence

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


class Failures:
    """Prints each failure of a case once, in one line."""

    def __init__(self) -> None:
        self._printed: set[str] = set()

    def print(self, case: str, error: Exception) -> None:
        """Print the case and the error's first line, unless this case failed before."""
        if case not in self._printed:
            self._printed.add(case)
            lines = str(error).strip().splitlines() or [""]
            print(f"{case} failed: {type(error).__name__}: {lines[0][:300]}", flush=True)


def time_choices(choices: Mapping[str, Sequence[Work]], timer: Timer, failures: Failures) -> dict[str, list[float]]:
    """Return the times of the choices that run, by name. A choice that fails is left out, and its error is printed."""
    times = {}
    for name, works in choices.items():
        try:
            times[name] = timer(works)
        except Exception as error:  # of the compiler, the driver or PyTorch, such as too little shared memory
            failures.print(name, error)
    return times
