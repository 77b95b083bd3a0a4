"""Work for idle times makes way for requests. The comparison with fp16, which is such work, keeps nothing."""

import gc
import math
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY

from model.engines.engine import EngineSet
from model.images.distance import psnr
from model.loading.load import Loaded
from model.loading.served import Defaults, ServedModel, SizeList
from model.loading.warmup import warm_up
from model.pipeline import spec
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.text_to_image import generate
from model.scheduling import scheduler as scheduling
from model.scheduling.comparison import ImageComparison
from model.scheduling.scheduler import Scheduler
from model.store.manifest import Fp16Steps
from tests.support.linear_networks import Stub, stub
from tests.support.scheduling import Gate, params, results, settle
from tests.support.waiting import TIMEOUT_SECONDS, eventually

IDLE = 0.01


class OtherStub(Stub):
    """A UNet whose predictions differ a little, as those in 8 bits and in fp16 do."""

    def outputs(self, inputs: Any) -> dict[str, torch.Tensor]:
        return {name: 1.02 * tensor for name, tensor in super().outputs(inputs).items()}


@pytest.fixture(autouse=True)
def _short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "IDLE_SECONDS", IDLE)


@pytest.fixture
def model(model: LoadedModel) -> LoadedModel:
    for unet in (spec.UNET, spec.REFINER_UNET):
        model.fp16_engines[unet] = EngineSet([OtherStub(unet, stub(model, unet).signature)])
    return model


@pytest.fixture
def every() -> int:
    return 1


@pytest.fixture
def comparison(model: LoadedModel, every: int) -> ImageComparison:
    return ImageComparison(model, every)


@pytest.fixture
def outcomes() -> Iterator[Any]:
    """Return the comparisons since the test began, by outcome, without zeros."""

    def read() -> dict[str, float]:
        names = ("compared", "dropped", "failed")
        return {name: REGISTRY.get_sample_value("preheat_comparisons_total", {"outcome": name}) or 0 for name in names}

    before = read()
    yield lambda: {name: value - before[name] for name, value in read().items() if value > before[name]}


def decibels() -> tuple[float, float]:
    """Return the number and the sum of all distances reported so far."""
    names = ("preheat_comparison_decibels_count", "preheat_comparison_decibels_sum")
    count, total = (REGISTRY.get_sample_value(name) or 0.0 for name in names)
    return count, total


def fp16_runs(model: LoadedModel, unet: str = spec.UNET) -> int:
    engine = model.fp16_engines[unet].engines[0]
    assert isinstance(engine, Stub)
    return len(engine.seen)


def test_reports_the_distance_to_fp16(
    model: LoadedModel, scheduler: Scheduler, comparison: ImageComparison, outcomes: Any
) -> None:
    wanted = params(5, use_refiner=True, scheduler="Euler a")
    expected = psnr(generate(model.in_fp16(), [wanted])[0][0], generate(model, [wanted])[0][0])
    runs, (count, total) = fp16_runs(model), decibels()
    assert 20 < expected < 60
    results(scheduler.submit(wanted))
    eventually(lambda: "compared" in outcomes(), "the image is compared")
    assert decibels() == (count + 1, pytest.approx(total + expected, abs=0.01))
    assert fp16_runs(model) > runs and fp16_runs(model, spec.REFINER_UNET)


