"""The benchmark of in-flight batching, on a fake server and on the tiny model."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks.in_flight import measure, measure_saturated, numbered_requests
from model.errors import Unavailable
from model.loading.load import Loaded
from model.pipeline import spec
from model.pipeline.params import GenerationParams
from model.request_fields import GenerationRequest
from model.scheduling.job import StepEvent
from model.scheduling.scheduler import Scheduler
from tests.support.linear_networks import PLAIN


def test_requests_are_reproducible() -> None:
    request_of = numbered_requests(PLAIN, (4, 30))
    steps = [request_of(number).num_inference_steps for number in range(400)]
    assert steps == [request_of(number).num_inference_steps for number in range(400)]
    assert steps.count(4) == pytest.approx(200, abs=40) and steps.count(30) == 400 - steps.count(4)
    assert request_of(7).seed == 7


def test_saturated_rate_counts_steps() -> None:
    """The fake server generates one image at a time, with steps of 10 ms on a fake clock."""
    waiting: queue.Queue[tuple[GenerationParams, Callable[[StepEvent], None], Future[None]]] = queue.Queue()
    now = 0.0

    class FakeScheduler:
        def submit(self, params: GenerationParams, listener: Callable[[StepEvent], None]) -> SimpleNamespace:
            waiting.put((params, listener, result := Future()))
            return SimpleNamespace(result=result)

    def serve() -> None:
        nonlocal now
        while True:
            params, listener, result = waiting.get()
            for step in range(params.num_inference_steps):
                now += 0.01
                listener(StepEvent(step + 1, params.num_inference_steps))
            result.set_result(None)

    threading.Thread(target=serve, daemon=True).start()
    scheduler = cast(Scheduler, FakeScheduler())
    for mix in ((30,), (4, 50)):
        rate = measure_saturated(scheduler, numbered_requests(PLAIN, mix), outstanding=4, seconds=50, clock=lambda: now)
        assert rate == pytest.approx(100)


def test_error_ends_the_measurement() -> None:
    result: Future[None] = Future()
    result.set_exception(Unavailable("The GPU has failed."))
    scheduler = cast(Scheduler, SimpleNamespace(submit=lambda *_: SimpleNamespace(result=result)))
    with pytest.raises(Unavailable, match="has failed"):
        measure_saturated(scheduler, numbered_requests(PLAIN, (4,)), outstanding=4, seconds=50)


def test_measures_every_case(loaded: Loaded) -> None:
    request = GenerationRequest(prompt="a circle", width=64, height=64, num_inference_steps=2)
    loop = loaded.model.loop(spec.UNET, 64, 64)
    capacity = loop.capacity
    try:
        rows = measure(loaded, request, seconds=0.5, share=0.7, images=2, mix=(1, 3))
    finally:
        loop.capacity = capacity
    cases = ["offline", "in flight", "in flight", "in flight", "batch at a time"]
    assert [row.case.partition(",")[0] for row in rows] == cases
    assert [row.unit for row in rows] == ["images/s", "images/s", "images/s", "s", "s"]
    assert all(row.value > 0 and row.batch == 2 for row in rows)
    assert all(row.p50 <= row.p99 if row.unit == "s" else row.p50 >= row.p99 for row in rows)
    assert rows[1].extra["of_offline"] == pytest.approx(rows[1].value / rows[0].value, rel=0.01)
    assert rows[3].runs == rows[4].runs > 0
    assert rows[2].extra["mix"] == rows[3].extra["mix"] == rows[4].extra["mix"] == [1, 3]
    assert rows[3].extra["arrivals_per_second"] == pytest.approx(0.7 * rows[2].value, rel=0.01)
    without = measure(loaded, request, seconds=0.1, share=0, images=None)
    assert [row.case.partition(",")[0] for row in without] == cases[:2]
