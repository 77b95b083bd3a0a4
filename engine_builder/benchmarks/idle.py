"""The share of a denoising loop in which the GPU is idle, by the profiler and by the GPU's own counters.

    python -m engine_builder.benchmarks.idle STORE NAME/1 --steps 100 --out docs/benchmarks/h200.json

A step is one launch of a CUDA graph. A gap between two kernels of one launch is the device's own: the time from one
kernel to the next. Between two launches the device may be waiting for the host to queue the next one.

The profiler marks each kernel, which lengthens these gaps. So the same loop runs again without the profiler, and a
third row states the share of that loop's time which the profiled kernels leave. The counters do not see gaps within a
launch, only a GPU without work, and are inexact for loops that take less than some seconds.
"""

import statistics
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from engine_builder.benchmarks.bench import load_here, precision_of, release_parser
from engine_builder.benchmarks.gpu_counters import Busy, GpuCounters, gpu_counters
from engine_builder.benchmarks.rows import Row, finish, make_row
from model.api.request import GenerationRequest, resolve
from model.denoising.loop import ImageState, Loop
from model.loading.load import Loaded
from model.pipeline.params import GenerationParams
from model.pipeline.runner import Runner
from model.pipeline.text_to_image import denoise


@dataclass(frozen=True)
class Activity:
    """A kernel or a copy: its time in microseconds, and the launch (a graph's, or its own) that it belongs to."""

    start: float
    end: float
    launch: int


@dataclass(frozen=True)
class Gaps:
    """Microseconds from the start of the first activity to the end of the last, and how many of them were idle."""

    span: float
    within: float
    """Idle between activities of one launch."""
    between: float
    """Idle between two launches."""

    @property
    def idle(self) -> float:
        return self.within + self.between


def gaps(activities: Iterable[Activity]) -> Gaps:
    """Measure the gaps between activities, which may overlap. At least one, in any order."""
    first, *others = sorted(activities, key=lambda one: one.start)
    reached, launch = first.end, first.launch
    within = between = 0.0
    for one in others:
        gap = max(0.0, one.start - reached)
        if one.launch == launch:
            within += gap
        else:
            between += gap
        if one.end >= reached:
            reached, launch = one.end, one.launch
    return Gaps(reached - first.start, within, between)


def profile(loaded: Loaded, params: GenerationParams) -> list[Activity]:
    """Return what the GPU did in all steps of one request, as the profiler saw it."""
    images, loop = _prepare(loaded, params)
    with torch.inference_mode(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        denoise(loop, images)
        torch.cuda.synchronize()
    return [
        Activity(event.time_range.start, event.time_range.end, event.id)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]


def count(loaded: Loaded, params: GenerationParams, counters: GpuCounters | None) -> tuple[float, Busy | None]:
    """Run the same loop without the profiler. Returns its milliseconds, and how busy the device was.

    The counters cover the steps after the first fifth. A thread of its own samples them, so no step waits for that.
    """
    images, loop = _prepare(loaded, params)
    steps = params.num_inference_steps
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    samples = []
    with torch.inference_mode(), ThreadPoolExecutor(1) as sampler:
        for image in images:
            loop.add(image)
        began.record()
        for step in range(steps):
            if counters is not None and step in (steps // 5, steps - 1):
                samples.append(sampler.submit(counters.sample))
            loop.step()
        ended.record()
        ended.synchronize()
    taken = [sample.result() for sample in samples]
    return began.elapsed_time(ended), counters.busy(*taken) if counters is not None and len(taken) == 2 else None


def _prepare(loaded: Loaded, params: GenerationParams) -> tuple[list[ImageState], Loop]:
    """Return the images of one request, on the device, and an empty loop for them."""
    with torch.inference_mode():
        runner = Runner(loaded.model)
        plan = runner.plan(params)
        images = plan.images()
        for image in images:
            key = runner.advance(plan, image)
        assert key is not None
        torch.cuda.synchronize()
    return images, loaded.model.loop(*key)


def measure(loaded: Loaded, request: GenerationRequest, runs: int) -> list[Row]:
    """Return rows in percent of the loop's time: idle, idle between launches, and idle without the profiler.

    If the GPU has counters, a fourth row has the idle share that they saw.
    """
    params = resolve(request, loaded.served)
    profile(loaded, params)  # captures the graphs, and starts the profiler
    profiles, counts = [], []
    with gpu_counters(loaded.model.device) as counters:
        for _ in range(runs):
            profiles.append(profile(loaded, params))
            counts.append(count(loaded, params, counters))
    found = [gaps(activities) for activities in profiles]
    kernels = [(one.span - one.idle) / 1000 for one in found]  # ms
    unprofiled = [milliseconds for milliseconds, _ in counts]
    precision, steps = precision_of(loaded), params.num_inference_steps

    def row(case: str, values: list[float], extra: dict[str, Any]) -> Row:
        name = f"{loaded.release} {params.width}x{params.height}, {case}"
        return make_row(name, values, "%", precision, steps, params.num_images, digits=2, **extra)

    extra = {
        "span_ms": round(statistics.median(one.span for one in found) / 1000, 2),
        "kernels_ms": round(statistics.median(kernels), 2),
        "span_without_profiler_ms": round(statistics.median(unprofiled), 2),
        "activities_a_step": round(len(profiles[-1]) / steps, 1),
    }
    left = [100 * (1 - kernel / loop) for kernel, loop in zip(kernels, unprofiled, strict=True)]
    rows = [
        row("GPU idle in the loop, by the profiler", [100 * one.idle / one.span for one in found], extra),
        row("GPU idle between steps, by the profiler", [100 * one.between / one.span for one in found], extra),
        row("GPU idle in the loop, not profiled", left, extra),
    ]
    if busy := [one for _, one in counts if one is not None]:
        share = {"multiprocessors_busy": round(statistics.median(one.multiprocessors for one in busy), 2)}
        rows.append(row("GPU idle in the loop, by its counters", [100 - one.device for one in busy], share))
    return rows


def main() -> None:
    parser = release_parser(__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--images", type=int, default=1, help="at most as many as the loop takes at once")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU was found: this benchmark profiles one.")
    loaded = load_here(arguments.store, arguments.release)
    request = GenerationRequest(
        prompt="a red circle", seed=1, num_inference_steps=arguments.steps, num_images=arguments.images
    )
    finish(measure(loaded, request, arguments.runs), arguments.out)


if __name__ == "__main__":
    main()
