"""Write docs/benchmarks*.md, their plots and the tables of headlines from docs/benchmarks/*.json.

Nothing in docs/benchmarks*.md is written by hand.

Each file gives a section of its name, on the page of the device in its name: docs/benchmarks-h100.md. The first page
lists all sections, after a table of the rows with an entry `headline`, which says what was measured. The same table is
written between two lines of README.md and docs/scaling.md: see `BEGIN` and `END`.

A section has a table of its rows, and these plots if its rows have their values:

    seconds an image            the section `SPEED_SECTION`, with numbers that others published
    cold start by phase         rows with `phases`
    time by stage               rows with `stages`
    latency against steps       rows in ms or s that differ only in steps
    throughput against batch    rows in ms or images/s that differ only in batch
    latency of each load        rows with `images_per_second`

A section begins with the notes in name.md, if that file exists. The pages depend only on these files, so a test
compares them. Plots need matplotlib, which is imported only for them.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.rows import BadRows, Row, read_rows
from benchmarks.speed_chart import SPEED_SECTION, SPEED_TITLE, annotate, draw_speed
from engine_builder.files import check_writable, write_file
from model.errors import PreheatError

BEGIN, END = "<!-- preheat report: headlines -->\n", "<!-- end -->\n"
_DEVICES = {"cpu", "l4", "a10g", "a100", "h100", "h200"}
_ACRONYMS = _DEVICES | {"gpu", "sd", "sdxl", "http", "s3", "fp8", "fp16", "bf16", "int8", "vae"}
_PER_SECOND = "images/s"
_TO_MS = {"ms": 1.0, "s": 1000.0}
_HEAD = """\
# Benchmarks

Made by `preheat report` from the rows in `docs/benchmarks/`; edit those, not these pages. p50, p90 and p99 are by
nearest rank over all runs, counted from the best (of images/s the highest). The list under a table has the device, the
versions and the command of its rows. A command exists at its commit.
"""
_DEVICE_HEAD = """\
# Benchmarks: {device}

[All devices, and how to read the tables]({index}).
"""
_LOAD_COLUMNS = {
    "images/s": ("images_per_second", "{:.3g}"),
    "refused": ("refused", "{}"),
    "GPU idle": ("gpu_idle_percent", "{:.2g} %"),
    "GPU memory": ("memory_gib", "{:.1f} GiB"),
}
"""Further columns of a section's table: the entry of its rows, and its format."""
_Series = dict[str, list[tuple[int, float]]]
"""Points (x, y) of each line, by its name."""


@dataclass(frozen=True)
class Plot:
    """A plot of a section: file name, title, and a function that draws it on axes."""

    name: str
    title: str
    draw: Callable[[Any], None]


def write_report(folder: Path, page: Path) -> list[Path]:
    """Write the pages and their plots (SVG, into `folder`), and delete all other SVG files there. Returns the plots.

    `page`: the first page. That of a device is beside it.

    Raises BadRows, also for a folder without rows, or PreheatError if matplotlib is not installed.
    """
    check_writable(page)
    sections = read_sections(folder)
    if not sections:
        raise BadRows(f"{folder} has no JSON file of rows.", "Name the folder that `--out` of a benchmark wrote into.")
    plots = {plot.name: plot for name, rows in sections.items() for plot in plots_of(name, rows)}
    paths = [_draw(folder / f"{name}.svg", plot) for name, plot in plots.items()]
    for path in folder.glob("*.svg"):
        if path not in paths:
            path.unlink()
    for path, text in render(folder, page).items():
        write_file(path, text.encode())
    return paths


def read_sections(folder: Path) -> dict[str, list[Row]]:
    """Return the rows of each file by its name without the suffix."""
    return {path.stem: rows for path in sorted(folder.glob("*.json")) if (rows := read_rows(path))}


