"""Ranks that compute bands of an image: the toy on two processes gives the pictures of one."""

from collections.abc import Iterator

import pytest

from engine_builder.stores.store import WritableStore
from model.denoising.sampler_names import SAMPLERS
from model.loading.load import Loaded
from model.pipeline.spec import UNET
from model.pipeline.text_to_image import generate
from tests.support.ranks import BAND_RELEASE, BANDS, assert_equal, params, ranked

HEIGHT, WIDTH = 128, 96


@pytest.fixture(scope="module")
def two(band_store: WritableStore) -> Iterator[Loaded]:
    with ranked(band_store, BAND_RELEASE, 2, BANDS) as (loaded, _):
        yield loaded


def test_a_release_with_bands_serves_whole_images(whole: Loaded, two: Loaded) -> None:
    assert [engine.component for engine in whole.model.engines[UNET].engines] == [UNET]
    [first, second] = two.model.engines[UNET].serving(HEIGHT, WIDTH)
    assert first.component == f"{UNET}_{BANDS}_bands" and second.component == UNET


@pytest.mark.parametrize("scheduler", SAMPLERS)
@pytest.mark.parametrize("guidance", [5.0, 1.0])
def test_two_bands_make_the_picture_of_one(two: Loaded, whole: Loaded, scheduler: str, guidance: float) -> None:
    request = params(whole, scheduler=scheduler, guidance_scale=guidance, height=HEIGHT, width=WIDTH)
    assert_equal(generate(two.model, [request])[0], generate(whole.model, [request])[0])


def test_a_height_without_bands_is_computed_whole(two: Loaded, whole: Loaded) -> None:
    [bands, _] = two.model.engines[UNET].serving(HEIGHT, WIDTH)
    assert bands.bucket.height is not None
    height = HEIGHT + bands.bucket.height.multiple // BANDS
    assert [engine.component for engine in two.model.engines[UNET].serving(height, WIDTH)] == [UNET]
    request = params(whole, height=height, width=WIDTH)
    assert_equal(generate(two.model, [request])[0], generate(whole.model, [request])[0])
