"""A GPU's counters, read from a fake of the driver's library."""

import ctypes
from typing import Any

import pynvml
import pytest

from engine_builder.benchmarks.gpu_counters import Utilization, gpu_counters

PERCENT = {pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL: 99.5, pynvml.NVML_GPM_METRIC_SM_UTIL: 86.0}


def address(sample: Any) -> int:
    return ctypes.cast(sample, ctypes.c_void_p).value or 0


class FakeNvml:
    """The driver's library with one GPU, "GPU-0". The address of each sample is its number, from 1."""

    def __init__(self) -> None:
        self.allocated: set[int] = set()
        self.sampled: list[int] = []
        self.supported = True
        self.fails = False

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> Any:
        assert handle == "GPU-0"
        return pynvml.c_nvmlGpmSupport_t(isSupportedDevice=self.supported)

    def nvmlGpmSampleAlloc(self) -> Any:
        number = len(self.sampled) + 1
        self.allocated.add(number)
        return ctypes.cast(number, pynvml.c_nvmlGpmSample_t)

    def nvmlGpmSampleGet(self, handle: str, sample: Any) -> None:
        self.sampled.append(address(sample))

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.allocated.remove(address(sample))

    def nvmlGpmMetricsGet(self, request: Any) -> None:
        earlier_and_later = [address(request.sample1), address(request.sample2)]
        assert earlier_and_later == self.sampled
        assert request.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        if self.fails:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        for metric in request.metrics[: request.numMetrics]:
            metric.value = PERCENT[metric.metricId]


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml()


def test_computes_utilization_between_two_samples(nvml: FakeNvml) -> None:
    with gpu_counters("0", nvml) as counters:
        assert counters is not None
        earlier, later = counters.sample(), counters.sample()
        assert nvml.allocated == {1, 2}
        assert counters.utilization(earlier, later) == Utilization(device=99.5, multiprocessors=86.0)
        assert nvml.allocated == set()


def test_frees_samples_if_the_driver_fails(nvml: FakeNvml) -> None:
    nvml.fails = True
    with gpu_counters("0", nvml) as counters:
        assert counters is not None
        with pytest.raises(pynvml.NVMLError):
            counters.utilization(counters.sample(), counters.sample())
    assert nvml.allocated == set()


def test_unsupported_gpu_has_no_counters(nvml: FakeNvml) -> None:
    nvml.supported = False
    with gpu_counters("0", nvml) as counters:
        assert counters is None


def test_missing_gpu_has_no_counters() -> None:
    """The real library is used: either it is missing, or it does not know this GPU."""
    with gpu_counters("no-such-gpu") as counters:
        assert counters is None