def render(folder: Path, page: Path) -> dict[Path, str]:
    """Return the text of each page: the first one, which has the sections of no device, and one for each device.

    And of the pages with a table of headlines between two lines, if they exist.
    """
    sections = read_sections(folder)
    parts, index = {page: [_HEAD]}, []
    if table := headlines(sections, page, page.parent):
        parts[page].append(table)
    for name, rows in sections.items():
        path = _page_of(name, page)
        if path != page:
            parts.setdefault(path, [_DEVICE_HEAD.format(device=title_of(_device_of(name) or ""), index=page.name)])
        title = title_of(name)
        index.append(f"- [{title}]({'' if path == page else path.name}#{_anchor(title)})\n")
        parts[path].append(_section(folder, page, name, rows))
    texts = {path: "\n".join([*each, "".join(index)] if path == page else each) for path, each in parts.items()}
    for path in (page.parent.parent / "README.md", page.parent / "scaling.md"):
        if path.is_file() and BEGIN in (text := path.read_text()):
            before, _, rest = text.partition(BEGIN)
            _, end, after = rest.partition(END)
            if not end:
                raise BadRows(f"{path} has no line {END.strip()!r} after {BEGIN.strip()!r}.", "Add the line.")
            texts[path] = before + BEGIN + headlines(sections, page, path.parent) + end + after
    return texts


def headlines(sections: Mapping[str, Sequence[Row]], page: Path, base: Path) -> str:
    """Return the table of the rows with a headline, or "" without any. Its links begin at the folder `base`."""
    found = [(name, row) for name, rows in sections.items() for row in rows if "headline" in row.extra]
    found.sort(key=lambda pair: (_short(pair[1].gpu), pair[1].batch, -pair[1].steps, -(_rate(pair[1]) or 0)))
    cells = []
    for name, row in found:
        link = f"{Path(os.path.relpath(_page_of(name, page), base)).as_posix()}#{_anchor(title_of(name))}"
        rate, milliseconds, memory = _rate(row), _latency(row), row.extra.get("memory_gib")
        gpus = row.extra.get("gpus", 1)
        cells.append({
            "SDXL, 1024x1024, random weights": f"[{_cell(row.extra['headline'])}]({link})",
            "GPU": _short(row.gpu) if gpus == 1 else f"{gpus} {_short(row.gpu)}",
            "p50": "" if milliseconds is None else f"{_number(milliseconds / 1000)} s",
            "images/s": "" if rate is None else _number(rate),
            "images a GPU hour": "" if rate is None else _number(3600 * rate / gpus),
            "GPU memory": "" if memory is None else f"{memory:.1f} GiB",
            "commit": row.commit,
        })  # fmt: skip
    columns = [column for column in (cells[0] if cells else ()) if any(each[column] for each in cells)]
    return _markdown([columns, *([each[c] for c in columns] for each in cells)]) if cells else ""


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a table, from the titles of its columns and its lines. All columns but three are numbers."""
    titles, *others = lines
    rule = ["---", "---", *["--:"] * (len(titles) - 3), "---"]
    return "".join(f"| {' | '.join(line)} |\n" for line in (titles, rule, *others))


def _short(gpu: str) -> str:
    """Return the product of a GPU's name: "NVIDIA H100 80GB HBM3" -> "H100"."""
    return gpu.removeprefix("NVIDIA ").partition(" ")[0]


def _rate(row: Row) -> float | None:
    """Return the images/s of a row: measured, or the images of a request through its seconds."""
    measured: float | None = row.extra.get("images_per_second")
    return _throughput(row) if measured is None else measured


def _device_of(name: str) -> str | None:
    return next((word for word in re.split("[-_]", name) if word in _DEVICES), None)


def _page_of(name: str, page: Path) -> Path:
    """Return the page of a section: the page of its device, or the first page."""
    device = _device_of(name)
    return page if device is None else page.with_stem(f"{page.stem}-{device}")


def _section(folder: Path, page: Path, name: str, rows: Sequence[Row]) -> str:
    parts = [f"## {title_of(name)}\n"]
    if (notes := folder / f"{name}.md").is_file():
        parts.append(notes.read_text().strip() + "\n")
    parts.append(_table(rows))
    folder_link = Path(os.path.relpath(folder, page.parent)).as_posix()
    parts += [f"![{plot.title}]({folder_link}/{plot.name}.svg)\n" for plot in plots_of(name, rows)]
    return "\n".join([*parts, _provenance(rows)])


