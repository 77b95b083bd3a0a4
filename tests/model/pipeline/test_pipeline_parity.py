"""Every image is that of diffusers: at most 2 of 255 apart, for everything that a request can contain."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from model.denoising.sampler_specs import SAMPLERS
from model.loading.load import Loaded
from model.pipeline.text_to_image import generate
from tests.support.images import largest_difference
from tests.support.parity import TOLERANCE, check_all_differ, check_batch, check_images, image_of, params_of
from tests.support.reference import Reference

SMALL = {"width": 96, "height": 64}
NEGATIVE_PROMPTS = (None, "", "a green triangle")


CONDITIONING: list[dict[str, Any]] = [
    {"original_size": (64, 32)},
    {"crop": (40, 12)},
    {"target_size": (320, 96)},
    {"guidance_rescale": 0.7},
    {"guidance_rescale": 1.0, "negative_prompt": None},
    {"guidance_rescale": 0.7, "guidance_end": 0.5},
    {"clip_skip": 1},
    {"timesteps": (999, 800, 333, 100, 7), "num_inference_steps": 5},
    {"timesteps": (990, 800, 333, 7), "num_inference_steps": 4, "scheduler": "Heun"},
    {"sigmas": (14.0, 6.0, 2.5, 0.6, 0.1, 0.0), "num_inference_steps": 5},
    {"guidance_end": 0.0},
    {"guidance_end": 0.4},
    {"guidance_end": 0.9, "num_inference_steps": 10},
    {"guidance_end": 0.4, "scheduler": "DPM++ 2M SDE Karras"},
    {"guidance_end": 0.4, "scheduler": "Heun"},
    {"guidance_start": 0.3},
    {"guidance_start": 0.3, "guidance_end": 0.8, "guidance_rescale": 0.7},
    {"guidance_start": 0.3, "scheduler": "Heun"},
    {"forecast": "quality", "num_inference_steps": 12},
]
"""Changes of the parameters of a request with eight steps."""


def grid(steps: Sequence[int], sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return every sampler with every guidance scale, with and without refiner, in changing steps, sizes and texts.

    Each pair of values of two fields is in one case at least, Heun and the refiner excepted.
    """
    cases = []
    combinations = itertools.product(SAMPLERS, (1.0, 7.5), (False, True))
    for number, (sampler, guidance_scale, use_refiner) in enumerate(combinations):
        if sampler == "Heun" and use_refiner:
            continue
        # Four cases a sampler: shifted for each, or the same values would always meet.
        shift = number // 4
        width, height = sizes[(number + number // 2 + shift) % 2]
        # LCM adds new noise at every step. At 7.5, on a model that was not distilled for it, float32 rounding alone
        # grows past the tolerance (a difference of 7 was seen).
        guidance_scale = min(guidance_scale, 2.0) if sampler == "LCM" else guidance_scale
        cases.append({
            "scheduler": sampler, "guidance_scale": guidance_scale, "use_refiner": use_refiner,
            "num_inference_steps": steps[(number + shift) % 3], "width": width, "height": height,
            "negative_prompt": NEGATIVE_PROMPTS[(number + shift // 3) % 3],
        })  # fmt: skip
    return cases


CASES = grid((4, 12, 24), ((128, 96), (64, 96)))
CASES_OF_NATIVE_SIZE = grid((4, 20, 50), ((256, 256), (160, 96)))


@pytest.mark.parametrize(
    "fields",
    [*CASES, *(pytest.param(fields, marks=pytest.mark.full) for fields in CASES_OF_NATIVE_SIZE)],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_image_is_that_of_diffusers(fields: dict[str, Any], loaded: Loaded, tiny_reference: Reference) -> None:
    check_images(loaded.model, tiny_reference, params_of(loaded, **fields))


def test_each_setting_changes_the_image(loaded: Loaded) -> None:
    """Except Euler and DDIM: they solve the same equation and differ only in the sigma of the last step."""
    params = params_of(loaded, negative_prompt="")
    image = image_of(loaded.model, params)
    changed: list[dict[str, Any]] = [
        *({"scheduler": sampler} for sampler in SAMPLERS[1:] if sampler != "DDIM"),
        {"num_inference_steps": 7},
        {"guidance_scale": 1.0},
        {"guidance_scale": 7.0},
        {"use_refiner": True},
        {"negative_prompt": None},
        {"negative_prompt": "a green triangle"},
        {"prompt": "a small green triangle on a white background"},
        {"seed": 8},
        *CONDITIONING,
    ]
    for fields in changed:
        assert largest_difference(image, image_of(loaded.model, replace(params, **fields))) > TOLERANCE, fields


@pytest.mark.parametrize("use_refiner", [False, True], ids=["base", "refiner"])
def test_conditioning_is_that_of_diffusers(use_refiner: bool, loaded: Loaded, tiny_reference: Reference) -> None:
    refined = {"use_refiner": use_refiner, "denoising_frac": 0.6}
    params = params_of(loaded, negative_prompt="a green triangle", **refined, **SMALL)
    cases = [fields for fields in CONDITIONING if not (use_refiner and fields.get("scheduler") == "Heun")]
    check_images(loaded.model, tiny_reference, *(replace(params, **fields) for fields in cases))


def test_requests_of_a_batch_do_not_affect_each_other(loaded: Loaded, tiny_reference: Reference) -> None:
    batch = [
        params_of(loaded, scheduler="Euler a", num_inference_steps=7, seed=11),
        params_of(loaded, scheduler="DPM++ 2M SDE Karras", num_inference_steps=20, seed=12, guidance_scale=1.0),
        params_of(loaded, scheduler="DPM++ 2M", num_inference_steps=12, seed=2**32 - 1, negative_prompt="dark"),
    ]
    check_batch(tiny_reference, batch, loaded.model)


def test_some_requests_of_a_batch_use_the_refiner(loaded: Loaded, tiny_reference: Reference) -> None:
    """Each image of a request has its own seed."""
    batch = [
        params_of(loaded, scheduler="DDIM", num_inference_steps=6, seed=1),
        params_of(loaded, scheduler="Euler a", num_images=3, seed=2**32 - 2, use_refiner=True),
        params_of(loaded, scheduler="LCM", seed=3, use_refiner=True, denoising_frac=0.5),
    ]
    assert batch[1].seeds == (2**32 - 2, 2**32 - 1, 0)
    check_batch(tiny_reference, batch, loaded.model)


def test_warns_of_a_refiner_without_steps(loaded: Loaded, tiny_reference: Reference) -> None:
    """diffusers would run the refiner's pipeline. Without a step, it has no effect."""
    params = params_of(loaded, num_inference_steps=4, use_refiner=True, denoising_frac=0.999)
    [image], _, [warning] = generate(loaded.model, [params])
    assert warning.startswith("denoising_frac: 0.999 of 4 steps leaves the refiner without steps")
    assert largest_difference(image, tiny_reference.generate(replace(params, use_refiner=False))) <= TOLERANCE


def test_refiner_runs_all_steps_at_a_fraction_of_zero(loaded: Loaded) -> None:
    """diffusers ignores a denoising_start of 0. Here it is a fraction like the small ones next to it."""
    params = params_of(loaded, num_inference_steps=4, use_refiner=True, denoising_frac=0.0)
    [image], _, warnings = generate(loaded.model, [params])
    assert warnings == []
    assert largest_difference(image, image_of(loaded.model, replace(params, denoising_frac=0.001))) <= 1
    check_all_differ(loaded.model, params, replace(params, denoising_frac=0.5))


def test_truncates_prompts_as_diffusers_does(loaded: Loaded, tiny_reference: Reference) -> None:
    long = "a red circle on a blue background " * 20
    params = params_of(loaded, prompt=long + "and a lighthouse", negative_prompt=long, num_inference_steps=4)
    check_images(loaded.model, tiny_reference, params, replace(params, use_refiner=True))
    warnings = generate(loaded.model, [params])[2]
    assert [warning.split(":")[0] for warning in warnings] == ["prompt", "negative_prompt"]
    assert all("the text encoders read 77 tokens; the last " in warning for warning in warnings)
