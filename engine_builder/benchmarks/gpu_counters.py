"""Read the utilization of a GPU from its own counters: NVIDIA's GPU performance monitoring (GPM), from Hopper on.

Reading the counters takes no device time. A profiler does, because it marks the start and end of each kernel.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pynvml  # type: ignore[import-untyped]


@dataclass(frozen=True)
class Utilization:
    """Shares of the time between two samples, in percent."""

    device: float
    """The device had work. The gap between two queued kernels counts as work; waiting for the host does not."""
    multiprocessors: float
    """A multiprocessor ran at least one thread; mean over all multiprocessors."""


class GpuCounters:
    """The counters of one GPU. Thread-safe."""

    def __init__(self, handle: Any, nvml: Any) -> None:
        self._handle, self._nvml = handle, nvml

    def sample(self) -> Any:
        """Return the state of the counters."""
        sample = self._nvml.nvmlGpmSampleAlloc()
        self._nvml.nvmlGpmSampleGet(self._handle, sample)
        return sample

    def utilization(self, earlier: Any, later: Any) -> Utilization:
        """Return the utilization between two samples, and free both. It is inexact for half a second or less."""
        query = pynvml.c_nvmlGpmMetricsGet_t()
        query.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        query.sample1, query.sample2 = earlier, later
        kinds = (pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL, pynvml.NVML_GPM_METRIC_SM_UTIL)
        query.numMetrics = len(kinds)
        for index, kind in enumerate(kinds):
            query.metrics[index].metricId = kind
        try:
            self._nvml.nvmlGpmMetricsGet(query)
            return Utilization(query.metrics[0].value, query.metrics[1].value)
        finally:
            for sample in (earlier, later):
                self._nvml.nvmlGpmSampleFree(sample)


@contextmanager
def gpu_counters(uuid: str, nvml: Any = pynvml) -> Iterator[GpuCounters | None]:
    """Yield the counters of a GPU, or None if it lacks them or does not permit reading them.

    `nvml`: the functions of the driver's library.
    """
    counters = None
    with suppress(pynvml.NVMLError):
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        if nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            counters = GpuCounters(handle, nvml)
    try:
        yield counters
    finally:
        with suppress(pynvml.NVMLError):
            nvml.nvmlShutdown()