def _anchor(title: str) -> str:
    """Return the anchor of a title, as Python-Markdown and code hosts write it: "H100 sd 1.5" -> "h100-sd-15"."""
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def title_of(name: str) -> str:
    """Return the title of a file's name: "full-size-sdxl" -> "Full size SDXL"."""
    written = {word: word.upper() for word in _ACRONYMS} | {"gpus": "GPUs"}
    words = [written.get(word, word) for word in name.replace("_", "-").split("-")]
    return " ".join([words[0][:1].upper() + words[0][1:], *words[1:]])


def plots_of(name: str, rows: Sequence[Row]) -> list[Plot]:
    """Return the plots that a section's rows have values for."""
    plots = []
    if name == SPEED_SECTION:
        plots.append(Plot(f"{name}-seconds-per-image", SPEED_TITLE, partial(draw_speed, rows=rows)))
    if phased := [row for row in rows if row.phases]:
        draw = partial(_stack, rows=phased, parts="phases", unit="seconds")
        plots.append(Plot(f"{name}-cold-start", "Cold start by phase", draw))
    if staged := [row for row in rows if row.stages]:
        draw = partial(_stack, rows=staged, parts="stages", unit="milliseconds")
        plots.append(Plot(f"{name}-stages", "Time by stage", draw))
    if by_steps := _series(rows, "steps", _latency):
        draw = partial(_lines, series=by_steps, x_label="steps", y_label="milliseconds (p50)")
        plots.append(Plot(f"{name}-steps", "Latency against steps", draw))
    if by_batch := _series(rows, "batch", _throughput):
        draw = partial(_lines, series=by_batch, x_label="images a batch", y_label="images a second")
        plots.append(Plot(f"{name}-batch", "Throughput against batch", draw))
    if loads := [row for row in rows if "images_per_second" in row.extra and row.unit in _TO_MS]:
        plots.append(Plot(f"{name}-latencies", "Latency of each load", partial(_latencies, rows=loads)))
    return plots


def _latency(row: Row) -> float | None:
    return row.p50 * _TO_MS[row.unit] if row.unit in _TO_MS and not row.phases else None


def _throughput(row: Row) -> float | None:
    if row.unit == _PER_SECOND:
        return row.p50
    milliseconds = _latency(row)
    return row.batch * 1000 / milliseconds if milliseconds else None


def _series(rows: Sequence[Row], along: str, value: Callable[[Row], float | None]) -> _Series:
    """Return lines of at least two points, in order, from rows that differ only in the entry `along`."""
    others = [key for key in ("unit", "gpu", "torch", "precision", "steps", "batch") if key != along]
    points_by_line: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in rows:
        measured, x = value(row), getattr(row, along)
        if measured is not None and x > 0:
            # If a point was measured again, the newest row counts.
            points_by_line.setdefault((_family(row), *(getattr(row, key) for key in others)), {})[x] = measured
    lines = {key: sorted(points.items()) for key, points in points_by_line.items() if len(points) > 1}
    varying = [index for index in range(len(others)) if len({facts[index] for _, *facts in lines}) > 1]
    return {
        ", ".join([family, *(_label(others[index], facts[index]) for index in varying)]): points
        for (family, *facts), points in lines.items()
    }


def _family(row: Row) -> str:
    """Return the case without its steps and batch: "sdxl-20-steps-batch-4" -> "sdxl"."""
    text = re.sub(rf"\b{row.steps}[- ]steps?\b|\bbatch[- ]?{row.batch}\b", "", row.case)
    return re.sub(r"([-, ])[-, ]+", r"\1", text).strip("-, ")


def _label(key: str, value: Any) -> str:
    return f"{value} {key}" if key == "steps" else f"{key} {value}" if key == "batch" else str(value)


# -- the page -----------------------------------------------------------------------------------------------------


