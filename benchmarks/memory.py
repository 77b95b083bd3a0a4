"""The memory that a model takes in its process."""

import gc
from contextlib import suppress
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")


class MemoryGrowth:
    """Measures how far the memory of this process grows at its peak: torch's GPU memory, else the resident set.

    Make it before the model is loaded. The resident set needs Linux. Memory that is freed later and was there before
    hides as much growth, so garbage is collected first.
    """

    def __init__(self) -> None:
        gc.collect()
        self._has_gpu = torch.cuda.is_available()
        self._before: int | None = None
        if self._has_gpu:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            with suppress(OSError):
                (_PROCESS / "clear_refs").write_text("5")  # resets the peak, see proc(5)
                self._before = _resident_bytes("VmRSS")

    def peak_bytes(self) -> int | None:
        """Return the growth at the peak in bytes, or None if it cannot be measured."""
        if self._before is None:
            return None
        peak = torch.cuda.max_memory_allocated() if self._has_gpu else _resident_bytes("VmHWM")
        return max(0, peak - self._before)


def _resident_bytes(name: str) -> int:
    """Return an entry of this process's status. Raises OSError."""
    for line in (_PROCESS / "status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_PROCESS}/status has no {name}")
