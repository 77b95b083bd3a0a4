"""Compare one image on several GPUs with one GPU, alternating in one run: `preheat bench multi-gpu`.

Both run in this process, without bands on the same weights. With several ranks, each of the other GPUs has a process
(`model.ranks`). The speed-up is predicted before it is measured:

    step on N ranks = step of the share of one rank + an all-gather of the predicted noise

The share's step is measured on one GPU, as the step of a request whose batch has as many entries: without guidance. The
all-gather is measured alone. On a GPU it is part of the step's CUDA graph, and a rank waits in it for the slowest.

With bands the share's step is divided by their number, and what the bands exchange is left out. So the prediction is an
upper limit.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine_builder.benchmarks.bench import load_in_process, measure, precision_of, release_work, timed_row
from engine_builder.benchmarks.rows import Row
from model.api.request import GenerationRequest
from model.api.resolve import resolve
from model.child_process import mark_hanging_exit
from model.denoising.buffers import entry_shape
from model.engines.shapes import DTYPES
from model.errors import RequestRefused
from model.loading.load import Loaded
from model.pipeline.params import GenerationParams
from model.pipeline.spec import UNET
from model.ranks.lead import Followers, start_followers
from model.settings import read_settings

_GATHERS = 50  # timed together


@dataclass(frozen=True)
class Communication:
    """What the ranks exchange in a step. bytes: that each rank sends; seconds: of one call alone."""

    calls: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Result:
    """rows: one GPU, several GPUs, and the share of one rank. The speed-ups are of the denoising."""

    rows: list[Row]
    communication: Communication
    predicted: float
    measured: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": [row.to_dict() for row in self.rows],
            "calls": self.communication.calls,
            "bytes": self.communication.bytes,
            "call_us": round(1e6 * self.communication.seconds, 1),
            "predicted": round(self.predicted, 3),
            "measured": round(self.measured, 3),
        }


@dataclass(frozen=True)
class Ranked:
    """A release as it runs on this GPU alone, and on all ranks."""

    alone: Loaded
    divided: Loaded
    followers: Followers


@contextmanager
def load_ranked(store: str, release: str, gpus: int, bands: int = 1) -> Iterator[Ranked]:
    """Load a release with `gpus` ranks, which divide each image into `bands`; on a CPU these are processes.

    Raises ConfigError if there are too few GPUs or their number is no multiple of `bands`, RankFailed, and what
    `load_release` raises.
    """
    divided_settings = {"gpus_per_image": gpus, "bands_per_image": bands}
    settings = read_settings(divided_settings).model_copy(update={"store": store, "release": release})
    # First, so that nothing is started for a release that does not load.
    alone = load_in_process(store, release)
    with_bands = load_in_process(store, release, bands=bands) if bands > 1 else alone
    followers = start_followers(settings, {})
    try:
        divided = replace(with_bands, model=with_bands.model.sharing())
        followers.join(divided.model)
        yield Ranked(alone, divided, followers)
    finally:
        if not followers.close():
            mark_hanging_exit()


def compare(ranked: Ranked, request: GenerationRequest, warm_ups: int, runs: int) -> Result:
    """Measure a guided request on one GPU and on several alternately, and the share of one rank.

    Raises RequestRefused for a request without guidance, whose batch has one entry.
    """
    params = resolve(request, ranked.alone.served)
    size, bands = ranked.divided.model.ranks.size, ranked.followers.size // ranked.divided.model.ranks.size
    if size > 1 and params.guidance_scale <= 1:
        raise RequestRefused("guidance_scale", "an image without guidance is not divided.")
    share = replace(params, guidance_scale=1.0) if size > 1 else params
    cases: list[tuple[str, Loaded, GenerationParams]] = [
        ("one GPU", ranked.alone, params),
        (f"{ranked.followers.size} GPUs", ranked.divided, params),
        ("the share of one rank" if bands == 1 else f"the share of {bands} ranks", ranked.alone, share),
    ]
    works = [release_work(loaded, case) for _, loaded, case in cases]
    rows = [
        timed_row(f"{loaded.release} {name}", case, precision_of(loaded), *measured)
        for (name, loaded, case), measured in zip(cases, measure(works, warm_ups, runs), strict=True)
    ]
    one, several, of_share = (row.stages["denoise"] for row in rows if row.stages)
    communication = _measure_gather(ranked, params)
    predicted = one / (of_share / bands + 1000 * communication.seconds * params.num_inference_steps)
    return Result(rows, communication, predicted, one / several)


def _measure_gather(ranked: Ranked, params: GenerationParams) -> Communication:
    """Time the all-gather of a step's predictions for one guided image. With bands only there is none."""
    model = ranked.divided.model
    if model.ranks.size == 1:
        return Communication(0, 0, 0.0)
    [noise] = model.engines[UNET].signature.outputs
    shape = (len(model.ranks.share(2)), *entry_shape(noise, params.height, params.width))
    own = torch.zeros(shape, dtype=DTYPES[noise.dtype], device=model.device)
    seconds = 0.0
    for _ in range(2):  # the first is a warm-up
        began = time.perf_counter()
        ranked.followers.repeat_gather(own, _GATHERS)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        seconds = (time.perf_counter() - began) / _GATHERS
    return Communication(1, own.numel() * own.element_size(), seconds)
