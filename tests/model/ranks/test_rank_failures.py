"""Groups of ranks of their own: four ranks, a rank that ends, and one that cannot load."""

import os
import signal
from concurrent.futures import Future

import pytest

from engine_builder.stores.store import WritableStore
from model.errors import EngineError, RankFailed, Unavailable
from model.loading.load import Loaded
from model.pipeline.runner import Runner
from model.pipeline.spec import UNET
from model.ranks.lead import Followers
from model.scheduling.job import GenerationResult
from model.scheduling.scheduler import Scheduler
from model.settings import Limits, Settings
from tests.support.ranks import params, ranked
from tests.support.waiting import eventually

ERROR_SECONDS = 10.0  # in which the end of a rank must be answered


def test_the_end_of_a_rank_is_answered(store: WritableStore, release: str) -> None:
    failures: list[str] = []
    with ranked(store, release, 2) as (loaded, followers):
        scheduler = Scheduler(Runner(loaded.model), Limits(), lambda: failures.append("called"))
        followers.watch(scheduler.abandon)
        running: Future[GenerationResult] = scheduler.submit(params(loaded, num_inference_steps=100)).result
        queued = scheduler.submit(params(loaded, width=96)).result
        eventually(lambda: any(loop.images for loop in loaded.model.loops.values()), "an image in a loop")
        os.kill(followers.pids[0], signal.SIGKILL)
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
        scheduler = Scheduler(Runner(loaded.model), Limits(), lambda: failures.append("called"))
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


def test_a_rank_that_cannot_load_is_reported(store: WritableStore, release: str, loaded: Loaded) -> None:
    followers = Followers(Settings(store=store.url, release="missing/1", gpus_per_image=2), {}, gpus=0)
    try:
        with pytest.raises(RankFailed, match=r"Rank 1 of 2 .*missing"):
            followers.join(loaded.model)
    finally:
        followers.close()
