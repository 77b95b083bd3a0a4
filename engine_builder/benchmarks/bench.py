"""Latency of a loaded release on this machine, by stage.

A benchmark draws the same request again and again: warm-ups first, then counted runs. What is compared draws it in one
process, in turns: what drifts meanwhile, a host's or a GPU's clocks, meets all alike. A turn is a few runs, and its
first is not counted, so that each is measured on a device as warm as its own work makes it.

Imports model/, torch and the standard library: it runs where the server image runs.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from engine_builder.benchmarks.rows import Row, make_row, medians
from model.api.request import (
    GenerationRequest,
    GenerationSettings,
    resolve,
)
from model.cold_start import ColdStart
from model.engines import components
from model.images.encode import (
    Pixels,
    broken_image,
    encode_base64,
)
from model.loading.load import (
    Loaded,
    ServedBucket,
    load_release,
)
from model.loading.runtimes import targets_here
from model.pipeline.text_to_image import (
    Decoding,
    draw,
    generate,
    request_tables,
)
from model.scheduling.output_workers import THREADS
from model.store.signature import configured_keys
from model.store.store import Store

_TURN = 4  # counted runs
Work = Callable[[], dict[str, float]]
"""Draws one request, and gives the milliseconds of its stages."""


def load_here(store: Store, release: str, buckets: Sequence[ServedBucket] = ()) -> Loaded:
    """A release as a server on this machine would load it: by the runtime and the public keys that the environment
    names. Raises what `load_release` does."""
    return load_release(store, release, targets_here({}), buckets, ColdStart(), configured_keys())


def measure(works: Sequence[Work], warm_ups: int, runs: int) -> list[tuple[list[float], dict[str, float]]]:
    """Of each: milliseconds of its counted runs, and the median milliseconds of its stages. Each is warmed up, then
    they take turns."""
    for work in works:
        for _ in range(warm_ups):
            work()
    totals: list[list[float]] = [[] for _ in works]
    stages: list[list[dict[str, float]]] = [[] for _ in works]
    for begin in range(0, runs, _TURN):
        for work, its_totals, its_stages in zip(works, totals, stages, strict=True):
            if len(works) > 1:
                work()
            for _ in range(begin, min(runs, begin + _TURN)):
                began = time.perf_counter()
                its_stages.append(work())
                its_totals.append((time.perf_counter() - began) * 1000)
    return [(one, medians(of_it)) for one, of_it in zip(totals, stages, strict=True)]


def bench_release(loaded: Loaded, request: GenerationRequest, warm_ups: int, runs: int) -> Row:
    """Request in to encoded picture out, in this process."""
    settings = resolve(request, loaded.served)
    [measured] = measure([release_work(loaded, settings)], warm_ups, runs)
    return release_row(loaded, settings, *measured)


def release_work(loaded: Loaded, settings: GenerationSettings) -> Work:
    """Drawing that request by the release."""

    def work() -> dict[str, float]:
        pixels, timings, _ = generate(loaded.model, [settings])
        began = time.perf_counter()
        encode_all(pixels, settings)
        return timings | {"encode": (time.perf_counter() - began) * 1000}

    return work


def bench_offline(loaded: Loaded, request: GenerationRequest, warm_ups: int, runs: int) -> Row:
    """The request's images again and again, one request after the other; in milliseconds a request. See `offline`."""
    settings = resolve(request, loaded.served)
    if warm_ups:
        offline(loaded, [settings], 0, warm_ups)
    return release_row(loaded, settings, offline(loaded, [settings], 0, runs), {})


def offline(loaded: Loaded, batch: Sequence[GenerationSettings], seconds: float, least: int = 1) -> list[float]:
    """Milliseconds of each batch where there is always a next one, for about `seconds` and at least `least` times.

    As in the server, pictures are decoded and encoded while the next batch is drawn, by as many threads as it has, and
    nothing waits for a stage to end. The time until the last ones are encoded counts as the last batch's.
    """
    totals: list[float] = []
    requests = [settings for settings in batch for _ in range(settings.num_images)]

    def encode(decoding: Decoding, settings: GenerationSettings) -> None:
        pixels = decoding.wait()
        if pixels is None:
            raise broken_image([0], 1)
        encode_base64(pixels, settings.output_format, settings.quality)

    with ThreadPoolExecutor(THREADS) as encoders, torch.inference_mode():
        began = before = time.perf_counter()
        while len(totals) < least or before - began < seconds:
            steps = [request_tables(loaded.model, settings) for settings in batch]
            rows = draw(loaded.model, batch, steps, lambda stage: None)
            encoding = [
                encoders.submit(encode, Decoding(loaded.model, row.latents), settings)
                for row, settings in zip(rows, requests, strict=True)
            ]
            now = time.perf_counter()
            totals.append((now - before) * 1000)
            before = now
        for one in encoding:
            one.result()
        totals[-1] += (time.perf_counter() - before) * 1000
    return totals


def encode_all(pictures: Iterable[Pixels], settings: GenerationSettings) -> None:
    """As the request's answer has them."""
    for picture in pictures:
        encode_base64(picture, settings.output_format, settings.quality)


def precision_of(loaded: Loaded) -> str:
    """The dtype that the base's UNet answers in, for a row."""
    return loaded.model.engines[components.UNET].signature.outputs[0].dtype


def release_row(loaded: Loaded, settings: GenerationSettings, totals: list[float], stages: dict[str, float]) -> Row:
    """Of what `measure` gives of the release."""
    case = f"{loaded.release} {settings.width}x{settings.height}"
    return timed_row(case, settings, precision_of(loaded), totals, stages)


def timed_row(
    case: str, settings: GenerationSettings, precision: str, totals: list[float], stages: dict[str, float]
) -> Row:
    """Of what `measure` gives of anything that draws this request."""
    steps, batch = settings.num_inference_steps, settings.num_images
    return make_row(case, totals, "ms", precision, steps, batch, stages=stages)
