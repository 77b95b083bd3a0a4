"""Ranks that are processes give the pictures of one process. The end of a rank is answered."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine_builder.stores.store import WritableStore
from model.cold_start import ColdStart
from model.denoising.sampler_specs import SAMPLERS
from model.errors import EngineError, NoEngineForTarget, RankFailed, Unavailable
from model.loading.load import Loaded
from model.loading.target import detect_targets
from model.pipeline.params import Control, Mask
from model.pipeline.runner import Runner
from model.pipeline.spec import UNET
from model.pipeline.text_to_image import generate
from model.ranks.lead import Followers
from model.scheduling.job import GenerationResult
from model.scheduling.scheduler import Scheduler
from model.settings import Limits, Settings
from preheat.local_server.server import Layout, Server
from tests.support.deployments import deployed, load_release
from tests.support.images import largest_difference, pixels
from tests.support.predictions import PREDICT_PATH, http_client
from tests.support.processes import children_that_run
from tests.support.ranks import BAND_RELEASE, BANDS, SIDE, assert_equal, params, ranked
from tests.support.waiting import eventually
from tests.support.workers import log_of, started


def test_two_ranks_make_the_pictures_of_one(store: WritableStore, release: str, loaded: Loaded) -> None:
    with ranked(store, release, 2) as (two, _):
        for number, scheduler in enumerate(SAMPLERS):
            request = params(loaded, scheduler=scheduler, guidance_scale=(5.0, 1.0)[number % 2])
            assert_equal(generate(two.model, [request])[0], generate(loaded.model, [request])[0])


@pytest.mark.full
def test_images_of_several_requests_share_a_divided_batch(store: WritableStore, release: str, loaded: Loaded) -> None:
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
    with ranked(store, release, 2) as (two, _):
        assert_equal(generate(two.model, batch)[0], generate(loaded.model, batch)[0])


HEIGHT, WIDTH = 128, 96


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.parametrize("ranks, bands", [(4, 2), (8, 4), (8, 8)])
def test_ranks_divide_the_halves_of_guidance_and_their_rows(
    ranks: int, bands: int, band_store: WritableStore, whole: Loaded
) -> None:
    """All samplers, two images with different samplers at a time, and one image alone."""
    height = HEIGHT // 2 * bands
    images = [
        params(whole, height=height, width=WIDTH, seed=seed, scheduler=scheduler, num_inference_steps=3 + seed % 2)
        for seed, scheduler in enumerate(SAMPLERS)
    ]
    batches = [images[:1], *(images[begin : begin + 2] for begin in range(0, len(images), 2))]
    with ranked(band_store, BAND_RELEASE, ranks, bands) as (divided, _):
        assert divided.model.ranks.size == ranks // bands
        assert divided.model.engines[UNET].serving(height, WIDTH)[0].component == f"{UNET}_{bands}_bands"
        for requests in batches:
            assert_equal(generate(divided.model, requests)[0], generate(whole.model, requests)[0])


def test_a_release_without_bands_is_refused(store: WritableStore, release: str) -> None:
    with pytest.raises(NoEngineForTarget, match="no unet engine in fp32 for 4 bands") as refused:
        load_release(store, deployed(release, bands=4), detect_targets(), ColdStart())
    assert "--bands 4" in refused.value.remedy


@pytest.mark.full
def test_controlnets_run_for_the_entries_of_each_rank(compiled_control_store: WritableStore) -> None:
    alone = load_release(compiled_control_store, deployed("control/1"), detect_targets(), ColdStart())
    levels = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    controls = [Control(name, levels, 1.0, 0.0, 1.0, mode=None) for name in ("edges", "small")]
    plain = params(alone, guidance_scale=5.0)
    batch = [plain, replace(plain, seed=5, controls=tuple(controls)), replace(plain, seed=6, controls=(controls[1],))]
    with ranked(compiled_control_store, "control/1", 2) as (divided, _):
        assert_equal(generate(divided.model, batch)[0], generate(alone.model, batch)[0])


ERROR_SECONDS = 60.0  # a limit for slow machines: see docs/log/branches.md for the measured time


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=pytest.mark.full)])
def test_the_end_of_a_rank_is_answered(ranks: int, store: WritableStore, release: str) -> None:
    failures: list[str] = []
    with ranked(store, release, ranks) as (loaded, followers):
        scheduler = Scheduler([Runner(loaded.model)], Limits(), lambda: failures.append("called"))
        followers.watch(scheduler.abandon)
        running: Future[GenerationResult] = scheduler.submit(params(loaded, num_inference_steps=100)).result
        queued = scheduler.submit(params(loaded, width=96)).result
        eventually(lambda: any(loop.images for loop in loaded.model.loops.values()), "an image in a loop")
        os.kill(followers.pids[-1], signal.SIGKILL)
        for result in (running, queued):
            with pytest.raises(Unavailable, match="being replaced"):
                result.result(ERROR_SECONDS)
        assert not scheduler.healthy()
        with pytest.raises(Unavailable):
            scheduler.submit(params(loaded))
        scheduler.close()
    assert failures == ["called"]


@pytest.mark.full
def test_a_failed_step_of_rank_0_is_answered(
    store: WritableStore, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks wait for its share of the batch. A later call would otherwise meet that of the failed step."""
    failures: list[str] = []
    with ranked(store, release, 2) as (loaded, followers):
        scheduler = Scheduler([Runner(loaded.model)], Limits(), lambda: failures.append("called"))
        followers.watch(scheduler.abandon)
        scheduler.submit(params(loaded)).result.result(ERROR_SECONDS)

        def fail(*_: object) -> None:
            raise EngineError("The engine failed.")

        monkeypatch.setattr(loaded.model.engines[UNET], "run", fail)
        with pytest.raises((EngineError, Unavailable)):
            scheduler.submit(params(loaded)).result.result(ERROR_SECONDS)
        eventually(lambda: failures, "the report of the failure")
        with pytest.raises(Unavailable, match="being replaced"):
            scheduler.submit(params(loaded))
        scheduler.close()


