"""Image to image and inpainting over HTTP are those of diffusers' pipelines: at most 2 of 255 apart."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from model.denoising.sampler_specs import SAMPLERS
from model.images.pixels import Pixels
from model.images.postprocess import feather
from model.loading.load import Loaded
from model.pipeline.params import GenerationParams
from preheat.local_server.server import Server
from tests.support import parity
from tests.support.images import largest_difference, pixels
from tests.support.parity import TOLERANCE, box, image_of, params_of, request_of
from tests.support.predictions import http_client, predict
from tests.support.reference import Reference

CASES = 8  # of each kind: every sampler once


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with http_client(server) as client:
        yield client


@pytest.fixture(scope="module")
def photo(loaded: Loaded) -> Pixels:
    """An image of the model itself, with a noisy corner."""
    image = image_of(loaded.model, params_of(loaded)).copy()
    image[:40, :40] = np.random.default_rng(0).integers(0, 256, (40, 40, 3))
    return image


def generate_over_http(client: httpx.Client, params: GenerationParams) -> Pixels:
    """Return the first image of a request to the server."""
    return pixels(predict(client, **request_of(params))["data"])


def random_settings(number: int, loaded: Loaded, photo: Pixels) -> GenerationParams:
    """Return a request with an image. Each sampler is used once before one is used twice."""
    choose = random.Random(number)
    sampler = SAMPLERS[number % len(SAMPLERS)]
    params = params_of(
        loaded,
        prompt=choose.choice(["a yellow square on a black background", "three small blue circles"]),
        negative_prompt=choose.choice([None, "", "a green triangle"]),
        scheduler=sampler,
        num_inference_steps=choose.randint(5, 30),
        # LCM adds new noise at every step; see test_pipeline_parity.
        guidance_scale=choose.choice([1.0, 2.0] if sampler == "LCM" else [1.0, 3.0, 7.5]),
        guidance_end=choose.choice([1.0, 1.0, 0.5]),
        use_refiner=choose.random() < 0.5 and sampler != "Heun",
        denoising_frac=choose.choice([0.3, 0.6, 0.8]),
        seed=choose.randrange(2**32),
        image=photo,
    )
    return replace(params, strength=choose.uniform(0.3, 1.0))


def refining_after_a_base_step(params: GenerationParams, strength: float) -> GenerationParams:
    return replace(params, denoising_frac=max(params.denoising_frac, 1.1 - strength))


def test_image_to_image_is_that_of_diffusers(
    client: httpx.Client, loaded: Loaded, photo: Pixels, tiny_reference: Reference
) -> None:
    for number in range(CASES):
        params = random_settings(number, loaded, photo)
        params = refining_after_a_base_step(params, params.strength)
        image = generate_over_http(client, params)
        assert largest_difference(image, tiny_reference.generate(params)) <= TOLERANCE, params
        assert largest_difference(image, photo) > TOLERANCE


def test_inpainting_is_that_of_diffusers(
    client: httpx.Client, loaded: Loaded, photo: Pixels, tiny_reference: Reference
) -> None:
    for number in range(CASES):
        params, choose = random_settings(100 + number, loaded, photo), random.Random(number)
        left, top = choose.randrange(60), choose.randrange(60)
        right, bottom = left + choose.randrange(20, 60), top + choose.randrange(20, 60)
        strength = (params.strength, 0.9999, 1.0)[number % 3]
        mask = box(left, top, right, bottom, strength=strength, negative_prompt=params.negative_prompt)
        params = refining_after_a_base_step(replace(params, masks=(mask,)), strength)
        image, inside = generate_over_http(client, params), mask.levels > 0
        assert largest_difference(image, tiny_reference.generate(params)) <= TOLERANCE, params
        assert largest_difference(image[inside], photo[inside]) > TOLERANCE


def test_feathered_mask_repaints_like_diffusers(loaded: Loaded, photo: Pixels, tiny_reference: Reference) -> None:
    """diffusers makes a blurred mask binary for the latents. Levels between would suppress the repainting."""
    hard = box(32, 32, 96, 96)
    soft = replace(hard, levels=np.array(feather(hard.levels, 12)))
    params = params_of(loaded, image=photo, masks=(soft,))
    parity.check_images(loaded.model, tiny_reference, params)
    images = [image_of(loaded.model, replace(params, masks=(mask,))) for mask in (soft, hard)]
    edge = (slice(36, 92), slice(36, 40))  # inside the mask, where its levels are between
    assert 128 < soft.levels[64, 36] < soft.levels[64, 39] < 255
    changes = [float(np.abs(one[edge].astype(int) - photo[edge]).mean()) for one in images]
    assert changes[0] > 0.5 * changes[1] > 0


@pytest.mark.parametrize("sampler", ["Euler a", pytest.param("DPM++ 2M", marks=pytest.mark.full)])
def test_three_masks_are_three_chained_calls(
    sampler: str, client: httpx.Client, loaded: Loaded, photo: Pixels, tiny_reference: Reference
) -> None:
    """The second overlaps the first. Each has its own settings."""
    masks = (
        box(0, 0, 60, 60),
        box(40, 40, 100, 100, prompt="a red circle", negative_prompt="blue", strength=0.7),
        box(64, 0, 128, 64, strength=1.0),
    )
    params = params_of(loaded, scheduler=sampler, image=photo, masks=masks)
    image = generate_over_http(client, params)
    assert largest_difference(image, tiny_reference.generate(params)) <= TOLERANCE
    first_result = photo
    for mask in masks:  # requests of one mask each
        first_result = image_of(loaded.model, replace(params, image=first_result, masks=(mask,)))
    assert largest_difference(image, first_result) <= 1
    parity.check_all_differ(loaded.model, params, replace(params, masks=masks[::-1]))


def test_tasks_of_a_batch_do_not_affect_each_other(loaded: Loaded, photo: Pixels, tiny_reference: Reference) -> None:
    plain = params_of(loaded, seed=3)
    batch = [
        plain,
        replace(plain, image=photo, strength=0.6, scheduler="Euler a", num_images=2),
        replace(plain, image=photo, masks=(box(10, 10, 70, 90),), scheduler="DPM++ 2M SDE Karras", use_refiner=True),
        replace(plain, image=photo, masks=(box(0, 0, 64, 64), box(64, 64, 128, 128)), guidance_scale=1.0),
    ]
    parity.check_batch(tiny_reference, batch, loaded.model)


def test_each_setting_of_an_image_changes_the_result(loaded: Loaded, photo: Pixels) -> None:
    params = params_of(loaded, image=photo, masks=(box(20, 20, 90, 90),))
    turned = photo[::-1].copy()
    changed: list[dict[str, Any]] = [
        {"masks": ()},
        {"masks": (), "strength": 0.5},
        {"masks": (), "strength": 0.5, "image": turned},
        {"masks": (box(20, 20, 90, 90, strength=0.8),)},
        {"masks": (box(20, 20, 90, 90, strength=1.0),)},
        {"masks": (box(20, 20, 90, 90, prompt="a red circle"),)},
        {"masks": (box(28, 20, 90, 90),)},
        {"image": turned},
    ]
    parity.check_all_differ(loaded.model, params, *(replace(params, **fields) for fields in changed))
