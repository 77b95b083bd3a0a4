"""Requests with images in the scheduler: several passes, their progress, and images that are still being encoded."""

import threading
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY

from model.cuda.streams import Outputs, SideStream
from model.errors import BrokenImage, Cancelled
from model.pipeline import spec
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import Mask
from model.pipeline.text_to_image import generate
from model.scheduling.job import ImageEvent, StepEvent
from model.scheduling.scheduler import Scheduler
from tests.support.images import pixels
from tests.support.linear_networks import linear_model, stub
from tests.support.scheduling import Gate, params, results, settle

LEVELS = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
MASK = Mask(np.random.default_rng(1).integers(0, 2, (64, 96), np.uint8) * np.uint8(255), "one", None, strength=0.75)
FROM_IMAGE = params(1, image=LEVELS, strength=0.5)  # two of four steps
INPAINT = params(2, image=LEVELS, masks=(MASK, replace(MASK, prompt="two", strength=1.0)), use_refiner=True)
INPAINT_STEPS = 3 + 4


class SlowEncoding(SideStream):
    """An encoding stream whose work is not done until the test says so."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.done = threading.Event()

    def record(self, outputs: Iterable[torch.Tensor]) -> Outputs:
        done = self.done

        class Slow(Outputs):
            def ready(self) -> bool:
                return done.is_set()

        return Slow(None, tuple(outputs))


def test_returns_the_images_of_generate(scheduler: Scheduler) -> None:
    text = params(5, num_images=3, use_refiner=True, scheduler="DPM++ 2M SDE Karras")
    mix = [text, FROM_IMAGE, INPAINT, replace(INPAINT, num_images=3, scheduler="Euler a", seed=7)]
    jobs = [scheduler.submit(request) for request in mix]
    for request, result in zip(mix, results(*jobs), strict=True):
        expected = generate(linear_model(), [request])[0]
        assert len(result.images) == request.num_images
        for data, image in zip(result.images, expected, strict=True):
            assert np.array_equal(pixels(data), image)
        assert all(milliseconds >= 0 for milliseconds in result.timings.values())
    assert list(jobs[0].result.result().timings) == ["queue", "text", "denoise", "refine", "decode", "encode"]


@pytest.mark.parametrize(("request_", "steps"), [(FROM_IMAGE, 2), (INPAINT, INPAINT_STEPS)], ids=["image", "masks"])
def test_counts_the_steps_that_run(request_: object, steps: int, scheduler: Scheduler) -> None:
    events: list[StepEvent | ImageEvent] = []
    results(scheduler.submit(request_, events.append))  # type: ignore[arg-type]
    counted = [event for event in events if isinstance(event, StepEvent)]
    assert [event.step for event in counted] == list(range(1, steps + 1))
    assert {event.steps for event in counted} == {steps}


def test_counts_images_by_task_and_steps(scheduler: Scheduler) -> None:
    def counts() -> list[float]:
        tasks = ("text_to_image", "image_to_image", "inpaint")
        values = [REGISTRY.get_sample_value("preheat_images_total", {"task": task}) for task in tasks]
        values.append(REGISTRY.get_sample_value("preheat_steps_total", {"component": "unet"}))
        return [value or 0 for value in values]

    before = counts()
    results(scheduler.submit(FROM_IMAGE), scheduler.submit(replace(INPAINT, num_images=2)))
    settle(scheduler)
    *images, steps = [after - earlier for after, earlier in zip(counts(), before, strict=True)]
    assert images == [0, 1, 2] and steps >= 4
    assert REGISTRY.get_sample_value("preheat_queue_images") == 0
    assert REGISTRY.get_sample_value("preheat_active_images", {"component": "unet"}) == 0


def test_encoding_does_not_hold_up_running_images(model: LoadedModel, gate: Gate, scheduler: Scheduler) -> None:
    model.encode_stream = encoding = SlowEncoding()
    running = scheduler.submit(params(9, num_inference_steps=8))
    gate.run(1)
    jobs = [scheduler.submit(replace(FROM_IMAGE, seed=seed)) for seed in (1, 2, 3)]
    gate.run(3)  # the requests arrived before the third step
    assert gate.seeds == [[9]] * 4
    # The loop has room for one more image. It is being encoded.
    assert [len(job.waiting_images) for job in jobs] == [0, 1, 1]
    encoding.done.set()
    gate.open()
    results(running, *jobs)
    assert [9, 1] in gate.seeds


@pytest.mark.parametrize("steps", [1, 5], ids=["first pass", "second pass"])
def test_cancellation_removes_an_image_in_any_pass(steps: int, gate: Gate, scheduler: Scheduler) -> None:
    cancelled = scheduler.submit(INPAINT)
    gate.run(steps)
    scheduler.cancel(cancelled, Cancelled("The client left."))
    begun = len(gate.steps)
    gate.open()
    results(scheduler.submit(params(90, num_images=8)))
    assert all(2 not in seeds for seeds in gate.seeds[begun + 1 :])
    with pytest.raises(Cancelled):
        results(cancelled)


@pytest.mark.parametrize("decoding", [0, 1], ids=["first pass", "second pass"])
def test_nan_in_any_pass_is_an_error(decoding: int, model: LoadedModel, scheduler: Scheduler) -> None:
    stub(model, spec.VAE_DECODER).poison = (decoding, float("nan"))
    with pytest.raises(BrokenImage):
        results(scheduler.submit(INPAINT))