def _table(rows: Sequence[Row]) -> str:
    further = {
        title: (key, text) for title, (key, text) in _LOAD_COLUMNS.items() if any(key in row.extra for row in rows)
    }
    lines = [["case", "precision", "steps", "batch", "p50", "p90", "p99", "runs", *further, "commit"]]
    for row in rows:
        numbers = [f"{_number(value)} {row.unit}" for value in (row.p50, row.p90, row.p99)]
        facts = [row.precision, str(row.steps or ""), str(row.batch or "")]
        loads = [text.format(row.extra[key]) if key in row.extra else "" for key, text in further.values()]
        lines.append([_cell(row.case), *facts, *numbers, str(row.runs), *loads, row.commit])
    return _markdown(lines)


def _provenance(rows: Sequence[Row]) -> str:
    """List device, versions, commit and command, once for all rows that share them."""
    provenances = dict.fromkeys((row.gpu, row.driver, row.torch, row.commit, row.command) for row in rows)
    lines = []
    for gpu, driver, torch, commit, command in provenances:
        with_driver = f", driver {driver}" if driver else ""
        lines.append(f"- {_cell(gpu)}{with_driver}, torch {torch}, commit {commit}: `{command.replace('`', chr(39))}`")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """Format with three significant digits and no exponent."""
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
        raise PreheatError("Plots need matplotlib.", "Install it with `pip install matplotlib`.") from error
    # The same rows give the same file, and text is kept as text.
    with matplotlib.rc_context({"svg.hashsalt": plot.name, "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        plot.draw(axes)
        axes.set_title(plot.title, loc="left", fontweight="bold")
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    return path


def _stack(axes: Any, rows: Sequence[Row], parts: str, unit: str) -> None:
    """Draw a bar for each row, the first on top, divided into its parts in their order."""
    names = list(dict.fromkeys(name for row in rows for name in getattr(row, parts)))
    labels = _labels(rows)
    axes.figure.set_figheight(max(4.5, 1.5 + 0.5 * len(rows)))
    left = [0.0] * len(rows)
    for number, name in enumerate(names):
        widths = [getattr(row, parts).get(name, 0.0) for row in rows]
        axes.barh(labels, widths, left=left, label=name.replace("_", " "), color=_color(number), height=0.6)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for label, end in zip(labels, left, strict=True):
        annotate(axes, _number(end), end, label)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(f"{unit} (medians)")
    axes.figure.legend(ncols=min(5, len(names)), loc="outside lower center", frameon=False)


def _latencies(axes: Any, rows: Sequence[Row]) -> None:
    """Draw a bar for each row, up to its p50, with marks at its p90 and p99, and write its images/s beside them."""
    labels = _labels(rows)
    axes.figure.set_figheight(max(4.5, 1.5 + 0.35 * len(rows)))
    p50, p90, p99 = ([getattr(row, name) * _TO_MS[row.unit] / 1000 for row in rows] for name in ("p50", "p90", "p99"))
    axes.barh(labels, p50, label="p50", color=_color(0), height=0.6)
    axes.scatter(p90, labels, label="p90", marker="|", color="black", s=40, zorder=3)
    axes.scatter(p99, labels, label="p99", marker="D", color="black", s=12, zorder=3)
    for row, label, end in zip(rows, labels, p99, strict=True):
        annotate(axes, f"{_number(row.extra['images_per_second'])} images/s", end, label)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(p99))
    axes.set_xlabel("seconds from the request to its answer")
    axes.legend(frameon=False)


def _lines(axes: Any, series: _Series, x_label: str, y_label: str) -> None:
    for number, (name, points) in enumerate(series.items()):
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, marker="o", markersize=4, label=name, color=_color(number))
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)


def _labels(rows: Sequence[Row]) -> list[str]:
    """Return unique labels of the bars: the case, with steps, batch, precision and commit if cases repeat."""
    labels: list[str] = []
    for row in rows:
        label = row.case
        if sum(other.case == row.case for other in rows) > 1:
            label += f"\n{row.steps} steps, batch {row.batch}, {row.precision}, {row.commit}"
        while label in labels:
            label += "'"
        labels.append(label)
    return labels


def _color(number: int) -> str:
    return f"C{number % 10}"
