"""The chart of the README: seconds for one SDXL image on one GPU, by Preheat and by other software."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.rows import BadRows, Row

SPEED_SECTION = "h100"  # the file of rows in docs/benchmarks, without its suffix
SPEED_TITLE = "One image of 1024x1024, 30 steps, on an H100"
_PREHEAT = "Preheat"
_BAR_NAMES = {  # by the case of a row
    "sdxl-30-steps, in turns with diffusers": _PREHEAT,
    "sdxl-30-steps, diffusers compiled": "diffusers {version}, torch.compile",
    "sdxl-30-steps, diffusers eager": "diffusers {version}, eager",
}


@dataclass(frozen=True)
class Bar:
    """One bar. `seconds`: for one image. `source`: the hardware and versions, and who measured or published."""

    name: str
    seconds: float
    source: str
    is_measured: bool = True


# www.baseten.co/blog/40-faster-stable-diffusion-xl-inference-with-nvidia-tensorrt, figures of NVIDIA and
# Stability AI's model card stabilityai/stable-diffusion-xl-1.0-tensorrt. Neither names the version of TensorRT.
_PUBLISHED_BAR = Bar("TensorRT", 1.471, "H100, version not stated; published by Stability AI and NVIDIA", False)


def speed_bars(rows: Sequence[Row]) -> list[Bar]:
    """Return the bars of the chart, the shortest first. `rows`: of `SPEED_SECTION`; the last row of a case counts.

    Raises BadRows if these rows differ in commit, GPU or torch.
    """
    last_rows = {row.case: row for row in rows if row.case in _BAR_NAMES}.values()
    sources = {_source_of(row) for row in last_rows}
    if len(sources) > 1:
        raise BadRows(
            f"The chart {SPEED_TITLE!r} would compare different runs: {' / '.join(sorted(sources))}.",
            "Measure all its cases again, with one call of benchmarks.latency text.",
        )
    bars = [_PUBLISHED_BAR]
    for row in last_rows:
        name = _BAR_NAMES[row.case].format(version=row.extra.get("diffusers", "of unknown version"))
        bars.append(Bar(name, row.p50 / 1000, _source_of(row)))
    return sorted(bars, key=lambda bar: bar.seconds)


def _source_of(row: Row) -> str:
    return f"{row.gpu.removeprefix('NVIDIA ')}, torch {row.torch}; measured at commit {row.commit}"


def draw_speed(axes: Any, rows: Sequence[Row]) -> None:
    """Draw the bars with their names and sources on matplotlib's `axes`."""
    ordered = speed_bars(rows)
    labels = [f"{bar.name}\n{bar.source}" for bar in ordered]
    greys = ["0.55" if bar.is_measured else "0.8" for bar in ordered]
    colors = ["C0" if bar.name == _PREHEAT else grey for bar, grey in zip(ordered, greys, strict=True)]
    axes.barh(labels, [bar.seconds for bar in ordered], color=colors, height=0.6)
    for label, bar in zip(labels, ordered, strict=True):
        annotate(axes, f"{bar.seconds:.2f} s", bar.seconds, label)
    axes.figure.set_size_inches(9.5, 2.8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("seconds (measured bars: median, fp16, guidance 7.5)")


def annotate(axes: Any, text: str, end: float, label: str) -> None:
    """Write `text` at the end of a bar."""
    axes.annotate(text, (end, label), xytext=(4, 0), textcoords="offset points", va="center")
