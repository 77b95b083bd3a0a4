"""The benchmark of in-flight batching on the tiny model."""

import itertools
import queue
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import cast

import pytest

from engine_builder.benchmarks import in_flight
from engine_builder.benchmarks.in_flight import measure, numbered_requests
from engine_builder.replicas.traffic import poisson_arrivals
from model.api.request import GenerationRequest
from model.errors import Unavailable
from model.loading.load import Loaded
from model.pipeline import spec
from model.pipeline.params import GenerationParams
from model.scheduling.job import StepEvent
from model.scheduling.scheduler import Scheduler
from tests.support.linear_networks import PLAIN


def test_arrivals_are_a_poisson_process() -> None:
    moments = list(poisson_arrivals(50, 200, random.Random(1)))
    assert len(moments) == pytest.approx(10_000, rel=0.05)
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(mean**2, rel=0.1)  # as of an exponential distribution
    assert list(poisson_arrivals(50, 200, random.Random(1))) == moments


def test_requests_are_reproducible() -> None:
    request_of = numbered_requests(PLAIN, (4, 30), seed=1)
    steps = [request_of(number).num_inference_steps for number in range(400)]
    assert steps == [request_of(number).num_inference_steps for number in range(400)]
    assert steps.count(4) == pytest.approx(200, abs=40) and steps.count(30) == 400 - steps.count(4)
    assert steps != [numbered_requests(PLAIN, (4, 30), seed=2)(number).num_inference_steps for number in range(400)]
    assert request_of(7).seed == 7


def test_saturated_rate_counts_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that runs one image at a time, with steps of 10 ms on a fake clock."""
    waiting: queue.Queue[tuple[GenerationParams, Callable[[StepEvent], None], Future[None]]] = queue.Queue()
    now = 0.0

    class Line:
        def submit(self, settings: GenerationParams, listener: Callable[[StepEvent], None]) -> SimpleNamespace:
            waiting.put((settings, listener, result := Future()))
            return SimpleNamespace(result=result)

    def serve() -> None:
        nonlocal now
        while True:
            settings, listener, result = waiting.get()
            for step in range(settings.num_inference_steps):
                now += 0.01
                listener(StepEvent(step + 1, settings.num_inference_steps))
            result.set_result(None)

    monkeypatch.setattr(in_flight.time, "perf_counter", lambda: now)
    threading.Thread(target=serve, daemon=True).start()
    server = cast(Scheduler, Line())
    for mix in ((30,), (4, 50)):
        assert in_flight.measure_saturated(
            server, numbered_requests(PLAIN, mix), outstanding=4, seconds=50
        ) == pytest.approx(100)


def test_error_ends_the_measurement() -> None:
    class Broken:
        def submit(self, settings: GenerationParams, listener: Callable[[StepEvent], None]) -> SimpleNamespace:
            result: Future[None] = Future()
            result.set_exception(Unavailable("The GPU has failed."))
            return SimpleNamespace(result=result)

    with pytest.raises(Unavailable, match="has failed"):
        in_flight.measure_saturated(
            cast(Scheduler, Broken()), numbered_requests(PLAIN, (4,)), outstanding=4, seconds=50
        )


def test_measures_every_case(loaded: Loaded) -> None:
    request = GenerationRequest(prompt="a circle", width=64, height=64, num_inference_steps=2)
    loop = loaded.model.loop(spec.UNET, 64, 64)
    capacity = loop.capacity
    try:
        rows = measure(loaded, request, seconds=0.5, share=0.7, images=2, mix=(1, 3))
    finally:
        loop.capacity = capacity
    assert [row.case.partition(",")[0] for row in rows] == [
        "offline", "in flight", "in flight", "in flight", "batch at a time", "in a mix against alone",
    ]  # fmt: skip
    assert [row.unit for row in rows] == ["images/s", "images/s", "images/s", "s", "s", "dB"]
    assert all(row.value > 0 and row.batch == 2 for row in rows)
    assert all(row.p50 <= row.p99 if row.unit == "s" else row.p50 >= row.p99 for row in rows)
    assert rows[1].extra["of_offline"] == pytest.approx(rows[1].value / rows[0].value, rel=0.01)
    assert rows[3].runs == rows[4].runs > 0
    assert rows[2].extra["mix"] == rows[3].extra["mix"] == rows[4].extra["mix"] == [1, 3]
    assert rows[3].extra["arrivals_per_second"] == pytest.approx(0.7 * rows[2].value, rel=0.01)
    assert rows[1].extra["efficient"] == rows[3].extra["efficient"] == min(2, loop.efficient_batch // 2)
    assert rows[5].extra["largest"] <= 1 and rows[5].extra["worst"] > 40
