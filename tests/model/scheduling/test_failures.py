"""Cancelled requests, failing engines and devices, and the scheduler's end: other requests are unaffected."""

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from model.denoising.eager_loop import EagerLoop
from model.denoising.loop import ImageState
from model.errors import BrokenImage, Cancelled, EngineError, OutOfDeviceMemory, ReleaseNotLoaded, Unavailable
from model.pipeline import loaded_model, spec
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.runner import Runner
from model.pipeline.text_to_image import generate
from model.scheduling import scheduler as scheduling
from model.scheduling.job import ImageEvent, StepEvent
from model.scheduling.scheduler import Scheduler
from model.scheduling.step_times import measure_step_times
from model.settings import Limits
from tests.support.images import pixels
from tests.support.linear_networks import PLAIN, linear_model, stub
from tests.support.scheduling import Gate, params, paused, results, settle
from tests.support.waiting import TIMEOUT_SECONDS, eventually

WHOLE_QUEUE = params(90, num_images=8)
"""A request that is refused unless all places in the queue are free."""

# -- cancellation -----------------------------------------------------------------------------------------------------


def test_waiting_request_never_runs_after_its_cancellation(gate: Gate, scheduler: Scheduler) -> None:
    running = [scheduler.submit(params(seed)) for seed in (1, 2)]
    cancelled, waiting = scheduler.submit(params(3)), scheduler.submit(params(4))
    scheduler.cancel(cancelled, Cancelled("The client left."))
    gate.open()
    with pytest.raises(Cancelled):
        results(cancelled)
    results(*running, waiting)
    assert 3 not in gate.order
    results(scheduler.submit(WHOLE_QUEUE))


def test_cancelled_image_leaves_before_the_next_step(gate: Gate, scheduler: Scheduler) -> None:
    """Other images are unaffected, and the next request takes its batch entries."""
    cancelled, other = scheduler.submit(params(1, num_inference_steps=50)), scheduler.submit(params(2))
    waiting = scheduler.submit(params(3))
    gate.run(2)
    scheduler.cancel(cancelled, Cancelled("The client left."))
    begun = len(gate.steps)
    gate.open()
    with pytest.raises(Cancelled):
        results(cancelled)
    results(other, waiting)
    assert all(1 not in seeds for seeds in gate.seeds[begun + 1 :])  # one more step may have begun before
    [expected] = generate(linear_model(), [params(2)])[0]
    assert np.array_equal(pixels(other.result.result().images[0]), expected)


def test_cancellation_removes_all_images_of_a_request(gate: Gate, scheduler: Scheduler) -> None:
    cancelled = scheduler.submit(params(1, num_images=6, use_refiner=True))
    gate.run(3)
    scheduler.cancel(cancelled, Cancelled("The client left."))
    gate.open()
    with pytest.raises(Cancelled):
        results(cancelled)
    settle(scheduler)
    assert all(not loop.images for loop in scheduler.runners[0].model.loops.values())
    gate.steps.clear()
    results(scheduler.submit(params(9)))
    assert gate.seeds == [[9]] * 4, "a loop without images still takes steps"
    results(scheduler.submit(WHOLE_QUEUE))


# -- failures ---------------------------------------------------------------------------------------------------------


def test_broken_image_fails_its_request_only(model: LoadedModel, scheduler: Scheduler) -> None:
    """One image is NaN. The next request in the same loop gives the expected pixels."""
    [expected] = generate(linear_model(), [PLAIN])[0]
    stub(model, spec.UNET).poison = (0, float("nan"))
    with pytest.raises(BrokenImage, match=r"image 0 of 1 \(counted from 0\)"):
        results(scheduler.submit(params(1)))
    [result] = results(scheduler.submit(PLAIN))
    assert np.array_equal(pixels(result.images[0]), expected)
    assert scheduler.healthy()


@pytest.mark.parametrize("component", [spec.UNET, spec.TEXT_ENCODER, spec.VAE_DECODER])
def test_failed_engine_fails_no_later_request(
    component: str, model: LoadedModel, scheduler: Scheduler, device_failures: list[str]
) -> None:
    stub(model, component).fails = EngineError("it does not run")
    with pytest.raises(EngineError, match="it does not run"):
        results(scheduler.submit(params(1, num_images=3)))
    stub(model, component).fails = None
    results(scheduler.submit(WHOLE_QUEUE))
    assert scheduler.healthy() and not device_failures


