"""Latency of a loaded release on this machine, by stage.

A benchmark draws the same request again and again: warm-ups first, then counted runs. Peers draw it in the same process
on the same weights, in turns with the release: what drifts meanwhile, a GPU's clocks or what else a host has to do,
meets all of them alike, so that a ratio holds.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine_builder.benchmarks.rows import Row, make_row, medians
from model import components
from model.encoding import THREADS
from model.image import Pixels, broken_image, encode_base64
from model.loading import Loaded
from model.pipeline import Decoding, draw, generate, request_tables
from model.request import GenerationRequest, GenerationSettings, resolve

PEERS = ("eager", "compiled")  # how diffusers' pipeline is run
Work = Callable[[], dict[str, float]]
"""Draws one request, and gives the milliseconds of its stages."""


def measure(works: Sequence[Work], warm_ups: int, runs: int) -> list[tuple[list[float], dict[str, float]]]:
    """Of each: milliseconds of its counted runs, and the median milliseconds of its stages. Each is warmed up, then
    they take turns."""
    for work in works:
        for _ in range(warm_ups):
            work()
    totals: list[list[float]] = [[] for _ in works]
    stages: list[list[dict[str, float]]] = [[] for _ in works]
    for _ in range(runs):
        for work, its_totals, its_stages in zip(works, totals, stages, strict=True):
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
    loaded: Loaded, request: GenerationRequest, folder: Path, kinds: Iterable[str], warm_ups: int, runs: int
) -> list[Row]:
    """The release, then diffusers' pipeline on the weights of `folder` in each of `kinds`, some of `PEERS`: the same
    request in turns, in to encoded picture out."""
    settings, precision = resolve(request, loaded.served), precision_of(loaded)
    peers = {kind: diffusers_work(folder, settings, precision, kind == "compiled") for kind in kinds}
    first, *others = measure([release_work(loaded, settings), *peers.values()], warm_ups, runs)
    rows = [_release_row(loaded, settings, *first)]
    for kind, measured in zip(peers, others, strict=True):
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


def diffusers_work(folder: Path, like: GenerationSettings, precision: str, compiled: bool = False) -> Work:
    """Drawing that request by diffusers' own pipeline: its size, steps and guidance. No refiner.

    Eager PyTorch, or `compiled`: channels_last, fused projections, torch.compile with CUDA graphs on UNet and decoder.
    """
    from diffusers import StableDiffusionXLPipeline

    load: Any = StableDiffusionXLPipeline.from_pretrained
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipeline = load(folder, dtype=getattr(torch, precision), use_safetensors=True, add_watermarker=False).to(device)
    pipeline.set_progress_bar_config(disable=True)
    if compiled:
        for network in (pipeline.unet, pipeline.vae):
            network.to(memory_format=torch.channels_last)
        pipeline.fuse_qkv_projections()
        pipeline.unet = torch.compile(pipeline.unet, mode="reduce-overhead", fullgraph=True)
        pipeline.vae.decode = torch.compile(pipeline.vae.decode, mode="reduce-overhead", fullgraph=True)

    def work() -> dict[str, float]:
        images = pipeline(
            prompt=like.prompt,
            width=like.width,
            height=like.height,
            num_inference_steps=like.num_inference_steps,
            guidance_scale=like.guidance_scale,
            num_images_per_prompt=like.num_images,
            generator=torch.Generator().manual_seed(like.seed),
        ).images
        _encode([np.asarray(image.convert("RGB")) for image in images], like)
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
