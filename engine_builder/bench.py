"""Latency of a loaded release on this machine, by stage, as rows that are kept and compared.

A benchmark draws the same request again and again: warm-ups first, then counted runs. Peers run in the same process
on the same weights, so that a ratio holds on a machine whose clocks drift.
"""

import importlib.metadata
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from model.image import encode_base64
from model.loading import Loaded
from model.pipeline import generate
from model.request import GenerationRequest, GenerationSettings, resolve


@dataclass(frozen=True)
class Row:
    """One measured case. Values are milliseconds unless `unit` says otherwise; `stages` are medians."""

    case: str
    value: float
    unit: str
    p50: float
    p90: float
    p99: float
    runs: int
    steps: int
    batch: int
    precision: str
    gpu: str
    driver: str
    torch: str
    commit: str
    command: str
    stages: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def measure(work: Callable[[], dict[str, float]], warm_ups: int, runs: int) -> tuple[list[float], dict[str, float]]:
    """Milliseconds of each counted run, and the median milliseconds of each stage that `work` returns."""
    for _ in range(warm_ups):
        work()
    totals: list[float] = []
    stages: dict[str, list[float]] = {}
    for _ in range(runs):
        began = time.perf_counter()
        for stage, milliseconds in work().items():
            stages.setdefault(stage, []).append(milliseconds)
        totals.append((time.perf_counter() - began) * 1000)
    return totals, {stage: round(statistics.median(values), 2) for stage, values in stages.items()}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * share // 1))
    return ordered[int(rank) - 1]


def bench_release(loaded: Loaded, request: GenerationRequest, warm_ups: int, runs: int) -> Row:
    """Request in to encoded picture out, in this process."""
    settings = resolve(request, loaded.served)

    def work() -> dict[str, float]:
        pixels, timings, _ = generate(loaded.model, [settings])
        began = time.perf_counter()
        for picture in pixels:
            encode_base64(picture, settings.output_format, settings.quality)
        return timings | {"encode": (time.perf_counter() - began) * 1000}

    totals, stages = measure(work, warm_ups, runs)
    precision = loaded.model.engines["unet"].signature.outputs[0].dtype
    return _row(f"{loaded.release} {settings.width}x{settings.height}", settings, precision, totals, stages)


def bench_diffusers(folder: Path, like: GenerationSettings, precision: str, warm_ups: int, runs: int) -> Row:
    """diffusers' own pipeline in eager PyTorch, the same weights, size, steps and guidance. No refiner."""
    from diffusers import StableDiffusionXLPipeline

    load: Any = StableDiffusionXLPipeline.from_pretrained
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipeline = load(folder, torch_dtype=getattr(torch, precision), use_safetensors=True, add_watermarker=False).to(
        device
    )
    pipeline.set_progress_bar_config(disable=True)

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
    return _row(f"diffusers eager {like.width}x{like.height}", like, precision, totals, stages)


def device_name() -> str:
    """The GPU's name, or the CPU's model and how many threads torch uses."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return f"{cpu}, {torch.get_num_threads()} threads"


def _driver() -> str:
    if not torch.cuda.is_available():
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip().splitlines()[0]


def _commit() -> str:
    answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return answer.stdout.strip() or "unknown"


def _row(
    case: str, settings: GenerationSettings, precision: str, totals: Sequence[float], stages: dict[str, float]
) -> Row:
    return Row(
        case=case,
        value=round(statistics.median(totals), 1),
        unit="ms",
        p50=round(percentile(totals, 0.5), 1),
        p90=round(percentile(totals, 0.9), 1),
        p99=round(percentile(totals, 0.99), 1),
        runs=len(totals),
        steps=settings.num_inference_steps,
        batch=settings.num_images,
        precision=precision,
        gpu=device_name(),
        driver=_driver(),
        torch=importlib.metadata.version("torch"),
        commit=_commit(),
        command="preheat " + " ".join(sys.argv[1:]),
        stages=stages,
    )
