"""The utilization of a GPU by its own counters: NVIDIA's GPU performance monitoring (GPM), from Hopper on.

Reading them costs the device nothing. A profiler marks the start and end of each kernel, which takes device time.
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
    """The device had work. The short time between two queued kernels counts as work; waiting for the host does not."""
    multiprocessors: float
    """A multiprocessor ran any thread, on average over all of them."""


class GpuCounters:
    """The counters of one GPU. Thread-safe."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def sample(self) -> Any:
        """Return the state of the counters."""
        taken = pynvml.nvmlGpmSampleAlloc()
        pynvml.nvmlGpmSampleGet(self._handle, taken)
        return taken

    def busy(self, earlier: Any, later: Any) -> Busy:
        """Return the utilization between two samples, and free both. Half a second between them is still inexact."""
        query = pynvml.c_nvmlGpmMetricsGet_t()
        query.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        query.sample1, query.sample2 = earlier, later
        kinds = (pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL, pynvml.NVML_GPM_METRIC_SM_UTIL)
        query.numMetrics = len(kinds)
        for index, kind in enumerate(kinds):
            query.metrics[index].metricId = kind
        try:
            pynvml.nvmlGpmMetricsGet(query)
            return Busy(query.metrics[0].value, query.metrics[1].value)
        finally:
            for taken in (earlier, later):
                pynvml.nvmlGpmSampleFree(taken)


@contextmanager
def gpu_counters(device: torch.device) -> Iterator[GpuCounters | None]:
    """Yield the counters of a CUDA device, or None if it has none or they may not be read."""
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
