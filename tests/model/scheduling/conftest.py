"""A scheduler on linear networks. The fixture `gate` holds each denoising step until the test allows the step."""

from collections.abc import Iterator

import pytest

from model.pipeline.loaded_model import LoadedModel
from model.pipeline.preview import fit_preview_map
from model.pipeline.runner import Runner
from model.scheduling.comparison import ImageComparison
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
def comparison() -> ImageComparison | None:
    """The scheduler's comparison. Tests replace it."""
    return None


@pytest.fixture
def previews() -> bool:
    """True if the scheduler makes previews of images of 96x64 pixels. Tests replace it by parametrization."""
    return False


@pytest.fixture
def scheduler(
    model: LoadedModel,
    limits: Limits,
    device_failures: list[str],
    comparison: ImageComparison | None,
    previews: bool,
) -> Iterator[Scheduler]:
    runner = Runner(model)

    def prepare() -> None:
        runner.preview_map = fit_preview_map(model, 64, 96) if previews else None

    scheduler = Scheduler([runner], limits, lambda: device_failures.append("called"), comparison, prepare)
    scheduler.wait_ready()
    yield scheduler
    scheduler.close()


@pytest.fixture
def gate(model: LoadedModel, scheduler: Scheduler) -> Iterator[Gate]:
    """Each step waits until the test calls `run` or `open`."""
    # Depends on `scheduler`, so that the gate opens before the scheduler closes, which waits for its step.
    gate = Gate(model)
    yield gate
    gate.open()
