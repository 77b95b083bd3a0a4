"""Measure the share of a denoising loop in which the GPU is idle, by the profiler and by the GPU's own counters.

    python -m engine_builder.benchmarks.idle STORE NAME/1 --steps 100 --out docs/benchmarks/h200.json

A step is one launch of a CUDA graph. The host has no part in a gap between two kernels of one launch. Between two
launches the device may be waiting for the host to queue the next launch.

The profiler marks each kernel, which lengthens these gaps. So the same loop runs again without the profiler. A third
row states the share of that loop's time without the profiled kernels' time. The counters do not record gaps
within a launch, only a GPU without work. They are inexact for loops that take less than some seconds.
"""

import statistics
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from engine_builder.benchmarks.bench import load_in_process, precision_of, release_parser
from engine_builder.benchmarks.gpu_counters import GpuCounters, Utilization, gpu_counters
from engine_builder.benchmarks.rows import Row, finish, make_row
from model.api.request import GenerationRequest
from model.api.resolve import resolve
from model.denoising.loop import ImageState, Loop
from model.loading.load import Loaded
from model.pipeline.params import GenerationParams
from model.pipeline.runner import Runner
from model.pipeline.text_to_image import denoise


@dataclass(frozen=True)
class Activity:
    """A kernel or a copy: its start and end in microseconds, and the number of its launch."""

    start: float
    end: float
    launch: int


@dataclass(frozen=True)
class Gaps:
    """Microseconds from the start of the first activity to the end of the last, and the idle ones among them."""

    span: float
    within: float
    """Idle between activities of one launch."""
    between: float
    """Idle between two launches."""

    @property
    def idle(self) -> float:
        return self.within + self.between


def measure_gaps(activities: Iterable[Activity]) -> Gaps:
    """Measure the gaps between at least one activity. Activities may overlap, and have any order."""
    first, *others = sorted(activities, key=lambda activity: activity.start)
    end, launch = first.end, first.launch
    within = between = 0.0
    for activity in others:
        gap = max(0.0, activity.start - end)
        if activity.launch == launch:
            within += gap
        else:
            between += gap
        if activity.end >= end:
            end, launch = activity.end, activity.launch
    return Gaps(end - first.start, within, between)


def profile(loaded: Loaded, params: GenerationParams) -> list[Activity]:
    """Return the GPU's activities in all steps of one request, as the profiler recorded them."""
    images, loop = _prepare(loaded, params)
    with torch.inference_mode(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        denoise(loop, images)
        torch.cuda.synchronize()
    return [
        Activity(event.time_range.start, event.time_range.end, event.id)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]


def run_unprofiled(
    loaded: Loaded, params: GenerationParams, counters: GpuCounters | None
) -> tuple[float, Utilization | None]:
    """Run the same loop without the profiler. Returns its milliseconds, and the device's utilization.

    The counters cover the steps after the first fifth. Another thread samples them, so no step waits for that.
    """
    images, loop = _prepare(loaded, params)
    steps = params.num_inference_steps
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    sampling = []
    with torch.inference_mode(), ThreadPoolExecutor(1) as sampler:
        for image in images:
            loop.add(image)
        began.record()
        for step in range(steps):
            if counters is not None and step in (steps // 5, steps - 1):
                sampling.append(sampler.submit(counters.sample))
            loop.step()
        ended.record()
        ended.synchronize()
    samples = [task.result() for task in sampling]
    measured = counters is not None and len(samples) == 2
    return began.elapsed_time(ended), counters.utilization(*samples) if counters and measured else None


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

    If the GPU has counters, a fourth row has the idle share by them.
    """
    params = resolve(request, loaded.served)
    profile(loaded, params)  # captures the graphs, and starts the profiler
    profiles, unprofiled = [], []
    with gpu_counters(str(torch.cuda.get_device_properties(loaded.model.device).uuid)) as counters:
        for _ in range(runs):
            profiles.append(profile(loaded, params))
            unprofiled.append(run_unprofiled(loaded, params, counters))
    measured = [measure_gaps(activities) for activities in profiles]
    kernels = [(gaps.span - gaps.idle) / 1000 for gaps in measured]  # ms
    loops = [milliseconds for milliseconds, _ in unprofiled]
    precision, steps = precision_of(loaded), params.num_inference_steps

    def row(case: str, values: list[float], extra: dict[str, Any]) -> Row:
        name = f"{loaded.release} {params.width}x{params.height}, {case}"
        return make_row(name, values, "%", precision, steps, params.num_images, digits=2, **extra)

    extra = {
        "span_ms": round(statistics.median(gaps.span for gaps in measured) / 1000, 2),
        "kernels_ms": round(statistics.median(kernels), 2),
        "span_without_profiler_ms": round(statistics.median(loops), 2),
        "activities_a_step": round(len(profiles[-1]) / steps, 1),
    }
    remaining = [100 * (1 - kernel / loop) for kernel, loop in zip(kernels, loops, strict=True)]
    rows = [
        row("GPU idle in the loop, by the profiler", [100 * gaps.idle / gaps.span for gaps in measured], extra),
        row("GPU idle between steps, by the profiler", [100 * gaps.between / gaps.span for gaps in measured], extra),
        row("GPU idle in the loop, not profiled", remaining, extra),
    ]
    if utilizations := [utilization for _, utilization in unprofiled if utilization is not None]:
        median = statistics.median(utilization.multiprocessors for utilization in utilizations)
        idle = [100 - utilization.device for utilization in utilizations]
        extra = {"multiprocessors_busy": round(median, 2)}
        rows.append(row("GPU idle in the loop, by its counters", idle, extra))
    return rows


def main() -> None:
    parser = release_parser(__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--images", type=int, default=1, help="images per request, at most the loop's capacity")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU was found: this benchmark profiles one.")
    loaded = load_in_process(arguments.store, arguments.release)
    request = GenerationRequest(
        prompt="a red circle", seed=1, num_inference_steps=arguments.steps, num_images=arguments.images
    )
    finish(measure(loaded, request, arguments.runs), arguments.out)


if __name__ == "__main__":
    main()
