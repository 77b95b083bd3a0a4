"""How much of a denoising loop the GPU does nothing, as its profiler sees it, and what it waits for.

    python -m engine_builder.benchmarks.idle STORE NAME/1 --steps 30 --out docs/benchmarks/h200.json

A step is one launch of a CUDA graph. Between two kernels of a launch the device is its own master: that gap is how long
it takes from one kernel to the next. Between two launches it may be waiting for the host to queue the next one.
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine_builder.benchmarks.bench import precision_of
from engine_builder.benchmarks.rows import Row, append_rows, make_row
from model import components
from model.coldstart import ColdStart
from model.loading import Loaded, load_release
from model.pipeline import base_rows, denoise, request_tables
from model.request import GenerationRequest, GenerationSettings, resolve
from model.store import open_store
from model.target import detect_targets


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
    """What the GPU did from the first step of one request to its last."""
    with torch.inference_mode():
        rows = base_rows(loaded.model, settings, request_tables(loaded.model, settings)[0])
        loop = loaded.model.loop(components.UNET, settings.height, settings.width)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            denoise(loop, rows)
            torch.cuda.synchronize()
    return [
        Activity(event.time_range.start, event.time_range.end, event.id)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]


def measure(loaded: Loaded, request: GenerationRequest, runs: int) -> list[Row]:
    """Two rows in percent of the loop: all that it is idle, and what of that lies between launches."""
    settings = resolve(request, loaded.served)
    profile(loaded, settings)  # captures the graphs, and sets the profiler up
    profiles = [profile(loaded, settings) for _ in range(runs)]
    found = [gaps(activities) for activities in profiles]
    extra = {
        "span_ms": round(found[-1].span / 1000, 2),
        "activities_a_step": round(len(profiles[-1]) / settings.num_inference_steps, 1),
    }
    precision = precision_of(loaded)
    steps = settings.num_inference_steps

    def row(case: str, values: list[float]) -> Row:
        name = f"{loaded.release} {settings.width}x{settings.height}, {case}"
        return make_row(name, values, "%", precision, steps, settings.num_images, digits=2, extra=extra)

    return [
        row("GPU idle in the loop", [100 * (one.within + one.between) / one.span for one in found]),
        row("GPU idle between steps", [100 * one.between / one.span for one in found]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="folder, file:// or s3:// URL")
    parser.add_argument("release", help="MODEL/VERSION")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--images", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append the rows to this JSON file")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU here: this profiles one.")
    loaded = load_release(open_store(given.store), given.release, detect_targets(), [], ColdStart())
    request = GenerationRequest(prompt="a red circle", seed=1, num_inference_steps=given.steps, num_images=given.images)
    rows = measure(loaded, request, given.runs)
    if given.out is not None:
        append_rows(given.out, rows)
    print(json.dumps([row.to_dict() for row in rows]))


if __name__ == "__main__":
    main()
