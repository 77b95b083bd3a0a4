"""Groups of ranks of their own: four that divide batches and rows, a band that ends, a release without bands."""

import os
import signal
from concurrent.futures import Future

import pytest

from engine_builder.stores.store import WritableStore
from model.cold_start import ColdStart
from model.denoising.sampler_names import SAMPLERS
from model.errors import NoEngineForTarget, Unavailable
from model.loading.load import Loaded, load_release
from model.loading.target import detect_targets
from model.pipeline.runner import Runner
from model.pipeline.text_to_image import generate
from model.scheduling.job import GenerationResult
from model.scheduling.scheduler import Scheduler
from model.settings import Limits
from tests.support.ranks import BAND_RELEASE, BANDS, assert_equal, params, ranked
from tests.support.waiting import eventually

HEIGHT, WIDTH = 128, 96
ERROR_SECONDS = 10.0


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


def test_the_end_of_a_band_is_answered(band_store: WritableStore) -> None:
    with ranked(band_store, BAND_RELEASE, 2, BANDS) as (loaded, followers):
        scheduler = Scheduler(Runner(loaded.model), Limits(), lambda: None)
        followers.watch(scheduler.abandon)
        request = params(loaded, height=HEIGHT, width=WIDTH, num_inference_steps=100)
        running: Future[GenerationResult] = scheduler.submit(request).result
        eventually(lambda: any(loop.images for loop in loaded.model.loops.values()), "an image in a loop")
        os.kill(followers.pids[0], signal.SIGKILL)
        with pytest.raises(Unavailable, match="being replaced"):
            running.result(ERROR_SECONDS)
        scheduler.close()


def test_a_release_without_bands_is_refused(band_store: WritableStore) -> None:
    with pytest.raises(NoEngineForTarget, match="no unet engine in fp32 for 4 bands") as refused:
        load_release(band_store, BAND_RELEASE, detect_targets(), [], ColdStart(), bands=4)
    assert "--bands 4" in refused.value.remedy
