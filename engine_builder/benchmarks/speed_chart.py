"""The chart of the README: seconds for one SDXL image on one GPU, by Preheat and by others.

Measured bars come from the rows of one run. Published bars are numbers that others published for the same kind of GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine_builder.benchmarks.rows import Row

SECTION = "h100"  # the file of rows in docs/benchmarks
TITLE = "One image of 1024x1024, 30 steps, on an H100"
_CASES = {
    "sdxl-30-steps, in turns with diffusers": "Preheat",
    "sdxl-30-steps, diffusers compiled": "diffusers 0.42.1, torch.compile",
    "sdxl-30-steps, diffusers eager": "diffusers 0.42.1, eager",
}


@dataclass(frozen=True)
class Bar:
    """One bar: `seconds` an image. `source`: the hardware and versions, and who measured it."""

    name: str
    seconds: float
    source: str
    measured: bool


_PUBLISHED = (
    # www.baseten.co/blog/40-faster-stable-diffusion-xl-inference-with-nvidia-tensorrt, figures of NVIDIA and
    # Stability AI's model card stabilityai/stable-diffusion-xl-1.0-tensorrt. Neither names the library's version.
    Bar("TensorRT", 1.471, "H100, version not stated; published by Stability AI and NVIDIA", False),
)


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Return the bars of the chart, the shortest first. `rows`: those of `SECTION`; the last row of a case counts."""
    measured = {
        _CASES[row.case]: Bar(
            _CASES[row.case],
            row.p50 / 1000,
            f"{row.gpu.removeprefix('NVIDIA ')}, torch {row.torch}; measured at commit {row.commit}",
            True,
        )
        for row in rows
        if row.case in _CASES
    }
    return sorted([*measured.values(), *_PUBLISHED], key=lambda bar: bar.seconds)


def draw(axes: Any, rows: Sequence[Row]) -> None:
    """Draw the bars with their names and sources."""
    ordered = bars(rows)
    labels = [f"{bar.name}\n{bar.source}" for bar in ordered]
    colors = ["C0" if bar.name == "Preheat" else "0.55" if bar.measured else "0.8" for bar in ordered]
    axes.barh(labels, [bar.seconds for bar in ordered], color=colors, height=0.6)
    for label, bar in zip(labels, ordered, strict=True):
        axes.annotate(
            f"{bar.seconds:.2f} s", (bar.seconds, label), xytext=(4, 0), textcoords="offset points", va="center"
        )
    axes.figure.set_size_inches(9.5, 2.8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("seconds (median), fp16, guidance 7.5")
