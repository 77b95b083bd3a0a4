"""Results of scheduled requests: the same images as alone, progress events, and metrics."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.api.request import GenerationRequest
from model.api.resolve import resolve
from model.denoising.sampler_names import SAMPLERS
from model.loading.load import Loaded
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.preview import fit_preview_map
from model.pipeline.runner import Runner
from model.pipeline.text_to_image import generate
from model.scheduling.job import ImageEvent, StepEvent
from model.scheduling.scheduler import Scheduler
from model.settings import Limits
from tests.support.images import largest_difference, open_image, pixels
from tests.support.linear_networks import linear_model
from tests.support.scheduling import params, results
from tests.support.waiting import TIMEOUT_SECONDS


@pytest.mark.parametrize("fraction", [0.0, 0.999], ids=["no base steps", "no refiner steps"])
def test_skips_a_stage_without_steps(fraction: float, scheduler: Scheduler) -> None:
    request = params(1, use_refiner=True, denoising_frac=fraction)
    [expected] = generate(linear_model(), [request])[0]
    [result] = results(scheduler.submit(request))
    assert np.array_equal(pixels(result.images[0]), expected)
    assert bool(result.warnings) == (fraction > 0.5)


def test_emits_each_step_and_image_with_previews(model: LoadedModel, scheduler: Scheduler) -> None:
    scheduler.preview_map = scheduler.call(lambda: fit_preview_map(model, 64, 96)).result(TIMEOUT_SECONDS)
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


@pytest.mark.parametrize(
    "changes, expected",
    [({}, [2, 4]), ({"use_refiner": True, "denoising_frac": 2 / 3}, [2, 5])],
    ids=["base", "refiner after 4"],
)
def test_previews_follow_the_steps_of_an_image_on_all_unets(
    changes: dict[str, object], expected: list[int], model: LoadedModel, scheduler: Scheduler
) -> None:
    """A preview that is due after the last step of the base follows the refiner's first."""
    scheduler.preview_map = scheduler.call(lambda: fit_preview_map(model, 64, 96)).result(TIMEOUT_SECONDS)
    events: list[StepEvent] = []

    def listen(event: StepEvent | ImageEvent) -> None:
        if isinstance(event, StepEvent):
            events.append(event)

    results(scheduler.submit(params(1, num_inference_steps=6, **changes), listen, preview_every=2))
    assert len(events) == 6
    previews = [event.step for event in events if event.preview is not None]
    # A preview that is encoded during the next step has the number of that step.
    assert [due <= step for due, step in zip(expected, previews, strict=True)] == [True, True]


def test_stage_changes_the_conditioning_of_one_image_only(model: LoadedModel) -> None:
    runner = Runner(model)
    plan = runner.plan(params(1, num_images=2))
    first, second = plan.images()
    for image in (first, second):
        runner.advance(plan, image)
    first.cond.inputs["strength"] = torch.ones(1)
    assert "strength" not in second.cond.inputs
    assert first.cond.inputs["keys_values"] is second.cond.inputs["keys_values"]


requests = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(["a large red circle", "two green squares on white", "a blue line"]),
        "seed": st.integers(0, 2**32 - 2),
        "scheduler": st.sampled_from([name for name in SAMPLERS if name != "LCM"]),  # see test_loop.py
        "num_inference_steps": st.integers(1, 5),
        "guidance_scale": st.sampled_from([1.0, 7.5]),
        "end_cfg_frac": st.sampled_from([0.4, 1.0]),
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
    scheduler = Scheduler(Runner(loaded.model), Limits(), lambda: None)
    batched = results(*[scheduler.submit(request) for request in batch])
    for request, result in zip(batch, batched, strict=True):
        alone = scheduler.call(lambda request=request: generate(loaded.model, [request])[0]).result(TIMEOUT_SECONDS)
        for data, image in zip(result.images, alone, strict=True):
            assert largest_difference(pixels(data), image) <= 1
    scheduler.close()