@pytest.mark.parametrize("failure", [ZeroDivisionError("x"), torch.AcceleratorError("CUDA error: x")])
def test_error_after_the_last_step_of_an_image(
    failure: Exception, model: LoadedModel, scheduler: Scheduler, device_failures: list[str]
) -> None:
    """A loop on a GPU removes finished images, and then waits for the device, which may report an error."""

    class FailingLoop(EagerLoop):
        def step(self) -> list[ImageState]:
            if super().step():
                raise failure
            return []

    model.loops[spec.UNET, 64, 64] = FailingLoop(model.denoiser(spec.UNET, 64, 64), 64, 64)
    with paused(scheduler):
        failing = scheduler.submit(params(1, width=64, num_images=2))
        others = [scheduler.submit(params(seed, num_inference_steps=40)) for seed in (2, 3, 4)]
    device_failed = isinstance(failure, torch.AcceleratorError)
    with pytest.raises(Unavailable if device_failed else ZeroDivisionError):
        results(failing)
    for other in others:
        with pytest.raises(Unavailable) if device_failed else nullcontext():
            results(other)
    eventually(lambda: len(device_failures) == device_failed, "a failure of the device is reported once")
    assert scheduler.healthy() is not device_failed


def test_image_that_cannot_join_the_refiner_fails_alone(model: LoadedModel, scheduler: Scheduler) -> None:
    class FullLoop(EagerLoop):
        def add(self, image: ImageState) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.loops[spec.REFINER_UNET, 64, 96] = FullLoop(model.denoiser(spec.REFINER_UNET, 64, 96), 64, 96)
    refined, other = scheduler.submit(params(1, use_refiner=True)), scheduler.submit(params(2, num_inference_steps=40))
    with pytest.raises(torch.OutOfMemoryError):
        results(refined)
    assert len(results(other)[0].images) == 1 and scheduler.healthy()


