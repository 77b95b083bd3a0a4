"""docs/benchmarks/*.json -> docs/benchmarks.md and its plots. Nothing in the page is written by hand.

Each file is a section, named after it. A section has a table of its rows, and of these plots the ones that its rows
have something for:

    cold start by phase         rows with `phases`
    time by stage               rows with `stages`
    latency against steps       rows in ms or s that differ in steps only
    throughput against batch    rows in ms that differ in batch only, and rows in images/s

A file of notes beside it (name.md) comes first. The page depends on these files alone, so a test can hold it to them;
plots need matplotlib, which is imported only to draw.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_builder.benchmarks.rows import BadRows, read_rows
from model.errors import PreheatError

Entries = dict[str, Any]
_LETTERS = {"cpu", "gpu", "sdxl", "http", "s3", "l4", "a10g", "a100", "h100", "h200", "fp8", "fp16", "bf16", "vae"}
_PER_SECOND = "images/s"
_TO_MS = {"ms": 1.0, "s": 1000.0}
_HEAD = """\
# Benchmarks

Made by `preheat report` from the rows in [benchmarks/](benchmarks/); mend those, not this page. p50, p90 and p99 are by
nearest rank over all runs, counted from the best (of images/s the highest). What a row was measured with stands under
its table, by commit.
"""


@dataclass(frozen=True)
class Plot:
    """A picture of a section: file name, title, and how it is drawn on axes."""

    name: str
    title: str
    draw: Callable[[Any], None]


def write_report(folder: Path, page: Path) -> list[Path]:
    """Write the page and its plots (SVG, into `folder`); plots that no row asks for any more are deleted.

    Returns the plots. Raises BadRows, also where there are none, or PreheatError where matplotlib is not installed.
    """
    sections = read_sections(folder)
    if not sections:
        raise BadRows(f"{folder} has no JSON file of rows: name the folder that `--out` of a benchmark wrote into.")
    wanted = {plot.name: plot for name, rows in sections.items() for plot in plots_of(name, rows)}
    drawn = [_draw(folder / f"{name}.svg", plot) for name, plot in wanted.items()]
    for path in folder.glob("*.svg"):
        if path.stem not in wanted:
            path.unlink()
    page.write_text(render(folder, page))
    return drawn


def read_sections(folder: Path) -> dict[str, list[Entries]]:
    """The rows of each file, by its name without the suffix."""
    return {path.stem: rows for path in sorted(folder.glob("*.json")) if (rows := read_rows(path))}


def render(folder: Path, page: Path) -> str:
    """The page's text."""
    where = Path(os.path.relpath(folder, page.parent)).as_posix()
    parts = [_HEAD]
    for name, rows in read_sections(folder).items():
        parts.append(f"## {title_of(name)}\n")
        notes = folder / f"{name}.md"
        if notes.is_file():
            parts.append(notes.read_text().strip() + "\n")
        parts.append(_table(rows))
        parts += [f"![{plot.title}]({where}/{plot.name}.svg)\n" for plot in plots_of(name, rows)]
        parts.append(_provenance(rows))
    return "\n".join(parts)


def title_of(name: str) -> str:
    """ "full-size-sdxl" -> "Full size SDXL"."""
    words = [word.upper() if word in _LETTERS else word for word in name.replace("_", "-").split("-")]
    return " ".join([words[0][:1].upper() + words[0][1:], *words[1:]])


def plots_of(name: str, rows: Sequence[Entries]) -> list[Plot]:
    """The plots that a section's rows have something for."""
    plots = []
    if phased := [row for row in rows if row.get("phases")]:
        plots.append(
            Plot(f"{name}-cold-start", "Cold start by phase", lambda axes: _stack(axes, phased, "phases", "seconds"))
        )
    if staged := [row for row in rows if row.get("stages")]:
        plots.append(
            Plot(f"{name}-stages", "Time by stage", lambda axes: _stack(axes, staged, "stages", "milliseconds"))
        )
    if by_steps := _series(rows, "steps", _latency):
        plots.append(
            Plot(
                f"{name}-steps",
                "Latency against steps",
                lambda axes: _lines(axes, by_steps, "steps", "milliseconds (p50)"),
            )
        )
    if by_batch := _series(rows, "batch", _throughput):
        plots.append(
            Plot(
                f"{name}-batch",
                "Throughput against batch",
                lambda axes: _lines(axes, by_batch, "images a batch", "images a second"),
            )
        )
    return plots


def _latency(row: Entries) -> float | None:
    return row["p50"] * _TO_MS[row["unit"]] if row["unit"] in _TO_MS and not row.get("phases") else None


def _throughput(row: Entries) -> float | None:
    if row["unit"] == _PER_SECOND:
        return float(row["p50"])
    milliseconds = _latency(row)
    return row["batch"] * 1000 / milliseconds if milliseconds else None


