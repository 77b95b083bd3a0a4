"""Measure the latency of a loaded release in this process, by stage.

A benchmark generates the same request many times: warm-ups first, then counted runs. Candidates of a comparison
alternate after a few runs each, so that changing clocks of the host or the GPU affect all equally. The first run after
a change is not counted, because the previous candidate has warmed the device.

Apart from engine_builder, it imports only packages of the server image.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.rows import Row, make_row, medians
from model.cold_start import ColdStart
from model.denoising.loop import ImageState
from model.deployment import Deployment
from model.images.encode import broken_image, encode_base64
from model.images.pixels import Pixels
from model.loading.load import Loaded
from model.loading.releases import load_deployment
from model.pipeline.params import GenerationParams
from model.pipeline.runner import Runner
from model.pipeline.spec import UNET
from model.pipeline.text_to_image import generate, run_stages
from model.scheduling.output_workers import THREADS
from model.settings import read_settings
from model.store.store import open_store

_ALTERNATING_RUNS = 4  # counted runs of a candidate before the next candidate
Work = Callable[[], dict[str, float]]
"""Generates the images of one request, and returns the milliseconds of its stages."""


def release_parser(description: str | None, kinds: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return a parser for the arguments `store` and `release`, after one of `kinds`, and for the option `--out`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if kinds:
        parser.add_argument("kind", choices=kinds)
    parser.add_argument("store", help="folder, file:// or s3:// URL")
    parser.add_argument("release", help="MODEL/VERSION")
    parser.add_argument("--out", type=Path, help="append the rows to this JSON file")
    return parser


def load_in_process(store: str, release: str, **changes: object) -> Loaded:
    """Load a release as a server does, with the settings of the environment. `changes`: of these settings.

    Raises as `load_deployment` does.
    """
    settings = read_settings().of_release(release).model_copy(update=changes)
    options = settings.store_options()
    opened = open_store(store, options)
    loaded = load_deployment(opened, Deployment.of(settings), options.cache_folder, ColdStart())
    return loaded


def measure(works: Sequence[Work], warm_ups: int, runs: int) -> list[tuple[list[float], dict[str, float]]]:
    """Warm up each of `works`, then run them alternately.

    Returns for each of them the milliseconds of its counted runs, and the median milliseconds of its stages.
    """
    for work in works:
        for _ in range(warm_ups):
            work()
    measured: list[tuple[list[float], list[dict[str, float]]]] = [([], []) for _ in works]
    for begin in range(0, runs, _ALTERNATING_RUNS):
        for work, (totals, stages) in zip(works, measured, strict=True):
            if len(works) > 1:
                work()
            for _ in range(begin, min(runs, begin + _ALTERNATING_RUNS)):
                began = time.perf_counter()
                stages.append(work())
                totals.append((time.perf_counter() - began) * 1000)
    return [(totals, medians(stages)) for totals, stages in measured]


def measure_requests(requests: Sequence[tuple[str, Loaded, GenerationParams]], warm_ups: int, runs: int) -> list[Row]:
    """Measure requests to loaded releases alternately. Returns the row of each, which begins with its name."""
    measured = measure([release_work(loaded, params) for _, loaded, params in requests], warm_ups, runs)
    return [
        timed_row(name, params, precision_of(loaded), *result)
        for (name, loaded, params), result in zip(requests, measured, strict=True)
    ]


def release_work(loaded: Loaded, params: GenerationParams) -> Work:
    """Return a function that generates this request with the release."""

    def work() -> dict[str, float]:
        images, timings, _ = generate(loaded.model, [params])
        began = time.perf_counter()
        encode_all(images, params)
        return timings | {"encode": (time.perf_counter() - began) * 1000}

    return work


def generate_offline(
    loaded: Loaded,
    batch: Sequence[GenerationParams],
    seconds: float,
    min_runs: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Generate `batch` repeatedly for about `seconds`, at least `min_runs` times. Returns the milliseconds of each.

    As in the server, other threads decode and encode images while the next batch is generated. The last batch's time
    includes the end of all encoding. Raises the error of any encoding.
    """
    totals: list[float] = []
    encoding: list[Future[None]] = []
    requests = [params for params in batch for _ in range(params.num_images)]
    runner = Runner(loaded.model)

    def encode(image: ImageState, params: GenerationParams) -> None:
        assert image.pixels is not None
        pixels = image.pixels.wait()
        if pixels is None:
            raise broken_image([0], 1)
        encode_all([pixels], params)

    with ThreadPoolExecutor(THREADS) as encoders, torch.inference_mode():
        began = finished = clock()
        while len(totals) < min_runs or finished - began < seconds:
            images = run_stages(runner, [runner.plan(params) for params in batch])
            encoding += [encoders.submit(encode, image, params) for image, params in zip(images, requests, strict=True)]
            now = clock()
            totals.append((now - finished) * 1000)
            finished = now
        for task in encoding:
            task.result()
        totals[-1] += (clock() - finished) * 1000
    return totals


def encode_all(images: Iterable[Pixels], params: GenerationParams) -> None:
    """Encode images as for the request's response."""
    for image in images:
        encode_base64(image, params.output_format, params.quality)


def precision_of(loaded: Loaded) -> str:
    """Return the precision in a row: the dtype of the base UNet's output, or the name of an 8-bit precision."""
    return (
        str(loaded.precision)
        if loaded.precision.is_quantized
        else loaded.model.engines[UNET].signature.outputs[0].dtype
    )


def timed_row(
    name: str, params: GenerationParams, precision: str, totals: Sequence[float], stages: dict[str, float]
) -> Row:
    """Return the row of a request that `name` generated. `totals` and `stages` are as `measure` returns them."""
    case, steps = f"{name} {params.width}x{params.height}", params.num_inference_steps
    return make_row(case, totals, "ms", precision, steps, params.num_images, stages=stages)
