"""Estimate how long a build still compiles, from the engines that it has compiled so far."""

import time
from collections.abc import Callable, Mapping

from model.pipeline.components import find_component
from model.pipeline.spec import BatchUnit, Phase

# Measured seconds to compile an engine: of the tiny SDXL on two CPU cores, of full-size SDXL on an H100 with 16 cores.
# Other models and machines differ by a factor, which is estimated from the finished engines.
_CPU_SECONDS: dict[tuple[Phase, BatchUnit], float] = {
    ("prompt", "text"): 8, ("request", "text"): 5, ("request", "timestep"): 6, ("step", "cfg_half"): 57,
    ("image", "image"): 23,
}  # fmt: skip
_GPU_SECONDS: dict[tuple[Phase, BatchUnit], float] = {
    ("prompt", "text"): 85, ("request", "text"): 7, ("request", "timestep"): 8, ("step", "cfg_half"): 205,
    ("image", "image"): 50,
}  # fmt: skip
_OTHER_SECONDS = 30.0
_PRIOR_SECONDS = 60.0  # weight of the tables: the first engine's time includes work that is done only once
_MIN_LEFT_SHARE = 0.05  # of an engine's expected seconds; a compiling engine is never estimated to need less


def expected_seconds(component: str, device: str) -> float:
    """Return the rough number of seconds that compiling an engine of `component` takes."""
    spec = find_component(component)
    table = _CPU_SECONDS if device == "cpu" else _GPU_SECONDS
    return table.get((spec.phase, spec.batch_unit), _OTHER_SECONDS)


class RemainingTime:
    """Estimates the seconds until all engines are compiled. Zero without engines, and after the last one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._processes = 1
        self._waiting: dict[str, float] = {}  # engine key -> expected seconds
        self._running: dict[str, tuple[float, float]] = {}  # engine key -> expected seconds, start
        self._expected = self._actual = 0.0  # seconds of finished engines

    def plan(self, expected: Mapping[str, float], processes: int) -> None:
        """Set the engines to compile, engine key -> expected seconds, and how many compile at once."""
        self._waiting, self._processes = dict(expected), max(1, processes)

    def mark_started(self, key: str) -> None:
        """Record that an engine's compilation starts."""
        self._running[key] = self._waiting.pop(key), self._clock()

    def mark_finished(self, key: str) -> None:
        """Record that an engine is compiled."""
        expected, started = self._running.pop(key)
        self._expected += expected
        self._actual += self._clock() - started

    def seconds(self) -> float:
        """Return the estimate. It is at least the time that the longest unfinished engine still takes."""
        scale = (self._actual + _PRIOR_SECONDS) / (self._expected + _PRIOR_SECONDS)
        now = self._clock()
        left = [
            max(expected * scale - (now - started), expected * scale * _MIN_LEFT_SHARE)
            for expected, started in self._running.values()
        ]
        waiting = [expected * scale for expected in self._waiting.values()]
        return max(sum(left + waiting) / self._processes, *left, *waiting, 0.0) if left or waiting else 0.0
