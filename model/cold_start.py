"""Time the phases of a cold start, log them as one JSON line, export them as metrics.

Phases: import (process start to load), those of model/loading/load.py, stream (concurrent with them), warm_up, and
first_image (process start to the first finished image).
"""

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import Gauge

logger = logging.getLogger("preheat")

SECONDS = Gauge("preheat_cold_start_seconds", "Seconds of the cold start, by phase.", ["phase"])


def seconds_since_process_start() -> float:
    """Return the seconds since this process was created (proc(5): field 22 of stat, in clock ticks since boot)."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


class ColdStart:
    """The seconds of each phase, in the order in which the phases ended."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}

    def record(self, phase: str, seconds: float) -> None:
        """Set the seconds of a phase, here and in the metric."""
        self.phases[phase] = round(seconds, 4)
        SECONDS.labels(phase).set(seconds)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase. A phase that raises is not recorded."""
        began = time.perf_counter()
        yield
        self.record(name, time.perf_counter() - began)

    def record_first_image(self) -> None:
        """Record the time of the first image, and log all phases. Later calls do nothing."""
        if "first_image" not in self.phases:
            self.record("first_image", seconds_since_process_start())
            logger.info(json.dumps({"event": "cold_start", "seconds": self.phases}))
