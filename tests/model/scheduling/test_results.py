"""Results of scheduled requests: the same images as alone, progress events, timings and metrics."""

import threading
import time
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from model.api.resolve import resolve
from model.cuda.streams import Outputs, SideStream
from model.denoising.sampler_specs import SAMPLERS
from model.errors import BrokenImage, Cancelled, Unavailable
from model.loading.load import Loaded
from model.pipeline import spec
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import Mask
from model.pipeline.runner import Runner
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from model.scheduling.job import ImageEvent, Job, StepEvent
from model.scheduling.scheduler import Scheduler
from model.settings import Limits
from tests.support.images import largest_difference, open_image, pixels
from tests.support.linear_networks import PLAIN, linear_model, stub
from tests.support.scheduling import Gate, params, results, settle
from tests.support.waiting import TIMEOUT_SECONDS


@pytest.mark.parametrize("fraction", [0.0, 0.999], ids=["no base steps", "no refiner steps"])
def test_skips_a_stage_without_steps(fraction: float, scheduler: Scheduler) -> None:
    request = params(1, use_refiner=True, denoising_frac=fraction)
    [expected] = generate(linear_model(), [request])[0]
    [result] = results(scheduler.submit(request))
    assert np.array_equal(pixels(result.images[0]), expected)
    assert bool(result.warnings) == (fraction > 0.5)


@pytest.mark.parametrize("previews", [True])
def test_emits_each_step_and_image_with_previews(model: LoadedModel, scheduler: Scheduler) -> None:
    events: list[StepEvent | ImageEvent] = []
    request = params(1, num_images=2, num_inference_steps=6, use_refiner=True)
    [result] = results(scheduler.submit(request, events.append, preview_every=2))

    def steps() -> list[StepEvent]:
        return [event for event in events if isinstance(event, StepEvent)]

    numbers = [event.step for event in steps()]
    assert len(numbers) == numbers[-1] == 12 and numbers == sorted(numbers)
    assert {event.steps for event in steps()} == {12}
    previews = [event.preview for event in steps() if event.preview is not None]
    assert previews and all(open_image(data).size == (12, 8) for data in previews)
    assert {event.index for event in steps() if event.preview is not None} == {0, 1}
    finished = {event.index: event.data for event in events if isinstance(event, ImageEvent)}
    assert [finished[index] for index in range(2)] == result.images


requests = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(["a large red circle", "two green squares on white", "a blue line"]),
        "seed": st.integers(0, 2**32 - 2),
        "scheduler": st.sampled_from([name for name in SAMPLERS if name != "LCM"]),  # see test_loop.py
        "num_inference_steps": st.integers(1, 5),
        "guidance_scale": st.sampled_from([1.0, 7.5]),
        "guidance_end": st.sampled_from([0.4, 1.0]),
        "use_refiner": st.booleans(),
        "num_images": st.integers(1, 2),
        "width": st.sampled_from([64, 128]),
        "height": st.just(64),
        "output_format": st.just("png"),
    }
).filter(lambda request: not (request["use_refiner"] and request["scheduler"] == "Heun"))


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mix=st.lists(requests, min_size=2, max_size=6))
def test_image_does_not_depend_on_the_batch(mix: list[dict[str, object]], loaded: Loaded) -> None:
    """On compiled engines, through queue, loops, refiner and decoder: at most 1/255 from the same request alone."""
    batch = [resolve(GenerationRequest.model_validate(request), loaded.served) for request in mix]
    scheduler = Scheduler([Runner(loaded.model)], Limits(), lambda: None)
    batched = results(*[scheduler.submit(request) for request in batch])
    for request, result in zip(batch, batched, strict=True):
        alone = scheduler.call(lambda request=request: generate(loaded.model, [request])[0]).result(TIMEOUT_SECONDS)
        for data, image in zip(result.images, alone, strict=True):
            assert largest_difference(pixels(data), image) <= 1
    scheduler.close()


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


def test_progress_counts_the_sampler_s_steps(scheduler: Scheduler) -> None:
    """With forecasts, a step of the loop stands for several of them. Metrics and log count the evaluations."""
    events: list[StepEvent | ImageEvent] = []
    name = "preheat_image_evaluations_sum"
    before = REGISTRY.get_sample_value(name) or 0
    [result] = results(scheduler.submit(params(1, num_inference_steps=20, forecast="fast"), events.append))
    done = [(event.step, event.steps) for event in events if isinstance(event, StepEvent)]
    assert len(done) == result.evaluations == 12
    assert [step for step, _ in done] == sorted({step for step, _ in done}) and done[-1] == (20, 20)
    assert (REGISTRY.get_sample_value(name) or 0) - before == 12


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


def make_job() -> Job:
    runner = Runner(linear_model())
    return Job(runner, runner.plan(PLAIN), None, 0)


def test_time_of_each_pass_counts_for_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two masks may have steps that the first has not, and the stages of two images may alternate."""
    events = [("queue", 1), ("text", 3), ("refine", 7), ("denoise", 20), ("refine", 22), ("decode", 23), ("refine", 30)]
    clock = iter([0, *(second for _, second in events)])
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    job = make_job()
    for stage, _ in events:
        job.end_stage(stage)
    expected = {"queue": 1000, "text": 2000, "refine": 4000 + 2000 + 7000, "denoise": 13000, "decode": 1000}
    assert job.timings() == expected


def test_first_result_of_a_job_is_final() -> None:
    job = make_job()
    assert job.fail(Cancelled("first")) and not job.fail(Unavailable("second"))
    for index in range(job.params.num_images):
        job.add_encoded_image(ImageEvent(index, "data"))
    with pytest.raises(Cancelled, match="first"):
        job.result.result(0)


def test_callbacks_of_the_result_may_call_the_job() -> None:
    job = make_job()
    returned: list[object] = []
    job.result.add_done_callback(lambda _: returned.extend([job.fail(Unavailable("second")), job.timings()]))
    thread = threading.Thread(target=job.fail, args=[Cancelled("first")], daemon=True)
    thread.start()
    thread.join(20)
    assert returned == [False, {}], "the callback waits for a lock that its own thread holds"
