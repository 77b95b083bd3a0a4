"""The chart of the README: seconds for one SDXL image on one GPU, by Preheat and by other software.

Measured bars come from rows of one commit, GPU and torch. Published bars are numbers that others published for the same
kind of GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine_builder.benchmarks.rows import BadRows, Row

SECTION = "h100"  # the file of rows in docs/benchmarks, without its suffix
TITLE = "One image of 1024x1024, 30 steps, on an H100"
_PREHEAT = "Preheat"
_BAR_NAMES = {  # by the case of a row
    "sdxl-30-steps, in turns with diffusers": _PREHEAT,
    "sdxl-30-steps, diffusers compiled": "diffusers {version}, torch.compile",
    "sdxl-30-steps, diffusers eager": "diffusers {version}, eager",
}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar. `seconds`: for one image. `source`: the hardware and versions, and who measured or published."""

    name: str
    seconds: float
    source: str
    is_measured: bool

    @property
    def color(self) -> str:
        """A color of matplotlib: blue for Preheat, darker grey for other measured bars, lighter grey for published."""
        if self.name == _PREHEAT:
            return "C0"
        return "0.55" if self.is_measured else "0.8"


_PUBLISHED_BARS = (
    # www.baseten.co/blog/40-faster-stable-diffusion-xl-inference-with-nvidia-tensorrt, figures of NVIDIA and
    # Stability AI's model card stabilityai/stable-diffusion-xl-1.0-tensorrt. Neither names the version of TensorRT.
    Bar(
        name="TensorRT",
        seconds=1.471,
        source="H100, version not stated; published by Stability AI and NVIDIA",
        is_measured=False,
    ),
)


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Return the bars of the chart, the shortest first. `rows`: those of `SECTION`; the last row of a case counts.

    Raises BadRows if these rows differ in commit, GPU or torch.
    """
    last_rows = {row.case: row for row in rows if row.case in _BAR_NAMES}.values()
    sources = {_source_of(row) for row in last_rows}
    if len(sources) > 1:
        raise BadRows(
            f"The chart {TITLE!r} would compare different runs: {' / '.join(sorted(sources))}.",
            "Measure all its cases again, with one call of engine_builder.benchmarks.suite.",
        )
    measured = [
        Bar(
            name=_BAR_NAMES[row.case].format(version=row.extra.get("diffusers", "of unknown version")),
            seconds=row.p50 / 1000,
            source=_source_of(row),
            is_measured=True,
        )
        for row in last_rows
    ]
    return sorted([*measured, *_PUBLISHED_BARS], key=lambda bar: bar.seconds)


def _source_of(row: Row) -> str:
    return f"{row.gpu.removeprefix('NVIDIA ')}, torch {row.torch}; measured at commit {row.commit}"


def draw(axes: Any, rows: Sequence[Row]) -> None:
    """Draw the bars with their names and sources on matplotlib's `axes`."""
    ordered = bars(rows)
    labels = [f"{bar.name}\n{bar.source}" for bar in ordered]
    axes.barh(labels, [bar.seconds for bar in ordered], color=[bar.color for bar in ordered], height=0.6)
    for label, bar in zip(labels, ordered, strict=True):
        axes.annotate(
            f"{bar.seconds:.2f} s", (bar.seconds, label), xytext=(4, 0), textcoords="offset points", va="center"
        )
    axes.figure.set_size_inches(9.5, 2.8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("seconds (measured bars: median, fp16, guidance 7.5)")
