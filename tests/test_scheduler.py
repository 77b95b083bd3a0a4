"""The in-flight batching thread, on networks of a line: who joins when, who is refused, and what outlives a failure."""

import base64
import io
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from model import metrics
from model.api.request import GenerationRequest, resolve
from model.denoising.eager_loop import EagerLoop
from model.denoising.loop import ImageState
from model.denoising.sampler_names import SAMPLERS
from model.errors import BrokenImage, Cancelled, EngineError, Overloaded, Unavailable
from model.loading.load import Loaded
from model.pipeline import spec
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import GenerationParams
from model.pipeline.preview import fit_preview_map
from model.pipeline.runner import Runner
from model.pipeline.text_to_image import generate
from model.scheduling.job import ImageEvent, Job, StepEvent
from model.scheduling.scheduler import Scheduler
from model.settings import Limits
from tests.support.linear_networks import PLAIN, linear_model, stub

SECONDS = 60  # long enough for any machine: a test that waits for all of it fails


class Gate:
    """Holds the thread before each step until `let`; remembers which rows each step moved."""

    def __init__(self, model: LoadedModel) -> None:
        self.steps: list[tuple[str, int, list[int]]] = []  # component, width, seeds
        self._allowed = threading.Semaphore(0)
        self._open = False
        gate = self
        self.seeds: dict[int, int] = {}

        class GatedLoop(EagerLoop):
            def step(self) -> list[ImageState]:
                if not gate._open:
                    assert gate._allowed.acquire(timeout=SECONDS)
                seeds = [row.generator.initial_seed() for row in self.images]
                gate.steps.append((self._networks.unet.component, self._width, seeds))
                return super().step()

        def loop(component: str, height: int, width: int) -> EagerLoop:
            key = (component, height, width)
            if key not in model.loops:
                model.loops[key] = GatedLoop(model.step_networks(component), height, width)
                model.loops[key].capacity = self.capacity
                model.loops[key].efficient_batch = self.efficient_batch
            return model.loops[key]  # type: ignore[return-value]

        self.capacity = self.efficient_batch = 4  # rows: two images with guidance
        model.loop = loop  # type: ignore[method-assign]

    def let(self, steps: int) -> None:
        self._allowed.release(steps)

    def open(self) -> None:
        self._open = True
        self._allowed.release(1000)


@pytest.fixture
def model() -> LoadedModel:
    return linear_model()


@pytest.fixture
def gate(model: LoadedModel) -> Iterator[Gate]:
    gate = Gate(model)
    yield gate
    gate.open()


@pytest.fixture
def failures() -> list[str]:
    return []


@pytest.fixture
def scheduler(model: LoadedModel, failures: list[str], request: pytest.FixtureRequest) -> Iterator[Scheduler]:
    gate = request.getfixturevalue("gate") if "gate" in request.fixturenames else None
    scheduler = Scheduler(Runner(model), Limits(max_queue=8), lambda: failures.append("device"))
    yield scheduler
    if gate is not None:
        gate.open()
    scheduler.close()


def asked(seed: int, **changes: object) -> GenerationParams:
    return replace(PLAIN, seed=seed, **changes)  # type: ignore[arg-type]


