"""A release whose batches are divided among several processes on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from engine_builder.stores.store import WritableStore
from model.api.resolve import resolve
from model.cold_start import ColdStart
from model.deployment import Deployment
from model.images.pixels import Pixels
from model.loading.load import Loaded
from model.loading.target import detect_targets
from model.pipeline.params import GenerationParams
from model.ranks.lead import Followers
from model.request_fields import GenerationRequest
from model.settings import Settings
from tests.support.deployments import load_release

SIDE = 64
BAND_RELEASE, BANDS = "toy-bands/1", 2


@contextmanager
def ranked(store: WritableStore, release: str, size: int, bands: int = 1) -> Iterator[tuple[Loaded, Followers]]:
    """The release on `size` ranks, and each image in so many bands. This process is the first rank."""
    settings = Settings(store=store.url, release=release, gpus_per_image=size, bands_per_image=bands)
    followers = Followers(settings, {}, gpus=0)
    try:
        loaded = load_release(store, Deployment.of(settings), detect_targets(), ColdStart())
        followers.join(loaded.model)
        yield loaded, followers
    finally:
        followers.close()


def params(loaded: Loaded, **changes: object) -> GenerationParams:
    fields = {"prompt": "a red circle on a blue background", "seed": 3, "width": SIDE, "height": SIDE}
    return resolve(GenerationRequest(**fields | {"num_inference_steps": 4} | changes), loaded.served)  # type: ignore


def assert_equal(pixels: list[Pixels], expected: list[Pixels]) -> None:
    for got, wanted in zip(pixels, expected, strict=True):
        assert np.abs(got.astype(int) - wanted).max() <= 1
