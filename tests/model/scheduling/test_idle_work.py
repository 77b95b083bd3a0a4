"""Work for idle times: it starts after a pause, makes way for requests, and its errors harm no request."""

import threading
from collections.abc import Iterator

import pytest

from model.scheduling import scheduler as scheduling
from model.scheduling.scheduler import Scheduler
from tests.support.scheduling import Gate, params, results
from tests.support.waiting import TIMEOUT_SECONDS, eventually


@pytest.fixture(autouse=True)
def _short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "IDLE_SECONDS", 0.01)


def test_requests_run_between_two_parts(gate: Gate, scheduler: Scheduler) -> None:
    begun, resumed, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> Iterator[None]:
        begun.set()
        resumed.wait(TIMEOUT_SECONDS)
        yield
        assert gate.steps, "the request waited for the second part"
        ended.set()

    scheduler.when_idle(work())
    assert begun.wait(TIMEOUT_SECONDS)
    job = scheduler.submit(params(1))
    resumed.set()
    gate.open()
    results(job)
    assert ended.wait(TIMEOUT_SECONDS)


def test_overdue_work_runs_between_images(gate: Gate, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that is never idle admits no image until the work has run, which needs empty loops."""
    monkeypatch.setattr(scheduling, "IDLE_SECONDS", 3600.0)
    monkeypatch.setattr(scheduling, "OVERDUE_SECONDS", 0.0)
    parts: list[list[int]] = []

    def work() -> Iterator[None]:
        for _ in range(2):
            assert not any(loop.images for loop in scheduler.model.loops.values())
            parts.append(gate.order)
            yield

    first = scheduler.submit(params(1))
    gate.run(1)
    scheduler.when_idle(work())
    second = scheduler.submit(params(2))
    gate.open()
    results(first, second)
    assert parts == [[1], [1]]
    assert gate.order == [1, 2]


def test_error_ends_only_the_work(
    gate: Gate, scheduler: Scheduler, device_failures: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> Iterator[None]:
        yield
        raise RuntimeError("out of memory")

    gate.open()
    scheduler.when_idle(work())
    eventually(lambda: "A step of the scheduler failed." in caplog.text, "the error is logged")
    results(scheduler.submit(params(1)))
    assert scheduler.healthy() and not device_failures
