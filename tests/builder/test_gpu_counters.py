"""Reading a GPU's counters, with a fake of the driver's library."""

import ctypes
from typing import Any

import pynvml
import pytest
import torch

from engine_builder.benchmarks.gpu_counters import Utilization, gpu_counters

_PERCENT = {pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL: 99.5, pynvml.NVML_GPM_METRIC_SM_UTIL: 86.0}


def number(sample: Any) -> int:
    return ctypes.cast(sample, ctypes.c_void_p).value or 0


class Driver:
    """Allocates samples with numbers from 1, and frees each once."""

    def __init__(self) -> None:
        self.given = 0
        self.held: set[int] = set()
        self.taken: list[int] = []
        self.supported = True
        self.fails = False

    def support(self, handle: str) -> Any:
        assert handle == "GPU-0"
        return pynvml.c_nvmlGpmSupport_t(isSupportedDevice=self.supported)

    def alloc(self) -> Any:
        self.given += 1
        self.held.add(self.given)
        return ctypes.cast(self.given, pynvml.c_nvmlGpmSample_t)

    def get(self, handle: str, sample: Any) -> None:
        self.taken.append(number(sample))

    def free(self, sample: Any) -> None:
        self.held.remove(number(sample))

    def metrics(self, request: Any) -> None:
        assert [number(request.sample1), number(request.sample2)] == self.taken, "from the earlier sample to the later"
        assert request.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        if self.fails:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        for metric in request.metrics[: request.numMetrics]:
            metric.value = _PERCENT[metric.metricId]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    properties = type("Properties", (), {"uuid": "0"})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for name, fake in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlGpmQueryDeviceSupport": made.support,
        "nvmlGpmSampleAlloc": made.alloc,
        "nvmlGpmSampleGet": made.get,
        "nvmlGpmSampleFree": made.free,
        "nvmlGpmMetricsGet": made.metrics,
    }.items():
        monkeypatch.setattr(pynvml, name, fake)
    return made


def test_computes_utilization_between_two_samples(driver: Driver) -> None:
    with gpu_counters(torch.device("cuda")) as counters:
        assert counters is not None
        earlier, later = counters.sample(), counters.sample()
        assert driver.held == {1, 2}
        assert counters.utilization(earlier, later) == Utilization(device=99.5, multiprocessors=86.0)
        assert driver.held == set()


def test_frees_samples_if_the_driver_fails(driver: Driver) -> None:
    driver.fails = True
    with gpu_counters(torch.device("cuda")) as counters:
        assert counters is not None
        with pytest.raises(pynvml.NVMLError):
            counters.utilization(counters.sample(), counters.sample())
    assert driver.held == set()


def test_no_counters_on_an_unsupported_device(driver: Driver) -> None:
    driver.supported = False
    with gpu_counters(torch.device("cuda")) as counters:
        assert counters is None


def test_no_counters_without_the_drivers_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", missing)
    with gpu_counters(torch.device("cuda")) as counters:
        assert counters is None
