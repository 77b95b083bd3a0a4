"""Compare one image on several GPUs with one GPU, alternating in one run: `preheat bench multi-gpu`.

Both run in this process, without bands on the same weights. With several ranks, each of the other GPUs has a process
(`model.ranks`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from benchmarks.measure import load_in_process, measure_requests
from benchmarks.rows import Row
from model.api.resolve import resolve
from model.child_process import mark_hanging_exit
from model.errors import RequestRefused
from model.loading.load import Loaded
from model.ranks.lead import start_followers
from model.request_fields import GenerationRequest
from model.settings import read_settings


@contextmanager
def load_ranked(store: str, release: str, gpus: int, bands: int = 1) -> Iterator[tuple[Loaded, Loaded]]:
    """Load a release with `gpus` ranks, which divide each image into `bands`; on a CPU these are processes.

    Yields the release as it runs on this GPU alone, and on all ranks. Raises ConfigError if there are too few GPUs or
    their number is no multiple of `bands`, RankFailed, and what `load_release` raises.
    """
    ranks = {"gpus_per_image": gpus, "bands_per_image": bands}
    settings = read_settings(ranks).of_release(release).model_copy(update={"store": store})
    # First, so that nothing is started for a release that does not load.
    alone = load_in_process(store, release)
    with_bands = load_in_process(store, release, **ranks) if bands > 1 else alone
    followers = start_followers(settings, {})
    try:
        divided = replace(with_bands, model=with_bands.model.sharing())
        followers.join(divided.model)
        yield alone, divided
    finally:
        if not followers.close():
            mark_hanging_exit()


def compare(
    alone: Loaded, divided: Loaded, gpus: int, request: GenerationRequest, warm_ups: int, runs: int
) -> tuple[list[Row], float]:
    """Measure a guided request on one GPU and on several alternately.

    Returns the rows, and how many times as fast the denoising is. Raises RequestRefused for a request without guidance,
    whose batch has one entry, unless ranks divide images into bands only.
    """
    params = resolve(request, alone.served)
    if divided.model.ranks.size > 1 and params.guidance_scale <= 1:
        raise RequestRefused("guidance_scale", "an image without guidance is not divided.")
    requests = [(f"{alone.release} one GPU", alone, params), (f"{alone.release} {gpus} GPUs", divided, params)]
    rows = measure_requests(requests, warm_ups, runs)
    one, several = (row.stages["denoise"] for row in rows)
    return rows, one / several
