"""Ranks that compute bands of an image: the toy on two and four processes gives the pictures of one."""

import pytest

from engine_builder.stores.store import WritableStore
from model.cold_start import ColdStart
from model.denoising.sampler_names import SAMPLERS
from model.errors import NoEngineForTarget
from model.loading.load import Loaded, load_release
from model.loading.target import detect_targets
from model.pipeline.spec import UNET
from model.pipeline.text_to_image import generate
from tests.support.ranks import BAND_RELEASE, BANDS, assert_equal, params, ranked

HEIGHT, WIDTH = 128, 96
pytestmark = pytest.mark.full


def test_two_bands_make_the_picture_of_one(band_store: WritableStore, whole: Loaded) -> None:
    """All samplers, with guidance and without, and a height without bands, which is computed whole."""
    assert [engine.component for engine in whole.model.engines[UNET].engines] == [UNET]
    with ranked(band_store, BAND_RELEASE, 2, BANDS) as (two, _):
        [bands, one] = two.model.engines[UNET].serving(HEIGHT, WIDTH)
        assert bands.component == f"{UNET}_{BANDS}_bands" and one.component == UNET and bands.bucket.height is not None
        between = HEIGHT + bands.bucket.height.multiple // BANDS
        assert [engine.component for engine in two.model.engines[UNET].serving(between, WIDTH)] == [UNET]
        for number, (scheduler, height) in enumerate([*((name, HEIGHT) for name in SAMPLERS), (SAMPLERS[0], between)]):
            guidance = (5.0, 1.0)[number % 2]
            request = params(whole, scheduler=scheduler, guidance_scale=guidance, height=height, width=WIDTH)
            assert_equal(generate(two.model, [request])[0], generate(whole.model, [request])[0])


def test_four_ranks_divide_the_halves_of_guidance_and_their_rows(band_store: WritableStore, whole: Loaded) -> None:
    """All samplers, two images with different samplers at a time, and one image alone."""
    images = [
        params(whole, height=HEIGHT, width=WIDTH, seed=seed, scheduler=scheduler, num_inference_steps=3 + seed % 2)
        for seed, scheduler in enumerate(SAMPLERS)
    ]
    batches = [images[:1], *(images[begin : begin + 2] for begin in range(0, len(images), 2))]
    with ranked(band_store, BAND_RELEASE, 4, BANDS) as (four, _):
        assert four.model.ranks.size == 2
        for requests in batches:
            assert_equal(generate(four.model, requests)[0], generate(whole.model, requests)[0])


def test_a_release_without_bands_is_refused(band_store: WritableStore) -> None:
    with pytest.raises(NoEngineForTarget, match="no unet engine in fp32 for 4 bands") as refused:
        load_release(band_store, BAND_RELEASE, detect_targets(), [], ColdStart(), bands=4)
    assert "--bands 4" in refused.value.remedy
