"""Measure the device: its time, and how often its memory did not suffice."""

import time

import torch


class DeviceProbe:
    """Measures the device: its time, and how often its memory did not suffice."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self.clocks_rise = self._on_gpu
        """True if steps may become faster under load. False for a CPU, whose steps are too long to repeat."""

    def now(self) -> float:
        """Wait until all queued work is done, and return the seconds of a clock."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def refused_allocations(self) -> int:
        """Return how often PyTorch could not allocate memory. An engine's code reports that as a plain RuntimeError."""
        return int(torch.cuda.memory_stats(self._device).get("num_ooms", 0)) if self._on_gpu else 0


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, 0 for a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
