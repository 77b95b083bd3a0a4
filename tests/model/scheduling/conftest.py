"""A scheduler on linear networks. The fixture `gate` holds each denoising step until the test allows the step."""

from collections.abc import Iterator

import pytest

from model.pipeline.loaded_model import LoadedModel
from model.pipeline.runner import Runner
from model.scheduling.scheduler import Scheduler
from model.settings import Limits
from tests.support.linear_networks import linear_model
from tests.support.scheduling import Gate


@pytest.fixture
def model() -> LoadedModel:
    return linear_model()


@pytest.fixture
def limits() -> Limits:
    """The scheduler's limits. Tests replace them by parametrization."""
    return Limits(max_queue=8)


@pytest.fixture
def device_failures() -> list[str]:
    """The calls of the scheduler's `on_device_failure`, an entry for each."""
    return []


@pytest.fixture
def scheduler(model: LoadedModel, limits: Limits, device_failures: list[str]) -> Iterator[Scheduler]:
    scheduler = Scheduler(Runner(model), limits, on_device_failure=lambda: device_failures.append("called"))
    yield scheduler
    scheduler.close()


@pytest.fixture
def gate(model: LoadedModel, scheduler: Scheduler) -> Iterator[Gate]:
    """Each step waits until the test calls `run` or `open`."""
    # Depends on `scheduler`, so that the gate opens before the scheduler closes, which waits for its step.
    gate = Gate(model)
    yield gate
    gate.open()