def _series(
    rows: Sequence[Entries], along: str, value: Callable[[Entries], float | None]
) -> dict[str, list[tuple[int, float]]]:
    """Rows that differ in `along` only, as points in order; one point is no line."""
    others = [key for key in ("family", "unit", "gpu", "torch", "precision", "steps", "batch") if key != along]
    found: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in rows:
        measured = value(row)
        if measured is not None and row[along] > 0:
            # The newest counts where a point was measured again.
            described = row | {"family": _family(row)}
            found.setdefault(tuple(described[key] for key in others), {})[row[along]] = measured
    lines = {key: sorted(points.items()) for key, points in found.items() if len(points) > 1}
    varying = [at for at in range(len(others)) if at == 0 or len({key[at] for key in lines}) > 1]
    return {
        ", ".join(f"{key[at]}" if at == 0 else _named(others[at], key[at]) for at in varying): points
        for key, points in lines.items()
    }


def _family(row: Entries) -> str:
    """The case without the steps and the batch in its name: "sdxl-20-steps-batch-4" -> "sdxl"."""
    text = re.sub(rf"\b{row['steps']}[- ]steps?\b|\bbatch[- ]?{row['batch']}\b", "", row["case"])
    return re.sub(r"([-, ])[-, ]+", r"\1", text).strip("-, ")


def _named(key: str, value: Any) -> str:
    return f"{value} {key}" if key == "steps" else f"{key} {value}" if key == "batch" else str(value)


# -- the page -----------------------------------------------------------------------------------------------------


def _table(rows: Sequence[Entries]) -> str:
    lines = [
        "| case | precision | steps | batch | p50 | p90 | p99 | runs | commit |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        unit = row["unit"]
        numbers = " | ".join(f"{_number(row[key])} {unit}" for key in ("p50", "p90", "p99"))
        counted = f"{row['precision']} | {row['steps'] or ''} | {row['batch'] or ''}"
        lines.append(f"| {_cell(row['case'])} | {counted} | {numbers} | {row['runs']} | {row['commit']} |")
    return "\n".join(lines) + "\n"


def _provenance(rows: Sequence[Entries]) -> str:
    """Device, versions, commit and command; once for all rows that share them."""
    seen: dict[tuple[str, ...], None] = {}
    for row in rows:
        seen[tuple(row[key] for key in ("gpu", "driver", "torch", "commit", "command"))] = None
    lines = []
    for gpu, driver, torch, commit, command in seen:
        driven = f", driver {driver}" if driver else ""
        lines.append(f"- {_cell(gpu)}{driven}, torch {torch}, commit {commit}: `{command.replace('`', chr(39))}`")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """Three digits that count, and no exponent."""
    if value and abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:,.0f}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# -- the plots ----------------------------------------------------------------------------------------------------


def _draw(path: Path, plot: Plot) -> Path:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PreheatError("Plots need matplotlib: install it (`pip install matplotlib`).") from error
    # The same rows give the same file, and words stay words.
    with matplotlib.rc_context({"svg.hashsalt": plot.name, "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        plot.draw(axes)
        axes.set_title(plot.title, loc="left", fontweight="bold")
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    return path


def _stack(axes: Any, rows: Sequence[Entries], parts: str, unit: str) -> None:
    """A bar for each row, the first on top, cut into its parts in their order."""
    names = list(dict.fromkeys(name for row in rows for name in row[parts]))
    labels = _labels(rows)
    axes.figure.set_figheight(max(4.5, 1.5 + 0.5 * len(rows)))
    left = [0.0] * len(rows)
    for number, name in enumerate(names):
        widths = [float(row[parts].get(name, 0.0)) for row in rows]
        axes.barh(labels, widths, left=left, label=name.replace("_", " "), color=_color(number), height=0.6)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for label, end in zip(labels, left, strict=True):
        axes.annotate(_number(end), (end, label), xytext=(4, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(f"{unit} (medians)")
    axes.figure.legend(ncols=min(5, len(names)), loc="outside lower center", frameon=False)


def _lines(axes: Any, series: Mapping[str, Sequence[tuple[int, float]]], across: str, up: str) -> None:
    for number, (name, points) in enumerate(series.items()):
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, marker="o", markersize=4, label=name, color=_color(number))
    axes.set_ylim(bottom=0)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)


def _labels(rows: Sequence[Entries]) -> list[str]:
    """What tells the bars apart: the case, and steps, batch and commit where cases repeat."""
    labels: list[str] = []
    for row in rows:
        label = str(row["case"])
        for more in (f"{row['steps']} steps, batch {row['batch']}", str(row["precision"]), str(row["commit"])):
            if sum(other["case"] == row["case"] for other in rows) > 1 or label in labels:
                label += f"\n{more}" if more.endswith(str(row["batch"])) else f", {more}"
        while label in labels:
            label += "'"
        labels.append(label)
    return labels


def _color(number: int) -> str:
    return f"C{number % 10}"