def eventually(condition: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(SECONDS * 100):
        if condition():
            return
        waiting.wait(0.01)
    raise AssertionError("it never happened")


def settled(scheduler: Scheduler) -> None:
    """Return once the thread has done all that was sent to it: two whole rounds later."""
    for _ in range(2):
        scheduler.call(lambda: None).result(SECONDS)


def held(scheduler: Scheduler) -> threading.Event:
    """Hold the thread until the event is set: what is submitted by then arrives at one moment."""
    begun, over = threading.Event(), threading.Event()

    def wait_for_it() -> None:
        begun.set()
        over.wait(SECONDS)

    scheduler.call(wait_for_it)
    assert begun.wait(SECONDS)
    return over


def pixels(data: str) -> npt.NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def test_a_picture_is_the_same_as_from_generate(model: LoadedModel, scheduler: Scheduler) -> None:
    request = asked(5, num_images=3, use_refiner=True, scheduler="DPM++ 2M SDE Karras")
    expected = generate(linear_model(), [request])[0]
    drawn = scheduler.submit(request).result.result(SECONDS)
    assert len(drawn.images) == 3
    for data, picture in zip(drawn.images, expected, strict=True):
        assert np.array_equal(pixels(data), picture)
    assert list(drawn.timings) == ["queue", "text", "denoise", "refine", "decode", "encode"]
    assert all(milliseconds >= 0 for milliseconds in drawn.timings.values())


def test_a_newcomer_waits_for_one_step(gate: Gate, scheduler: Scheduler) -> None:
    first = scheduler.submit(asked(1))
    gate.let(1)
    eventually(lambda: len(gate.steps) == 1)
    second = scheduler.submit(asked(2))
    gate.open()
    wait([first.result, second.result], SECONDS)
    together = [2 in seeds for _, _, seeds in gate.steps].index(True)
    assert together <= 2  # the step under way at its arrival goes without it, and no other of the four
    assert gate.steps[together][2] == [1, 2]


def test_images_come_first_come_first_served_and_split_freely(gate: Gate, scheduler: Scheduler) -> None:
    jobs = [scheduler.submit(asked(0)), scheduler.submit(asked(10, num_images=3)), scheduler.submit(asked(20))]
    gate.open()
    for job in jobs:
        job.result.result(SECONDS)
    order = list(dict.fromkeys(seed for _, _, seeds in gate.steps for seed in seeds))
    assert order == [0, 10, 11, 12, 20]
    assert max(len(seeds) for _, _, seeds in gate.steps) == 2


def test_rows_are_filled_by_images_with_and_without_guidance(gate: Gate, scheduler: Scheduler) -> None:
    changes: list[dict[str, object]] = [{"guidance_scale": 1.0}, {}, {"guidance_scale": 1.0}, {"guidance_scale": 1.0}]
    jobs = [scheduler.submit(asked(seed, **each)) for seed, each in enumerate(changes)]
    gate.let(1)
    eventually(lambda: len(gate.steps) == 1)
    gate.open()
    for job in jobs:
        job.result.result(SECONDS)
    assert gate.steps[1][2] == [0, 1, 2]  # four rows; the fourth image waits for the first to be done
    assert [seeds for _, _, seeds in gate.steps].count([0, 1, 2]) >= 3
    assert all(len(seeds) <= 3 for _, _, seeds in gate.steps)


def test_none_is_overtaken_by_one_that_takes_less(gate: Gate, scheduler: Scheduler) -> None:
    """An image whose guidance ends after its second step leaves a row, and the next in the queue needs two."""
    gate.capacity = gate.efficient_batch = 3
    blocked = held(scheduler)
    first = scheduler.submit(asked(0, end_cfg_frac=0.5))
    others = [scheduler.submit(asked(1)), scheduler.submit(asked(2, guidance_scale=1.0))]
    blocked.set()
    gate.open()
    for job in (first, *others):
        job.result.result(SECONDS)
    steps = [seeds for _, _, seeds in gate.steps]
    assert steps == [[0], [0], [0, 1], [0, 1], [1, 2], [1, 2], [2], [2]]


def test_few_run_at_once_while_more_would_not_pay(gate: Gate, scheduler: Scheduler) -> None:
    gate.capacity, gate.efficient_batch = 8, 2
    jobs = [scheduler.submit(asked(seed)) for seed in (0, 10, 20)]
    gate.open()
    for job in jobs:
        job.result.result(SECONDS)
    assert [seeds for _, _, seeds in gate.steps] == [[seed] for seed in (0, 10, 20) for _ in range(4)]


@pytest.mark.parametrize(
    "first, second, together",
    [
        ({"num_inference_steps": 12}, {"num_inference_steps": 5}, 5),
        ({"num_inference_steps": 12}, {"num_inference_steps": 6}, 0),
        ({"num_inference_steps": 12}, {"num_inference_steps": 7, "guidance_scale": 1.0}, 7),
        ({"num_inference_steps": 12}, {"num_inference_steps": 8, "guidance_scale": 1.0}, 0),
        ({"num_inference_steps": 12}, {"num_inference_steps": 3, "num_images": 2}, 3),
        ({"num_inference_steps": 12}, {"num_inference_steps": 4, "num_images": 2}, 0),
        ({"num_inference_steps": 8, "use_refiner": True, "denoising_frac": 0.25}, {"num_inference_steps": 3}, 2),
    ],
)
def test_one_that_is_soon_gone_joins_where_few_run_at_once(
    first: dict[str, Any], second: dict[str, Any], together: int, gate: Gate, scheduler: Scheduler
) -> None:
    gate.capacity, gate.efficient_batch = 16, 2
    blocked = held(scheduler)
    jobs = [scheduler.submit(asked(0, **first)), scheduler.submit(asked(10, **second))]
    blocked.set()
    gate.open()
    for job in jobs:
        job.result.result(SECONDS)
    shared = [seeds for name, _, seeds in gate.steps if name == spec.UNET and 0 in seeds and 10 in seeds]
    assert len(shared) == together


def test_one_that_is_soon_gone_overtakes_nobody(gate: Gate, scheduler: Scheduler) -> None:
    gate.capacity, gate.efficient_batch = 16, 2
    blocked = held(scheduler)
    jobs = [scheduler.submit(asked(seed, num_inference_steps=steps)) for seed, steps in ((0, 4), (1, 4), (2, 1))]
    blocked.set()
    gate.open()
    for job in jobs:
        job.result.result(SECONDS)
    assert [seeds for _, _, seeds in gate.steps] == [[0]] * 4 + [[1, 2]] + [[1]] * 3


def test_the_images_of_a_request_run_together_all_the_same(gate: Gate, scheduler: Scheduler) -> None:
    gate.capacity, gate.efficient_batch = 8, 2
    jobs = [scheduler.submit(asked(0)), scheduler.submit(asked(10, num_images=2))]
    gate.open()
    for job in jobs:
        job.result.result(SECONDS)
    assert [seeds for _, _, seeds in gate.steps] == [[0]] * 4 + [[10, 11]] * 4


def test_all_join_once_as_many_are_here_as_fit(gate: Gate, scheduler: Scheduler) -> None:
    gate.capacity, gate.efficient_batch = 8, 2
    jobs = [scheduler.submit(asked(seed)) for seed in range(3)]
    gate.let(1)
    eventually(lambda: len(gate.steps) == 1)
    jobs.append(scheduler.submit(asked(3, num_images=2)))  # five are here; the second step may be under way
    gate.let(1)
    eventually(lambda: len(gate.steps) == 2)
    gate.open()
    for job in jobs:
        job.result.result(SECONDS)
    steps = [seeds for _, _, seeds in gate.steps]
    full = steps.index([0, 1, 2, 3])
    assert steps[:full] in ([[0]], [[0], [0]])
    assert steps[4] == [1, 2, 3, 4]  # the first has left, and four are here still
    assert steps[-1] == [4] and len(steps) == 8  # the fifth joined then, and not when the other three had gone


def test_an_image_at_the_refiner_counts_and_is_not_held_back_there(gate: Gate, scheduler: Scheduler) -> None:
    gate.capacity, gate.efficient_batch = 8, 2
    few = [scheduler.submit(asked(seed, use_refiner=True)) for seed in (0, 1)]
    gate.open()
    for job in few:
        job.result.result(SECONDS)
    turns = [(name, seeds) for name, _, seeds in gate.steps]
    base, refiner = spec.UNET, spec.REFINER_UNET
    assert turns == [(name, [seed]) for seed in (0, 1) for name in (base, base, refiner, refiner)]
    gate.steps.clear()
    scheduler.submit(asked(4, num_images=4, use_refiner=True)).result.result(SECONDS)
    assert [seeds for _, _, seeds in gate.steps] == [[4, 5, 6, 7]] * 4


def test_a_refiner_that_is_full_is_waited_for(gate: Gate, scheduler: Scheduler) -> None:
    """One step of the base and three of the refiner: two images are in it when the next two come from the base."""
    jobs = [scheduler.submit(asked(seed, use_refiner=True, denoising_frac=0.25)) for seed in range(4)]
    gate.open()
    for job in jobs:
        job.result.result(SECONDS)
    refined = [seeds for name, _, seeds in gate.steps if name == spec.REFINER_UNET]
    assert max(len(seeds) for seeds in refined) == 2
    assert list(dict.fromkeys(seed for seeds in refined for seed in seeds)) == [0, 1, 2, 3]


def test_each_size_has_its_own_few(gate: Gate, scheduler: Scheduler) -> None:
    gate.capacity, gate.efficient_batch = 8, 2
    jobs = [scheduler.submit(asked(seed, width=width)) for seed, width in enumerate((64, 64, 96, 96))]
    gate.open()
    for job in jobs:
        job.result.result(SECONDS)
    assert {len(seeds) for _, _, seeds in gate.steps} == {1}
    order = list(dict.fromkeys(seed for _, _, [seed] in gate.steps))
    assert order.index(0) < order.index(1) and order.index(2) < order.index(3)
    assert abs(order.index(0) - order.index(2)) == 1  # neither size waited for the other's second image


def test_sizes_take_turns_and_none_waits_for_another(gate: Gate, scheduler: Scheduler) -> None:
    jobs = [scheduler.submit(asked(seed, width=width)) for seed, width in enumerate((64, 64, 96, 96, 64))]
    gate.open()
    for job in jobs:
        job.result.result(SECONDS)
    widths = [width for _, width, _ in gate.steps]
    last = {width: len(widths) - 1 - widths[::-1].index(width) for width in (64, 96)}
    both = widths[widths.index(96) : min(last.values()) + 1]
    assert len(both) >= 7 and all(one != next_one for one, next_one in itertools.pairwise(both))


def test_none_is_ahead_of_what_runs(gate: Gate, scheduler: Scheduler) -> None:
    arrived = threading.Event()
    scheduler.call(lambda: arrived.wait(SECONDS))
    jobs = [scheduler.submit(asked(seed)) for seed in range(4)]  # two run, two wait
    arrived.set()
    gate.let(1)
    eventually(lambda: len(gate.steps) == 1 and [job.queue_position for job in jobs] == [0, 0, 0, 1])
    small = scheduler.submit(asked(4, width=64))
    gate.let(1)
    eventually(lambda: len(gate.steps) == 2 and small.joined == 1)
    assert (small.queue_position, jobs[3].queue_position) == (0, 1)


def test_a_further_size_waits_and_is_not_overtaken_for_ever(model: LoadedModel, gate: Gate) -> None:
    scheduler = Scheduler(Runner(model), Limits(max_queue=64, sizes_at_once=1), lambda: None)
    first = scheduler.submit(asked(0))
    eventually(lambda: bool(model.loops))
    other = scheduler.submit(asked(1, width=64))
    later = [scheduler.submit(asked(seed)) for seed in range(2, 6)]
    gate.open()
    for job in (first, other, *later):
        job.result.result(SECONDS)
    order = list(dict.fromkeys(seed for _, _, seeds in gate.steps for seed in seeds))
    assert order == [0, 1, 2, 3, 4, 5]


def test_base_and_refiner_take_turns(gate: Gate, scheduler: Scheduler) -> None:
    refined = scheduler.submit(asked(1, use_refiner=True))
    plain = scheduler.submit(asked(2, num_inference_steps=12))
    gate.open()
    for job in (refined, plain):
        job.result.result(SECONDS)
    names = [name for name, _, _ in gate.steps]
    at = names.index(spec.REFINER_UNET)
    assert names[at : at + 3] == [spec.REFINER_UNET, spec.UNET, spec.REFINER_UNET]


@pytest.mark.parametrize("fraction", [0.0, 0.999])
def test_a_part_without_steps_is_passed_over(fraction: float, model: LoadedModel, scheduler: Scheduler) -> None:
    request = asked(1, use_refiner=True, denoising_frac=fraction)
    [expected] = generate(linear_model(), [request])[0]
    drawn = scheduler.submit(request).result.result(SECONDS)
    assert np.array_equal(pixels(drawn.images[0]), expected)
    assert bool(drawn.warnings) == (fraction > 0.5)


# -- limits -----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_in_the_queue_is_refused_at_once(gate: Gate, scheduler: Scheduler) -> None:
    running = [scheduler.submit(asked(seed)) for seed in (1, 2)]
    gate.let(1)
    eventually(lambda: scheduler._queued_images == 0)
    queued = scheduler.submit(asked(3, num_images=8))
    with pytest.raises(Overloaded, match="8 images are waiting, and this server queues 8") as refused:
        scheduler.submit(asked(4))
    assert 1 <= refused.value.retry_after <= 60
    gate.open()
    for job in (*running, queued):
        job.result.result(SECONDS)
    assert scheduler._queued_images == 0
    scheduler.submit(asked(4, num_images=8)).result.result(SECONDS)


# -- cancellation -----------------------------------------------------------------------------------------------------


def test_a_request_that_is_given_up_while_it_waits_never_runs(gate: Gate, scheduler: Scheduler) -> None:
    running = [scheduler.submit(asked(seed)) for seed in (1, 2)]
    waiting, next_one = scheduler.submit(asked(3)), scheduler.submit(asked(4))
    scheduler.cancel(waiting, Cancelled("given up"))
    gate.open()
    with pytest.raises(Cancelled):
        waiting.result.result(SECONDS)
    for job in (*running, next_one):
        job.result.result(SECONDS)
    assert 3 not in {seed for _, _, seeds in gate.steps for seed in seeds}
    assert scheduler._queued_images == 0


def test_a_running_request_frees_its_rows_before_the_next_step(gate: Gate, scheduler: Scheduler) -> None:
    """Its companions do not feel it, and whoever waits takes its place."""
    gone, stays = scheduler.submit(asked(1, num_inference_steps=50)), scheduler.submit(asked(2))
    waits = scheduler.submit(asked(3))
    gate.let(2)
    eventually(lambda: len(gate.steps) == 2)
    scheduler.cancel(gone, Cancelled("given up"))
    before = len(gate.steps)
    gate.open()
    with pytest.raises(Cancelled):
        gone.result.result(SECONDS)
    for job in (stays, waits):
        job.result.result(SECONDS)
    # The step that was under way when it was cancelled may still have moved it.
    assert all(1 not in seeds for _, _, seeds in gate.steps[before + 1 :])
    [expected] = generate(linear_model(), [asked(2)])[0]
    assert np.array_equal(pixels(stays.result.result().images[0]), expected)


def test_all_images_of_a_request_go_where_it_is_given_up(gate: Gate, scheduler: Scheduler) -> None:
    gone = scheduler.submit(asked(1, num_images=6, use_refiner=True))
    gate.let(3)
    eventually(lambda: len(gate.steps) == 3)
    scheduler.cancel(gone, Cancelled("given up"))
    gate.open()
    with pytest.raises(Cancelled):
        gone.result.result(SECONDS)
    settled(scheduler)
    assert scheduler._queued_images == 0 and not scheduler._running and not scheduler._active_loops
    assert all(not loop.images for loop in scheduler.model.loops.values())
    scheduler.submit(asked(9)).result.result(SECONDS)


def test_giving_up_what_is_finished_does_nothing(scheduler: Scheduler) -> None:
    job = scheduler.submit(asked(1))
    drawn = job.result.result(SECONDS)
    scheduler.cancel(job, Cancelled("given up"))
    settled(scheduler)
    assert job.result.result() is drawn


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_broken_picture_is_that_request_s_alone(model: LoadedModel, scheduler: Scheduler) -> None:
    """NaN in a row, then the next request in the same loop: as if nothing had been."""
    [expected] = generate(linear_model(), [PLAIN])[0]
    unet = stub(model, spec.UNET)
    unet.poison = (0, float("nan"))
    with pytest.raises(BrokenImage, match=r"image 0 of 1 \(counted from 0\)"):
        scheduler.submit(asked(1)).result.result(SECONDS)
    assert np.array_equal(pixels(scheduler.submit(PLAIN).result.result(SECONDS).images[0]), expected)
    assert scheduler.healthy()


@pytest.mark.parametrize("component", [spec.UNET, spec.TEXT_ENCODER, spec.VAE_DECODER])
def test_a_failed_engine_fails_its_requests_and_no_later_one(
    component: str, model: LoadedModel, scheduler: Scheduler, failures: list[str]
) -> None:
    stub(model, component).fails = EngineError("it does not run")
    with pytest.raises(EngineError, match="it does not run"):
        scheduler.submit(asked(1, num_images=3)).result.result(SECONDS)
    stub(model, component).fails = None
    scheduler.submit(asked(2)).result.result(SECONDS)
    assert scheduler.healthy() and not failures and scheduler._queued_images == 0


def test_a_failure_of_one_size_leaves_the_other(model: LoadedModel, gate: Gate, scheduler: Scheduler) -> None:
    fails = scheduler.submit(asked(1, width=64))
    stays = scheduler.submit(asked(2))
    eventually(lambda: (spec.UNET, 64, 64) in model.loops)
    model.loops[(spec.UNET, 64, 64)].step = lambda: 1 / 0  # type: ignore[assignment]
    gate.open()
    with pytest.raises(ZeroDivisionError):
        fails.result.result(SECONDS)
    stays.result.result(SECONDS)


def test_an_image_that_cannot_go_on_to_the_refiner_fails_alone(
    model: LoadedModel, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(row: ImageState) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model.loop(spec.REFINER_UNET, 64, 96), "add", full)
    refined, other = scheduler.submit(asked(1, use_refiner=True)), scheduler.submit(asked(2, num_inference_steps=40))
    with pytest.raises(torch.OutOfMemoryError):
        refined.result.result(SECONDS)
    assert len(other.result.result(SECONDS).images) == 1
    assert scheduler.healthy()


def test_after_a_device_failure_nothing_is_promised(
    model: LoadedModel, scheduler: Scheduler, failures: list[str]
) -> None:
    stub(model, spec.UNET).fails = torch.AcceleratorError("CUDA error: an illegal memory access\nmore")
    with pytest.raises(Unavailable, match=r"The GPU has failed \(CUDA error: an illegal memory access\)"):
        scheduler.submit(asked(1)).result.result(SECONDS)
    eventually(lambda: bool(failures))
    assert not scheduler.healthy()
    with pytest.raises(Unavailable):
        scheduler.submit(asked(2))
    encoded = Job(scheduler.runner.plan(asked(3)), None, 0)  # as one whose picture was with the encoders
    scheduler._fail_from_worker(encoded, torch.AcceleratorError("CUDA error: an illegal memory access"))
    with pytest.raises(Unavailable, match="The GPU has failed"):
        encoded.result.result(SECONDS)
    scheduler.call(lambda: None).result(SECONDS)
    assert failures == ["device"]  # it is said once


def test_a_step_that_never_ends_is_no_health(model: LoadedModel, gate: Gate) -> None:
    scheduler = Scheduler(Runner(model), Limits(stuck_seconds=0.05), lambda: None)
    assert scheduler.healthy()
    job = scheduler.submit(asked(1))
    eventually(lambda: not scheduler.healthy())
    gate.open()
    job.result.result(SECONDS)
    eventually(scheduler.healthy)


# -- progress and metrics ---------------------------------------------------------------------------------------------


def test_progress_is_told_step_by_step_with_previews(model: LoadedModel, scheduler: Scheduler) -> None:
    scheduler.preview_map = scheduler.call(lambda: fit_preview_map(model, 64, 96)).result(SECONDS)
    told: list[StepEvent | ImageEvent] = []
    request = asked(1, num_images=2, num_inference_steps=6, use_refiner=True)
    drawn = scheduler.submit(request, told.append, preview_every=2).result.result(SECONDS)
    steps = [event for event in told if isinstance(event, StepEvent)]
    eventually(lambda: len([event for event in told if isinstance(event, StepEvent)]) == 12)
    assert sorted(event.step for event in steps) == list(range(1, 13))
    assert {event.steps for event in steps} == {12}
    previews = [event.preview for event in steps if event.preview is not None]
    assert previews and all(Image.open(io.BytesIO(base64.b64decode(data))).size == (12, 8) for data in previews)
    finished = {event.index: event.data for event in told if isinstance(event, ImageEvent)}
    assert [finished[index] for index in range(2)] == drawn.images


def test_what_happens_is_counted(model: LoadedModel, scheduler: Scheduler) -> None:
    def value(metric: object, **labels: str) -> float:
        found = metric.labels(**labels) if labels else metric  # type: ignore[attr-defined]
        return float(found._value.get())

    before = value(metrics.IMAGES), value(metrics.STEPS, component="unet")
    scheduler.submit(asked(1, num_images=2)).result.result(SECONDS)
    settled(scheduler)
    assert value(metrics.IMAGES) == before[0] + 2
    assert value(metrics.STEPS, component="unet") >= before[1] + 4
    assert value(metrics.QUEUE) == 0 and value(metrics.ACTIVE, component="unet") == 0


# -- on the compiled engines ------------------------------------------------------------------------------------------

requests = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(["a large red circle", "two green squares on white", "a blue line"]),
        "seed": st.integers(0, 2**32 - 2),
        "scheduler": st.sampled_from([name for name in SAMPLERS if name != "LCM"]),  # see tests/test_loop.py
        "num_inference_steps": st.integers(1, 5),
        "guidance_scale": st.sampled_from([1.0, 7.5]),
        "end_cfg_frac": st.sampled_from([0.4, 1.0]),
        "use_refiner": st.booleans(),
        "num_images": st.integers(1, 2),
        "width": st.sampled_from([64, 128]),
        "height": st.just(64),
        "output_format": st.just("png"),
    }
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mix=st.lists(requests, min_size=2, max_size=6))
def test_a_picture_does_not_depend_on_its_company(mix: list[dict[str, object]], loaded: Loaded) -> None:
    """Through queue, loops, refiner and decoder: at most 1 of 255 apart from the same request alone, in fp32."""
    batch = [resolve(GenerationRequest.model_validate(request), loaded.served) for request in mix]
    scheduler = Scheduler(Runner(loaded.model), Limits(), lambda: None)
    jobs: list[Job] = [scheduler.submit(request) for request in batch]
    drawn = [job.result.result(SECONDS) for job in jobs]
    for request, result in zip(batch, drawn, strict=True):
        expected = scheduler.call(lambda request=request: generate(loaded.model, [request])[0]).result(SECONDS)
        for data, picture in zip(result.images, expected, strict=True):
            assert np.abs(pixels(data).astype(int) - picture.astype(int)).max() <= 1
    scheduler.close()


