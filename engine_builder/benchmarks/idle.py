"""How much of a denoising loop the GPU does nothing, by its profiler and by its own counters, and what it waits for.

    python -m engine_builder.benchmarks.idle STORE NAME/1 --steps 100 --out docs/benchmarks/h200.json

A step is one launch of a CUDA graph. Between two kernels of a launch the device is its own master: that gap is how long
it takes from one kernel to the next. Between two launches it may be waiting for the host to queue the next one.

A profiler that marks each kernel makes the way to the next one longer. So after each profiled loop the same one runs
without it, and what the kernels that were profiled leave of that loop's time is said, too. The counters do not see what
lies between two kernels of a launch, only whether the GPU is left without work, and are rough where the loop takes less
than some seconds.
"""

import argparse
import json
import statistics
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from engine_builder.benchmarks.bench import load_here, precision_of
from engine_builder.benchmarks.gpu_counters import Busy, GpuCounters, gpu_counters
from engine_builder.benchmarks.rows import Row, append_rows, make_row
from model.api.request import (
    GenerationRequest,
    GenerationSettings,
    resolve,
)
from model.denoising.loop import Loop
from model.denoising.loop import Row as LoopRow
from model.engines import components
from model.loading.load import Loaded
from model.pipeline.text_to_image import (
    base_rows,
    denoise,
    request_tables,
)
from model.store.store import open_store


@dataclass(frozen=True)
class Activity:
    """A kernel or a copy: when it ran, in microseconds, and the launch (of a graph, or its own) that it is part of."""

    start: float
    end: float
    launch: int


@dataclass(frozen=True)
class Gaps:
    """Microseconds from the first activity to the end of the last, and how many of them nothing ran."""

    span: float
    within: float
    """Between activities of one launch."""
    between: float
    """Between the activities of two launches."""


def gaps(activities: Iterable[Activity]) -> Gaps:
    """What is left between `activities`, in any order, at least one; they may overlap."""
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


def profile(loaded: Loaded, settings: GenerationSettings) -> list[Activity]:
    """What the GPU did from the first step of one request to its last, as its profiler marks it."""
    rows, loop = _prepared(loaded, settings)
    with (
        torch.inference_mode(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler,
    ):
        denoise(loop, rows)
        torch.cuda.synchronize()
    return [
        Activity(event.time_range.start, event.time_range.end, event.id)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]


def count(loaded: Loaded, settings: GenerationSettings, counters: GpuCounters | None) -> tuple[float, Busy | None]:
    """The same loop with no profiler: its milliseconds, and how busy the device was from its fifth part to its last.

    Samples are taken by a thread of their own, so that no step waits for one.
    """
    rows, loop = _prepared(loaded, settings)
    steps = settings.num_inference_steps
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    samples = []
    with torch.inference_mode(), ThreadPoolExecutor(1) as sampler:
        for row in rows:
            loop.join(row)
        began.record()
        for step in range(steps):
            if counters is not None and step in (steps // 5, steps - 1):
                samples.append(sampler.submit(counters.sample))
            loop.step()
        ended.record()
        ended.synchronize()
    taken = [sample.result() for sample in samples]
    return began.elapsed_time(ended), counters.busy(*taken) if counters is not None and len(taken) == 2 else None


def _prepared(loaded: Loaded, settings: GenerationSettings) -> tuple[list[LoopRow], Loop]:
    """One request's rows, all on the device, and the loop that is to run them."""
    with torch.inference_mode():
        rows = base_rows(loaded.model, settings, request_tables(loaded.model, settings)[0])
        loop = loaded.model.loop(components.UNET, settings.height, settings.width)
        torch.cuda.synchronize()
    return rows, loop


def measure(loaded: Loaded, request: GenerationRequest, runs: int) -> list[Row]:
    """Rows in percent of the loop. By the profiler: that no kernel ran, what of that lay between launches, and what its
    kernels leave of a loop that is not profiled. By the GPU's counters, where it has them: that it had no work."""
    settings = resolve(request, loaded.served)
    profile(loaded, settings)  # captures the graphs, and sets the profiler up
    profiles, counts = [], []
    with gpu_counters(loaded.model.device) as counters:
        for _ in range(runs):
            profiles.append(profile(loaded, settings))
            counts.append(count(loaded, settings, counters))
    found = [gaps(activities) for activities in profiles]
    kernels = [(one.span - one.within - one.between) / 1000 for one in found]  # ms
    alone = [milliseconds for milliseconds, _ in counts]
    extra = {
        "span_ms": round(statistics.median(one.span for one in found) / 1000, 2),
        "kernels_ms": round(statistics.median(kernels), 2),
        "span_without_profiler_ms": round(statistics.median(alone), 2),
        "activities_a_step": round(len(profiles[-1]) / settings.num_inference_steps, 1),
    }
    precision = precision_of(loaded)
    steps = settings.num_inference_steps

    def row(case: str, values: list[float], more: dict[str, float]) -> Row:
        name = f"{loaded.release} {settings.width}x{settings.height}, {case}"
        return make_row(name, values, "%", precision, steps, settings.num_images, digits=2, extra=more)

    rows = [
        row(
            "GPU idle in the loop, by the profiler",
            [100 * (one.within + one.between) / one.span for one in found],
            extra,
        ),
        row("GPU idle between steps, by the profiler", [100 * one.between / one.span for one in found], extra),
        row(
            "GPU idle in the loop, not profiled",
            [100 * (1 - ran / of) for ran, of in zip(kernels, alone, strict=True)],
            extra,
        ),
    ]
    busy = [one for _, one in counts if one is not None]
    if busy:
        share = {"multiprocessors_busy": round(statistics.median(one.multiprocessors for one in busy), 2)}
        rows.append(row("GPU idle in the loop, by its counters", [100 - one.device for one in busy], share))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="folder, file:// or s3:// URL")
    parser.add_argument("release", help="MODEL/VERSION")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--images", type=int, default=1, help="as many as the loop takes at once, or fewer")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append the rows to this JSON file")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU here: this profiles one.")
    loaded = load_here(open_store(given.store), given.release)
    request = GenerationRequest(prompt="a red circle", seed=1, num_inference_steps=given.steps, num_images=given.images)
    rows = measure(loaded, request, given.runs)
    if given.out is not None:
        append_rows(given.out, rows)
    print(json.dumps([row.to_dict() for row in rows]))


if __name__ == "__main__":
    main()
