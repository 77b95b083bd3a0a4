"""Images with forecasts are those of diffusers whose schedulers receive forecasts in place of predictions."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from model.denoising.sampler_specs import SPECS
from model.loading.load import Loaded
from model.pipeline.params import GenerationParams
from model.pipeline.request_plan import plan_request
from model.pipeline.text_to_image import generate
from tests.support.parity import box, check_batch, check_images, params_of, picture
from tests.support.reference import Reference

OFFERED = [(name, level) for name, spec in SPECS.items() for level in spec.forecasts]
SMALL = {"width": 64, "height": 64, "num_inference_steps": 20}


def forecast_of(loaded: Loaded, level: str, **fields: Any) -> GenerationParams:
    return params_of(loaded, **SMALL, forecast=level, **fields)


@pytest.mark.parametrize(("sampler", "level"), OFFERED)
def test_each_sampler(sampler: str, level: str, loaded: Loaded, tiny_reference: Reference) -> None:
    params = forecast_of(loaded, level, scheduler=sampler)
    check_images(loaded.model, tiny_reference, params)
    assert plan_request(loaded.model, params).evaluations == {"fast": 12, "quality": 15}[level]


@pytest.mark.parametrize("sampler", ["Euler", "DPM++ 2M"])
def test_everything_that_a_request_can_contain(sampler: str, loaded: Loaded, tiny_reference: Reference) -> None:
    """In one batch, with images of other levels and samplers."""
    photo, mask = picture(1), box(8, 8, 40, 56, side=64, strength=0.8)
    plain = forecast_of(loaded, "fast", scheduler=sampler)
    batch = [
        replace(plain, seed=1, forecast="off"),
        replace(plain, seed=2, guidance_end=0.6),
        replace(plain, seed=3, guidance_start=0.25, guidance_rescale=0.7),
        replace(plain, seed=4, forecast="quality", image=photo, strength=0.7),
        replace(plain, seed=5, image=photo, masks=(mask,)),
        replace(plain, seed=6, use_refiner=True, denoising_frac=0.6),
        replace(plain, seed=7, use_refiner=True, guidance_end=0.8, image=photo, strength=0.9),
        replace(plain, seed=8, scheduler="DPM++ 2M SDE Karras", forecast="off"),
    ]
    check_batch(tiny_reference, batch, loaded.model)


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"guidance_end": 0.6}, {12, 13}),
        ({"guidance_start": 0.45}, {9, 10}),
        ({"guidance_end": 0.8, "use_refiner": True, "denoising_frac": 0.3}, {16, 17}),
    ],
)
def test_steps_where_guidance_changes_are_evaluated(changes: dict[str, Any], steps: set[int], loaded: Loaded) -> None:
    def evaluated(**fields: Any) -> set[int]:
        plans = plan_request(loaded.model, forecast_of(loaded, "fast", **fields)).passes[0].denoise.values()
        return {int(step) for plan in plans for step in plan.step_plan.requested_step}

    whole = {name: value for name, value in changes.items() if not name.startswith("guidance")}
    assert steps <= evaluated(**changes) and not steps <= evaluated(**whole)


def test_few_steps_and_the_last_one_are_evaluated(loaded: Loaded) -> None:
    for steps, expected in ((5, 5), (6, 6), (8, 7)):
        plan = plan_request(loaded.model, replace(forecast_of(loaded, "fast"), num_inference_steps=steps))
        assert plan.evaluations == expected and plan.first.step_plan.requested_step[-1] == steps - 1


def test_warns_of_a_negative_prompt_without_guidance(loaded: Loaded) -> None:
    params = replace(forecast_of(loaded, "off"), negative_prompt="blurry", guidance_scale=1.0)
    warning = "negative_prompt: without guidance (guidance_scale 1) it is not read."
    assert plan_request(loaded.model, params).warnings == [warning]
    for changes in ({"guidance_scale": 2.0}, {"negative_prompt": ""}):
        assert plan_request(loaded.model, replace(params, **changes)).warnings == []


def test_warns_of_guidance_without_steps(loaded: Loaded) -> None:
    params = forecast_of(loaded, "off", guidance_start=0.41, guidance_end=0.42)
    assert plan_request(loaded.model, params).warnings == [
        "guidance_scale: no step lies between guidance_start 0.41 and guidance_end 0.42; no step was guided."
    ]
    for changes in ({"guidance_end": 0.0}, {"guidance_scale": 1.0}, {"guidance_end": 0.5}):
        assert plan_request(loaded.model, replace(params, guidance_start=0.0, **changes)).warnings == []


def test_a_default_that_the_sampler_does_not_offer_is_reported(loaded: Loaded) -> None:
    """A request that names the level itself is refused; see tests/model/api."""
    params = replace(forecast_of(loaded, "off"), scheduler="Heun")
    [expected], _, none = generate(loaded.model, [params])
    [image], _, [warning] = generate(loaded.model, [replace(params, forecast="fast")])
    assert none == [] and np.array_equal(image, expected)
    assert warning == "forecast: Heun does not offer fast, the release's default; it was not used."


def test_progress_counts_the_sampler_s_steps(loaded: Loaded) -> None:
    """Each evaluation stands for its own step and for those that are forecast after it."""
    plan = plan_request(loaded.model, forecast_of(loaded, "fast", use_refiner=True, denoising_frac=0.5))
    [image] = plan.images()
    done = []
    for one in plan.passes[0].denoise.values():
        image.plan = one.step_plan
        for image.step in range(one.step_plan.steps + 1):
            done.append((plan.steps_done(image), plan.evaluations_left(image)))
    steps = [step for step, _ in done]
    assert steps == sorted(steps) and steps[0] == 0 and steps[-1] == plan.steps == 20
    assert done[0][1] == plan.evaluations and done[-1][1] == 0