@pytest.mark.parametrize("every", [3])
def test_compares_one_in_n_images(model: LoadedModel, scheduler: Scheduler, outcomes: Any) -> None:
    for seed in range(7):
        results(scheduler.submit(params(seed)))
        eventually(lambda seed=seed: outcomes().get("compared", 0) == (seed + 1) // 3, "every third image is compared")
    assert outcomes() == {"compared": 2}


def test_image_of_a_request_is_compared_by_its_own_seed(model: LoadedModel) -> None:
    """Equal images count as 100 decibels."""
    comparison = ImageComparison(model, every=1)
    wanted = params(2**32 - 1, num_images=2)
    for index, pixels in enumerate(generate(model.in_fp16(), [wanted])[0]):
        assert comparison.offer(wanted, index, pixels)
        _, total = decibels()
        assert comparison.work is not None
        list(comparison.work)
        comparison.end()
        assert decibels()[1] - total == pytest.approx(100)


@pytest.mark.parametrize("every", [2])  # so not the image of the request that arrives
def test_request_ends_the_comparison(
    model: LoadedModel,
    scheduler: Scheduler,
    comparison: ImageComparison,
    outcomes: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that arrives during a step of the comparison begins after that step."""
    finished = params(1, num_inference_steps=40)
    pixels = generate(model, [finished])[0][0]  # while the scheduler's thread has nothing to do
    arrived = []
    engine = model.fp16_engines[spec.UNET].engines[0]
    assert isinstance(engine, Stub)
    outputs = engine.outputs

    def submit_once(inputs: Any) -> dict[str, torch.Tensor]:
        if not arrived:
            arrived.append(scheduler.submit(params(2)))
        return outputs(inputs)

    monkeypatch.setattr(engine, "outputs", submit_once)
    assert [comparison.offer(finished, 0, pixels) for _ in range(2)] == [False, True]
    settle(scheduler)  # wakes the thread
    eventually(lambda: bool(arrived), "the comparison begins")
    results(*arrived)
    assert len(engine.seen) == 1 and outcomes() == {"dropped": 1}


def test_keeps_one_image_and_nothing_afterwards(model: LoadedModel, outcomes: Any) -> None:
    comparison = ImageComparison(model, every=1)
    kept = []
    for seed in range(3):
        wanted = params(seed)
        pixels = generate(model, [wanted])[0][0].copy()
        kept.append(weakref.ref(pixels))
        assert comparison.offer(wanted, 0, pixels)
        del pixels
    assert [reference() is None for reference in kept] == [True, True, False]
    work = comparison.work
    assert work is not None and comparison.work is work
    loops = dict(model.loops)
    list(work)
    assert model.loops == loops, "the fp16 UNet has no loop of its own, which would hold buffers on a GPU"
    comparison.end()
    del work
    gc.collect()
    assert kept[2]() is None and comparison.work is None
    assert outcomes() == {"dropped": 2, "compared": 1}


def test_images_with_adapters_are_not_compared(model: LoadedModel, outcomes: Any) -> None:
    comparison = ImageComparison(model, every=1)
    pixels = generate(model, [params(1)])[0][0]
    assert not comparison.offer(params(1, loras=(("style", 1.0),)), 0, pixels)
    assert comparison.work is None
    assert comparison.offer(params(1), 0, pixels)

    class Merged:
        active = (("style", 1.0),)

    model.adapters = Merged()  # type: ignore[assignment]
    assert comparison.work is None
    assert outcomes() == {"dropped": 1}


def test_failure_harms_no_request(
    model: LoadedModel, scheduler: Scheduler, comparison: ImageComparison, outcomes: Any, device_failures: list[str]
) -> None:
    engine = model.fp16_engines[spec.UNET].engines[0]
    assert isinstance(engine, Stub)
    count, _ = decibels()
    engine.fails = RuntimeError("out of memory")
    results(scheduler.submit(params(1)))
    eventually(lambda: outcomes() == {"failed": 1}, "the comparison fails")
    engine.fails, engine.poison = None, (0, math.nan)
    results(scheduler.submit(params(2)))
    eventually(lambda: outcomes() == {"failed": 2}, "the comparison fails")
    results(scheduler.submit(params(3)))
    assert scheduler.healthy() and not device_failures and decibels()[0] == count


def test_steps_in_fp16_do_not_count_as_8_bit(model: LoadedModel) -> None:
    """Mixed loops serve, and the reference runs all steps in fp16."""
    model.fp16_steps = Fp16Steps(first=4)
    served = generate(model, [params(1)])[0][0]
    np.testing.assert_array_equal(served, generate(model.in_fp16(), [params(1)])[0][0])
    model.fp16_steps, model.loops = Fp16Steps(), {}
    assert (generate(model, [params(1)])[0][0] != served).any()
    assert not model.in_fp16().fp16_engines


def test_warm_up_generates_in_fp16(model: LoadedModel) -> None:
    sizes = SizeList(((64, 64), (96, 64)))
    served = ServedModel(64, 64, sizes, has_refiner=True, defaults=Defaults())
    loaded = Loaded(model, served, "linear/1", "cpu", "aot_inductor", 0)
    warm_up(loaded)
    assert not fp16_runs(model)
    warm_up(loaded, comparison=ImageComparison(model, every=1))
    engine = model.fp16_engines[spec.UNET].engines[0]
    assert isinstance(engine, Stub)
    assert {tuple(inputs["sample"].shape[2:]) for inputs in engine.seen} == {(8, 8), (8, 12)}


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
            assert not any(loop.images for loop in scheduler.runners[0].model.loops.values())
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
