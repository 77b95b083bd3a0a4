"""Ranks that are processes: the tiny model on two of them gives the pictures of one process."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from engine_builder.stores.store import WritableStore
from model.denoising.sampler_names import SAMPLERS
from model.loading.load import Loaded
from model.pipeline.params import Mask
from model.pipeline.text_to_image import generate
from tests.support.ranks import SIDE, assert_equal, params, ranked


@pytest.fixture(scope="module")
def two(store: WritableStore, release: str) -> Iterator[Loaded]:
    with ranked(store, release, 2) as (loaded, _):
        yield loaded


def test_two_ranks_make_the_pictures_of_one(two: Loaded, loaded: Loaded) -> None:
    for number, scheduler in enumerate(SAMPLERS):
        request = params(loaded, scheduler=scheduler, guidance_scale=(5.0, 1.0)[number % 2])
        assert_equal(generate(two.model, [request])[0], generate(loaded.model, [request])[0])


def test_images_of_several_requests_share_a_divided_batch(two: Loaded, loaded: Loaded) -> None:
    image = generate(loaded.model, [params(loaded, seed=1)])[0][0]
    levels = np.zeros((SIDE, SIDE), np.uint8)
    levels[: SIDE // 2] = 255
    mask = Mask(levels, "a small green star", None, strength=0.9)
    batch = [
        params(loaded, num_images=2),
        params(loaded, guidance_scale=1.0, num_inference_steps=6),
        replace(params(loaded, seed=9), image=image, strength=0.6),
        replace(params(loaded, seed=10), image=image, masks=(mask,)),
        params(loaded, use_refiner=True, denoising_frac=0.5),
    ]
    assert_equal(generate(two.model, batch)[0], generate(loaded.model, batch)[0])
