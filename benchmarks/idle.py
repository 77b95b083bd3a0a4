"""Measure the share of a denoising loop in which the GPU is idle, by the profiler.

    python -m benchmarks.idle STORE NAME/1 --steps 100 --out docs/benchmarks/h200.json

A step is one launch of a CUDA graph. The host has no part in a gap between two kernels of one launch. Between two
launches the device may be waiting for the host to queue the next launch.

The profiler marks each kernel, which lengthens these gaps.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from benchmarks.measure import load_in_process, precision_of, release_parser
from benchmarks.rows import Row, finish, make_row
from model.api.resolve import resolve
from model.loading.load import Loaded
from model.pipeline.encoded_once import EncodedOnce
from model.pipeline.params import GenerationParams
from model.pipeline.runner import Runner
from model.pipeline.text_to_image import denoise
from model.request_fields import GenerationRequest


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
    with torch.inference_mode():
        runner = Runner(loaded.model)
        plan = runner.plan(params)
        images = plan.images()
        encoded = EncodedOnce(range(len(images)))
        for image in images:
            key = runner.advance(plan, image, encoded)
        assert key is not None
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            denoise(loaded.model.loop(*key), images)
            torch.cuda.synchronize()
    return [
        Activity(event.time_range.start, event.time_range.end, event.id)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]


def measure(loaded: Loaded, request: GenerationRequest, runs: int) -> list[Row]:
    """Return rows in percent of the loop's time: idle, and idle between launches."""
    params = resolve(request, loaded.served)
    profile(loaded, params)  # captures the graphs, and starts the profiler
    profiles = [profile(loaded, params) for _ in range(runs)]
    measured = [measure_gaps(activities) for activities in profiles]
    name, precision = f"{loaded.release} {params.width}x{params.height}", precision_of(loaded)
    steps = params.num_inference_steps
    span = round(statistics.median(gaps.span for gaps in measured) / 1000, 2)
    each_step = round(len(profiles[-1]) / steps, 1)
    return [
        make_row(
            f"{name}, GPU idle {where}, by the profiler", shares, "%", precision, steps, params.num_images,
            digits=2, span_ms=span, activities_a_step=each_step,
        )
        for where, shares in (
            ("in the loop", [100 * gaps.idle / gaps.span for gaps in measured]),
            ("between steps", [100 * gaps.between / gaps.span for gaps in measured]),
        )
    ]  # fmt: skip


def main() -> None:
    parser = release_parser(__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--images", type=int, default=1, help="images per request, at most the loop's capacity")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU was found: this benchmark profiles one.")
    fields = {"prompt": "a red circle", "num_inference_steps": arguments.steps, "num_images": arguments.images}
    loaded = load_in_process(arguments.store, arguments.release)
    finish(measure(loaded, GenerationRequest.model_validate(fields), arguments.runs), arguments.out)


if __name__ == "__main__":
    main()