@pytest.mark.full
def test_a_rank_that_cannot_load_is_reported(store: WritableStore, release: str, loaded: Loaded) -> None:
    followers = Followers(Settings(store=store.url, release="missing/1", gpus_per_image=2), {}, gpus=0)
    try:
        with pytest.raises(RankFailed, match=r"Rank 1 of 2 .*missing"):
            followers.join(loaded.model)
    finally:
        followers.close()


def test_a_rank_that_ends_at_once_is_reported(store: WritableStore, release: str, loaded: Loaded) -> None:
    settings = Settings(store=store.url, release=release, gpus_per_image=2)
    followers = Followers(settings, {}, gpus=0, entry="model.missing.main")
    try:
        with pytest.raises(RankFailed, match=r"Rank 1 of 2 .*release"):
            followers.join(loaded.model)
    finally:
        followers.close()


REQUEST = {"prompt": "a red circle on a blue background", "seed": 3, "num_inference_steps": 6, "output_format": "png"}


def follower_pids(server: Server) -> list[int]:
    """Return the processes that run a share of the batches of a server."""
    return [child.pid for child in children_that_run("model.ranks.follower", server.pid)]


@pytest.fixture
def divided(layout: Layout, store: WritableStore, release: str, tmp_path: Path) -> Iterator[Server]:
    """A server whose batches are divided among two processes."""
    with started(layout, store, release, tmp_path, workers=1, gpus_per_image=2) as running:
        yield running


@pytest.mark.full
def test_a_server_divides_its_batches_and_ends_with_a_rank(server: Server, divided: Server) -> None:
    with http_client(server) as one, http_client(divided) as two:
        pictures = [
            pixels(client.post(PREDICT_PATH, json=REQUEST).json()["images"][0]["data"]) for client in (one, two)
        ]
        assert largest_difference(*pictures) <= 1
        [rank] = follower_pids(divided)
        with two.stream("POST", PREDICT_PATH, json=REQUEST | {"num_inference_steps": 100, "stream": True}) as events:
            lines = events.iter_lines()
            next(lines)
            os.kill(rank, signal.SIGKILL)
            assert "being replaced" in list(lines)[-1]
    eventually(lambda: not divided.running, "the end of the server", 30)
    assert "device_failed" in log_of(divided)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_ends_with_its_server(divided: Server, number: signal.Signals) -> None:
    [rank] = follower_pids(divided)
    os.kill(divided.pid, number)
    eventually(lambda: not divided.running, "the end of the server", 30)
    eventually(lambda: not Path(f"/proc/{rank}").exists(), "the end of the rank", 30)
    assert "being replaced" not in log_of(divided)
