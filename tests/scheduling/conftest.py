"""A scheduler on linear networks. With `gate`, its steps wait until the test allows them."""

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
    """Has an entry for each call of the scheduler's `on_device_failure`."""
    return []


@pytest.fixture
def scheduler(model: LoadedModel, limits: Limits, device_failures: list[str]) -> Iterator[Scheduler]:
    scheduler = Scheduler(Runner(model), limits, lambda: device_failures.append("failed"))
    yield scheduler
    scheduler.close()


@pytest.fixture
def gate(model: LoadedModel, scheduler: Scheduler) -> Iterator[Gate]:
    """Depends on the scheduler, so that the gate is open before the scheduler is closed."""
    gate = Gate(model)
    yield gate
    gate.open()