def test_a_loop_of_the_refiner_that_cannot_be_made_fails_its_request_only(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engines are read at the first use of a size without warm-up."""
    make = loaded_model.make_loop_in_parts

    def fail(model: LoadedModel, unet: str, *arguments: Any) -> Iterator[None]:
        if unet == spec.REFINER_UNET:
            raise ReleaseNotLoaded("The refiner_unet engine of this size cannot be read.")
        return (yield from make(model, unet, *arguments))

    monkeypatch.setattr(loaded_model, "make_loop_in_parts", fail)
    other = scheduler.submit(params(2, num_inference_steps=100))
    refined = scheduler.submit(params(1, use_refiner=True))
    with pytest.raises(ReleaseNotLoaded):
        results(refined)
    results(other, scheduler.submit(params(3)))
    assert scheduler.healthy()


def test_an_error_while_errors_are_answered_ends_the_server(
    scheduler: Scheduler, device_failures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(scheduler, "_step", fail)
    monkeypatch.setattr(scheduler, "_free", fail)
    with pytest.raises((Unavailable, RuntimeError)):
        results(scheduler.submit(params(1)))
    eventually(lambda: bool(device_failures), "the failure is reported")
    with pytest.raises(Unavailable):
        scheduler.submit(params(2))
    monkeypatch.undo()


def test_a_failed_measurement_leaves_no_image_in_a_loop(
    model: LoadedModel, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullLoop(EagerLoop):
        added = 0

        def add(self, image: ImageState) -> None:
            self.added += 1
            if self.added == 3:  # the second image of the second call
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().add(image)

    monkeypatch.setattr(scheduling, "IDLE_SECONDS", 0.01)
    loop = model.loops[spec.UNET, 64, 96] = FullLoop(model.denoiser(spec.UNET, 64, 96), 64, 96)
    scheduler.when_idle(measure_step_times(model, [params(1)]))
    eventually(lambda: loop.added == 3, "the measurement fails")
    results(scheduler.submit(params(2)), scheduler.submit(params(3, width=64)))
    assert not loop.images


@pytest.mark.parametrize("previews", [True])
def test_failed_preview_fails_its_request_only(model: LoadedModel, scheduler: Scheduler) -> None:
    """Another image of the same step is finished."""

    class FailingLoop(EagerLoop):
        def latents(self, image: ImageState) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.loops[spec.UNET, 64, 96] = FailingLoop(model.denoiser(spec.UNET, 64, 96), 64, 96)
    with paused(scheduler):
        previewed = scheduler.submit(params(1, num_images=2, num_inference_steps=40), lambda event: None, 4)
        others = [scheduler.submit(params(2)), scheduler.submit(params(3, width=64, num_inference_steps=50))]
    with pytest.raises(torch.OutOfMemoryError):
        results(previewed)
    results(*others)
    assert scheduler.healthy()


def test_device_failure_answers_all_requests_with_unavailable(
    model: LoadedModel, scheduler: Scheduler, device_failures: list[str]
) -> None:
    """Also one whose image has left the loops: its encoding fails after the device."""
    failure = torch.AcceleratorError("CUDA error: an illegal memory access\nmore")
    encoding, device_has_failed = threading.Event(), threading.Event()

    def fail_later(event: StepEvent | ImageEvent) -> None:
        if isinstance(event, ImageEvent):
            encoding.set()
            assert device_has_failed.wait(TIMEOUT_SECONDS)
            raise failure

    encoded = scheduler.submit(params(3), fail_later)
    assert encoding.wait(TIMEOUT_SECONDS)
    stub(model, spec.UNET).fails = failure
    with pytest.raises(Unavailable, match=r"The GPU has failed \(CUDA error: an illegal memory access\)"):
        results(scheduler.submit(params(1)))
    eventually(lambda: bool(device_failures), "the failure is reported")
    assert not scheduler.healthy()
    with pytest.raises(Unavailable):
        scheduler.submit(params(2))
    device_has_failed.set()
    with pytest.raises(Unavailable, match="The GPU has failed"):
        results(encoded)
    settle(scheduler)
    assert len(device_failures) == 1


@pytest.mark.parametrize("limits", [Limits(stuck_seconds=0.05)])
def test_scheduler_is_unhealthy_during_a_stuck_step(gate: Gate, scheduler: Scheduler) -> None:
    assert scheduler.healthy()
    job = scheduler.submit(params(1))
    eventually(lambda: not scheduler.healthy(), "the scheduler is unhealthy")
    gate.open()
    results(job)
    eventually(scheduler.healthy, "the scheduler is healthy again")


def test_closed_scheduler_answers_accepted_requests(gate: Gate, scheduler: Scheduler) -> None:
    jobs = [scheduler.submit(params(seed)) for seed in range(4)]
    gate.run(1)
    jobs.append(scheduler.submit(params(4)))  # no round will take it from the inbox
    call = scheduler.call(lambda: "done")
    closing = threading.Thread(target=scheduler.close)
    closing.start()
    eventually(lambda: not scheduler.healthy(), "the scheduler is being closed")
    gate.open()
    closing.join(TIMEOUT_SECONDS)
    for job in jobs:
        with pytest.raises(Unavailable, match="has ended"):
            results(job)
    assert call.result(TIMEOUT_SECONDS) == "done"
    with pytest.raises(Unavailable):
        scheduler.submit(params(9))


def test_failed_warm_up_closes_the_scheduler(model: LoadedModel) -> None:
    def fail() -> None:
        raise OutOfDeviceMemory("The release does not fit.")

    scheduler = Scheduler([Runner(model)], Limits(), lambda: None, prepare=fail)
    with pytest.raises(OutOfDeviceMemory, match="does not fit"):
        scheduler.wait_ready()
    assert not scheduler.healthy()
    with pytest.raises(Unavailable):
        scheduler.submit(params(1))


def test_abandon_answers_during_the_warm_up(model: LoadedModel, device_failures: list[str]) -> None:
    """With ranks, the warm-up hangs if one of them ends."""
    hangs = threading.Event()

    def prepare() -> None:
        assert hangs.wait(TIMEOUT_SECONDS)
        raise RuntimeError("The collective failed.")

    scheduler = Scheduler([Runner(model)], Limits(), lambda: device_failures.append("called"), prepare=prepare)
    waiting = scheduler.submit(params(1))
    scheduler.abandon("A rank has ended.")
    with pytest.raises(Unavailable, match="A rank has ended"):
        results(waiting)
    assert device_failures == ["called"]
    hangs.set()
    with pytest.raises(RuntimeError, match="collective"):
        scheduler.wait_ready()
