"""Latency of a loaded release on this machine, by stage.

A benchmark draws the same request again and again: warm-ups first, then counted runs. Peers draw it in the same process
on the same weights, in turns with the release: what drifts meanwhile, a host's or a GPU's clocks, meets all of them
alike. A turn is a few runs, and the first of it is not counted, so that each is measured on a device as warm as its own
work makes it.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from engine_builder.benchmarks.peers import diffusers_pipeline, draw_by_diffusers, find_peer
from engine_builder.benchmarks.rows import Row, make_row, medians
from model import components
from model.coldstart import ColdStart
from model.encoding import THREADS
from model.errors import PreheatError
from model.image import Pixels, broken_image, encode_base64
from model.loading import Loaded, ServedBucket, load_release
from model.pipeline import Decoding, draw, generate, request_tables
from model.request import GenerationRequest, GenerationSettings, resolve
from model.runtimes import targets_here
from model.store import Store
from model.store.signature import configured_keys

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
    return _release_row(loaded, settings, *measured)


def bench_beside_diffusers(
    loaded: Loaded, request: GenerationRequest, model: str, kinds: Sequence[str], warm_ups: int, runs: int
) -> list[Row]:
    """The release, then diffusers' pipeline on the weights of `model`, a folder or a Hub id, in each of `kinds` (some
    of `PEERS`): the same request in turns, in to encoded picture out.

    Raises ModelFolderError or RequestRefused where it cannot be the same; PreheatError where a device has no room for
    all of them.
    """
    settings, precision = resolve(request, loaded.served), precision_of(loaded)
    folder = find_peer(model, settings)
    try:
        peers = [diffusers_work(diffusers_pipeline(folder, precision, kind == "compiled"), settings) for kind in kinds]
        first, *others = measure([release_work(loaded, settings), *peers], warm_ups, runs)
    except torch.OutOfMemoryError as error:
        raise PreheatError(
            "This GPU has no room for the release and its peers at once, which take turns: measure without --compiled, "
            "or on a larger one."
        ) from error
    rows = [_release_row(loaded, settings, *first)]
    for kind, measured in zip(kinds, others, strict=True):
        rows.append(_row(f"diffusers {kind} {settings.width}x{settings.height}", settings, precision, *measured))
    return rows


def release_work(loaded: Loaded, settings: GenerationSettings) -> Work:
    """Drawing that request by the release."""

    def work() -> dict[str, float]:
        pixels, timings, _ = generate(loaded.model, [settings])
        began = time.perf_counter()
        _encode(pixels, settings)
        return timings | {"encode": (time.perf_counter() - began) * 1000}

    return work


def bench_offline(loaded: Loaded, request: GenerationRequest, warm_ups: int, runs: int) -> Row:
    """The request's images again and again, one request after the other; in milliseconds a request. See `offline`."""
    settings = resolve(request, loaded.served)
    if warm_ups:
        offline(loaded, [settings], 0, warm_ups)
    return _release_row(loaded, settings, offline(loaded, [settings], 0, runs), {})


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


def diffusers_work(pipeline: Any, like: GenerationSettings) -> Work:
    """Drawing that request by diffusers' pipeline."""

    def work() -> dict[str, float]:
        _encode(draw_by_diffusers(pipeline, like), like)
        return {}

    return work


def _encode(pictures: Iterable[Pixels], settings: GenerationSettings) -> None:
    for picture in pictures:
        encode_base64(picture, settings.output_format, settings.quality)


def precision_of(loaded: Loaded) -> str:
    """The dtype that the base's UNet answers in, for a row."""
    return loaded.model.engines[components.UNET].signature.outputs[0].dtype


def _release_row(loaded: Loaded, settings: GenerationSettings, totals: list[float], stages: dict[str, float]) -> Row:
    case = f"{loaded.release} {settings.width}x{settings.height}"
    return _row(case, settings, precision_of(loaded), totals, stages)


def _row(case: str, settings: GenerationSettings, precision: str, totals: list[float], stages: dict[str, float]) -> Row:
    steps, batch = settings.num_inference_steps, settings.num_images
    return make_row(case, totals, "ms", precision, steps, batch, stages=stages)
