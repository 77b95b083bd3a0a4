"""How busy a GPU was, by its own counters: NVIDIA's GPU performance monitoring (GPM), of Hopper and later.

They count whether anyone asks or not. A profiler marks the begin and end of each kernel, which takes the device time.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pynvml  # type: ignore[import-untyped]
import torch


@dataclass(frozen=True)
class Busy:
    """Percent of the time between two samples, 0 to 100."""

    device: float
    """That the device had work. Its short way from one kernel of a queue or CUDA graph to the next counts as work: a
    graph of kernels of a microsecond keeps it busy, a host that is waited for does not."""
    multiprocessors: float
    """That a multiprocessor ran any thread, on the average over all of them."""


class GpuCounters:
    """The counters of one GPU. Any thread may take a sample."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def sample(self) -> Any:
        """What has been counted by now."""
        taken = pynvml.nvmlGpmSampleAlloc()
        pynvml.nvmlGpmSampleGet(self._handle, taken)
        return taken

    def busy(self, earlier: Any, later: Any) -> Busy:
        """Between two samples; both are freed. The further apart, the better: half a second is still rough."""
        asked = pynvml.c_nvmlGpmMetricsGet_t()
        asked.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        asked.sample1, asked.sample2 = earlier, later
        kinds = (pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL, pynvml.NVML_GPM_METRIC_SM_UTIL)
        asked.numMetrics = len(kinds)
        for index, kind in enumerate(kinds):
            asked.metrics[index].metricId = kind
        try:
            pynvml.nvmlGpmMetricsGet(asked)
            return Busy(asked.metrics[0].value, asked.metrics[1].value)
        finally:
            for taken in (earlier, later):
                pynvml.nvmlGpmSampleFree(taken)


@contextmanager
def gpu_counters(device: torch.device) -> Iterator[GpuCounters | None]:
    """The counters of a CUDA device; None where it has none, or they may not be read."""
    counters = None
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        if pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            counters = GpuCounters(handle)
    try:
        yield counters
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
