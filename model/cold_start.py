"""Time the phases of a cold start, log them as one JSON line, export them as metrics.

Phases: import (process start to load), those of model/loading/load.py, stream and libraries (concurrent with them),
warm_up, and first_image (process start to the first finished image). The parts of the warm-up are phases too:
`warm_up_...`.
"""

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from prometheus_client import Gauge

logger = logging.getLogger("preheat")

SECONDS = Gauge("preheat_cold_start_seconds", "Seconds of the cold start, by phase.", ["phase"])


def seconds_since_process_start() -> float:
    """Return the seconds since this process was created (proc(5): field 22 of stat, in clock ticks since boot)."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


_warming_up: ContextVar["ColdStart | None"] = ContextVar("_warming_up", default=None)


@contextmanager
def warm_up_part(name: str) -> Iterator[None]:
    """Add the seconds of a block to the phase `warm_up_<name>`. Does nothing outside of `ColdStart.timing_parts`.

    On a GPU these are the host's seconds: kernels are loaded and plans are made while the host waits, and the queued
    work may still run afterwards.
    """
    cold_start = _warming_up.get()
    began = time.perf_counter()
    yield
    if cold_start is not None:
        phase = f"warm_up_{name}"
        cold_start.record(phase, cold_start.phases.get(phase, 0.0) + time.perf_counter() - began)


class ColdStart:
    """The seconds of each phase, in the order in which the phases ended."""

    def __init__(self, is_exported: bool = True) -> None:
        """`is_exported`: false for the load of a release after the start, which the metric does not describe."""
        self._is_exported = is_exported
        self.phases: dict[str, float] = {}

    def record(self, phase: str, seconds: float) -> None:
        """Set the seconds of a phase, here and in the metric."""
        self.phases[phase] = round(seconds, 4)
        if self._is_exported:
            SECONDS.labels(phase).set(seconds)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase, which several releases may have. One that raises is not recorded."""
        began = time.perf_counter()
        yield
        self.record(name, self.phases.get(name, 0.0) + time.perf_counter() - began)

    @contextmanager
    def timing_parts(self) -> Iterator[None]:
        """Record each `warm_up_part` of a block that runs on this thread."""
        token = _warming_up.set(self)
        try:
            yield
        finally:
            _warming_up.reset(token)

    def record_first_image(self) -> None:
        """Record the time of the first image, and log all phases. Later calls do nothing."""
        if "first_image" not in self.phases:
            self.record("first_image", seconds_since_process_start())
            logger.info(json.dumps({"event": "cold_start", "seconds": self.phases}))
