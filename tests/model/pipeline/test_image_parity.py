"""Image to image and inpainting over HTTP are those of diffusers' pipelines: at most 2 of 255 apart."""

import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from engine_builder.local_server.server import Server
from model.denoising.sampler_names import SAMPLERS
from model.images.encode import Pixels
from model.images.postprocess import feather
from model.loading.load import Loaded
from model.pipeline.params import GenerationParams, Mask
from tests.model.pipeline.test_pipeline_parity import TOLERANCE, generate_images, params_of
from tests.support.images import file_of, largest_difference, pixels
from tests.support.predictions import http_client, predict
from tests.support.reference import Reference
from tests.support.repository import MODEL_FOLDER

CASES = 12  # of each kind
SIZE = 128


@pytest.fixture(scope="module", autouse=True)
def quiet_diffusers() -> Iterator[None]:
    """diffusers logs a line for each scheduler setting that another sampler does not have."""
    logger = logging.getLogger("diffusers")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(MODEL_FOLDER)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with http_client(server) as client:
        yield client


@pytest.fixture(scope="module")
def photo(loaded: Loaded) -> Pixels:
    """An image of the model itself, with a noisy corner."""
    [image] = generate_images(loaded, params_of(loaded, num_inference_steps=8))
    image = image.copy()
    image[:40, :40] = np.random.default_rng(0).integers(0, 256, (40, 40, 3))
    return image


def box(left: int, top: int, right: int, bottom: int, **settings: object) -> Mask:
    """Return a mask of a rectangle. Its edges are between latents."""
    levels = np.zeros((SIZE, SIZE), np.uint8)
    levels[top:bottom, left:right] = 255
    defaults: dict[str, object] = {"prompt": "a large green triangle", "negative_prompt": None, "strength": 0.9999}
    return Mask(levels, **defaults | settings)  # type: ignore[arg-type]


def request_of(params: GenerationParams) -> dict[str, Any]:
    """Return the JSON of a request that resolves to these parameters, for a PNG."""
    assert params.image is not None
    fields = (
        "prompt", "negative_prompt", "num_inference_steps", "guidance_scale", "end_cfg_frac", "scheduler",
        "use_refiner", "denoising_frac", "seed", "num_images", "strength",
    )  # fmt: skip
    own = ("prompt", "negative_prompt", "strength")
    masks = [{"image": file_of(mask.levels)} | {name: getattr(mask, name) for name in own} for mask in params.masks]
    request = {name: getattr(params, name) for name in fields}
    return request | {"image": file_of(params.image), "masks": masks or None, "output_format": "png"}


def generate_over_http(client: httpx.Client, params: GenerationParams) -> Pixels:
    """Return the first image of a request to the server."""
    return pixels(predict(client, **request_of(params))["data"])


def random_settings(number: int, loaded: Loaded, photo: Pixels) -> GenerationParams:
    """Return a request with an image. Each sampler is used once before one is used twice."""
    choose = random.Random(number)
    sampler = SAMPLERS[number % len(SAMPLERS)]
    return replace(
        params_of(
            loaded,
            prompt=choose.choice(["a yellow square on a black background", "three small blue circles"]),
            negative_prompt=choose.choice([None, "", "a green triangle"]),
            scheduler=sampler,
            num_inference_steps=choose.randint(5, 30),
            # LCM adds new noise at every step; see test_pipeline_parity.
            guidance_scale=choose.choice([1.0, 2.0] if sampler == "LCM" else [1.0, 3.0, 7.5]),
            end_cfg_frac=choose.choice([1.0, 1.0, 0.5]),
            use_refiner=choose.random() < 0.5 and sampler != "Heun",
            denoising_frac=choose.choice([0.3, 0.6, 0.8]),
            seed=choose.randrange(2**32),
        ),
        image=photo,
        strength=choose.uniform(0.3, 1.0),
    )


@pytest.mark.parametrize("number", range(CASES))
def test_image_to_image_is_that_of_diffusers(
    number: int, client: httpx.Client, loaded: Loaded, photo: Pixels, reference: Reference
) -> None:
    params = random_settings(number, loaded, photo)
    params = replace(params, denoising_frac=max(params.denoising_frac, 1.1 - params.strength))  # the base has a step
    image = generate_over_http(client, params)
    assert largest_difference(image, reference.generate(params)) <= TOLERANCE
    assert largest_difference(image, photo) > TOLERANCE