def test_a_closed_scheduler_answers_what_it_had_accepted(model: LoadedModel, gate: Gate) -> None:
    scheduler = Scheduler(Runner(model), Limits(), lambda: None)
    jobs = [scheduler.submit(asked(seed)) for seed in range(4)]
    gate.let(1)
    eventually(lambda: len(gate.steps) == 1)
    jobs.append(scheduler.submit(asked(4)))  # nobody will take it in
    call = scheduler.call(lambda: "done")
    closing = threading.Thread(target=scheduler.close)
    closing.start()
    eventually(lambda: scheduler._closed)
    gate.let(1)
    closing.join(SECONDS)
    for job in jobs:
        with pytest.raises(Unavailable, match="has ended"):
            job.result.result(SECONDS)
    assert call.result(SECONDS) == "done"
    with pytest.raises(Unavailable):
        scheduler.submit(asked(9))


def test_stages_change_the_conditioning_of_one_image_only(model: LoadedModel) -> None:
    runner = Runner(model)
    plan = runner.plan(asked(1, num_images=2))
    first, second = plan.images()
    for image in (first, second):
        runner.advance(plan, image)
    first.cond.inputs["strength"] = torch.ones(1)
    assert "strength" not in second.cond.inputs
    assert first.cond.inputs["keys_values"] is second.cond.inputs["keys_values"]
