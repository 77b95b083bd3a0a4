"""Latency of a loaded release on this machine, by stage.

A benchmark draws the same request again and again: warm-ups first, then counted runs. Peers run in the same process
on the same weights, so that a ratio holds on a machine whose clocks drift.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from engine_builder.benchmarks.rows import Row, make_row, medians
from model import components
from model.encoding import THREADS
from model.image import broken_image, encode_base64
from model.loading import Loaded
from model.pipeline import Decoding, draw, generate, request_tables
from model.request import GenerationRequest, GenerationSettings, resolve


def measure(work: Callable[[], dict[str, float]], warm_ups: int, runs: int) -> tuple[list[float], dict[str, float]]:
    """Milliseconds of each counted run, and the median milliseconds of each stage that `work` returns."""
    for _ in range(warm_ups):
        work()
    totals: list[float] = []
    stages: list[dict[str, float]] = []
    for _ in range(runs):
        began = time.perf_counter()
        stages.append(work())
        totals.append((time.perf_counter() - began) * 1000)
    return totals, medians(stages)


def bench_release(loaded: Loaded, request: GenerationRequest, warm_ups: int, runs: int) -> Row:
    """Request in to encoded picture out, in this process."""
    settings = resolve(request, loaded.served)

    def work() -> dict[str, float]:
        pixels, timings, _ = generate(loaded.model, [settings])
        began = time.perf_counter()
        for picture in pixels:
            encode_base64(picture, settings.output_format, settings.quality)
        return timings | {"encode": (time.perf_counter() - began) * 1000}

    return _release_row(loaded, settings, *measure(work, warm_ups, runs))


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


def bench_diffusers(
    folder: Path, like: GenerationSettings, precision: str, warm_ups: int, runs: int, compiled: bool = False
) -> Row:
    """diffusers' own pipeline on the same weights, size, steps and guidance. No refiner.

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
        for image in images:
            image.convert("RGB").tobytes()
        return {}

    totals, stages = measure(work, warm_ups, runs)
    kind = "compiled" if compiled else "eager"
    return _row(f"diffusers {kind} {like.width}x{like.height}", like, precision, totals, stages)


def precision_of(loaded: Loaded) -> str:
    """The dtype that the base's UNet answers in, for a row."""
    return loaded.model.engines[components.UNET].signature.outputs[0].dtype


def _release_row(loaded: Loaded, settings: GenerationSettings, totals: list[float], stages: dict[str, float]) -> Row:
    case = f"{loaded.release} {settings.width}x{settings.height}"
    return _row(case, settings, precision_of(loaded), totals, stages)


def _row(case: str, settings: GenerationSettings, precision: str, totals: list[float], stages: dict[str, float]) -> Row:
    steps, batch = settings.num_inference_steps, settings.num_images
    return make_row(case, totals, "ms", precision, steps, batch, stages=stages)