@pytest.mark.parametrize("number", range(CASES))
def test_inpainting_is_that_of_diffusers(
    number: int, client: httpx.Client, loaded: Loaded, photo: Pixels, reference: Reference
) -> None:
    params = random_settings(100 + number, loaded, photo)
    strength = (params.strength, 0.9999, 1.0)[number % 3]
    choose = random.Random(number)
    left, top = choose.randrange(60), choose.randrange(60)
    right, bottom = left + choose.randrange(20, 60), top + choose.randrange(20, 60)
    mask = box(left, top, right, bottom, strength=strength, negative_prompt=params.negative_prompt)
    params = replace(params, masks=(mask,), denoising_frac=max(params.denoising_frac, 1.1 - strength))
    image = generate_over_http(client, params)
    assert largest_difference(image, reference.generate(params)) <= TOLERANCE
    inside = mask.levels > 0
    assert largest_difference(image[inside], photo[inside]) > TOLERANCE


def test_feathered_mask_repaints_like_diffusers(loaded: Loaded, photo: Pixels, reference: Reference) -> None:
    """diffusers makes a blurred mask binary for the latents. Levels between would suppress the repainting."""
    hard = box(32, 32, 96, 96)
    soft = replace(hard, levels=np.array(feather(hard.levels, 12)))
    params = replace(params_of(loaded, num_inference_steps=10), image=photo)
    [image] = generate_images(loaded, replace(params, masks=(soft,)))
    assert largest_difference(image, reference.generate(replace(params, masks=(soft,)))) <= TOLERANCE
    [repainted] = generate_images(loaded, replace(params, masks=(hard,)))
    edge = (slice(36, 92), slice(36, 40))  # inside the mask, where its levels are between
    assert 128 < soft.levels[64, 36] < soft.levels[64, 39] < 255
    changes = [float(np.abs(one[edge].astype(int) - photo[edge]).mean()) for one in (image, repainted)]
    assert changes[0] > 0.5 * changes[1] > 0


@pytest.mark.parametrize("sampler", ["Euler a", "DPM++ 2M"])
def test_three_masks_are_three_chained_calls(
    sampler: str, client: httpx.Client, loaded: Loaded, photo: Pixels, reference: Reference
) -> None:
    """The second overlaps the first. Each has its own settings."""
    masks = (
        box(0, 0, 60, 60),
        box(40, 40, 100, 100, prompt="a red circle", negative_prompt="blue", strength=0.7),
        box(64, 0, 128, 64, strength=1.0),
    )
    params = replace(params_of(loaded, scheduler=sampler, num_inference_steps=10), image=photo, masks=masks)
    image = generate_over_http(client, params)
    assert largest_difference(image, reference.generate(params)) <= TOLERANCE
    first_result = photo
    for mask in masks:  # requests of one mask each
        [first_result] = generate_images(loaded, replace(params, image=first_result, masks=(mask,)))
    assert largest_difference(image, first_result) <= 1
    [other_order] = generate_images(loaded, replace(params, masks=masks[::-1]))
    assert largest_difference(image, other_order) > TOLERANCE


def test_tasks_of_a_batch_do_not_affect_each_other(loaded: Loaded, photo: Pixels, reference: Reference) -> None:
    plain = params_of(loaded, num_inference_steps=10, seed=3)
    batch = [
        plain,
        replace(plain, image=photo, strength=0.6, scheduler="Euler a", num_images=2),
        replace(plain, image=photo, masks=(box(10, 10, 70, 90),), scheduler="DPM++ 2M SDE Karras", use_refiner=True),
        replace(plain, image=photo, masks=(box(0, 0, 64, 64), box(64, 64, 128, 128)), guidance_scale=1.0),
    ]
    together = iter(generate_images(loaded, *batch))
    for params in batch:
        for seed in params.seeds:
            single = replace(params, seed=seed, num_images=1)
            [alone] = generate_images(loaded, single)
            image = next(together)
            assert largest_difference(image, alone) <= 1
            assert largest_difference(image, reference.generate(single)) <= TOLERANCE


def test_each_setting_of_an_image_changes_the_result(loaded: Loaded, photo: Pixels) -> None:
    """So the comparisons above can fail."""
    params = replace(params_of(loaded, num_inference_steps=10), image=photo, masks=(box(20, 20, 90, 90),))
    changed = [
        replace(params, masks=()),
        replace(params, masks=(), strength=0.5),
        replace(params, masks=(), image=photo[::-1].copy(), strength=0.5),
        replace(params, masks=(box(20, 20, 90, 90, strength=0.8),)),
        replace(params, masks=(box(20, 20, 90, 90, strength=1.0),)),
        replace(params, masks=(box(20, 20, 90, 90, prompt="a red circle"),)),
        replace(params, masks=(box(28, 20, 90, 90),)),
        replace(params, image=photo[::-1].copy()),
    ]
    images = [generate_images(loaded, one)[0] for one in (params, *changed)]
    differences = {
        (one, other): largest_difference(images[one], images[other])
        for one in range(len(images))
        for other in range(one)
    }
    assert min(differences.values()) > TOLERANCE, differences
