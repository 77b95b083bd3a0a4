"""Draw the flowcharts of docs/architecture.md as SVG while the site is built.

The page holds them as Mermaid text, which code hosts draw by themselves. The site draws them here instead, because
Mermaid's script is 3 MB and MkDocs would have every reader fetch it from another host. Modules stand in one column, in
the order of their first call. Arrows to a later module run on the right, arrows back on the left, each in a lane of
its own. An arrow's number stands at both of its ends.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

logger = logging.getLogger("mkdocs.flowchart")

_WIDTH = 190  # of a module's box, in SVG units (pixels at full size)
_PORT = 15  # vertical space of an arrow's end
_GAP = 10  # between modules
_FOLDER = 24  # height of a folder's title
_LANE = 13  # horizontal space of a lane
_STUB = 26  # from a box to the first lane; the number stands here
_NODE = re.compile(r"(\w+)\[([\w./]+)\]")
_ARROW = re.compile(r"(\w+) -+>\|(\d+)\| (\w+)")


@dataclass(frozen=True)
class Arrow:
    """A call. `number` is its place in the order of first calls."""

    number: int
    source: str
    target: str


@dataclass(frozen=True)
class Flowchart:
    """Modules by folder ("" for none), as id -> label, and the arrows between them."""

    folders: dict[str, dict[str, str]]
    arrows: list[Arrow]


@dataclass(frozen=True)
class _Box:
    label: str
    top: float
    height: float


def parse(text: str) -> Flowchart:
    """Read a Mermaid flowchart of modules. Raises ValueError for a line of any other form."""
    first, *lines = [line.strip() for line in text.strip().splitlines()]
    if not first.startswith("flowchart "):
        raise ValueError(f"A diagram begins with {first!r}. Only `flowchart` is drawn.")
    folders: dict[str, dict[str, str]] = {}
    arrows: list[Arrow] = []
    folder = ""
    for line in lines:
        if line.startswith("subgraph "):
            folder = line.removeprefix("subgraph ")
        elif line == "end":
            folder = ""
        elif node := _NODE.fullmatch(line):
            folders.setdefault(folder, {})[node[1]] = node[2]
        elif arrow := _ARROW.fullmatch(line):
            arrows.append(Arrow(int(arrow[2]), arrow[1], arrow[3]))
        else:
            raise ValueError(f"A flowchart has the line {line!r}. Write a node as id[label], a call as a -->|1| b.")
    return Flowchart(folders, arrows)


def draw(chart: Flowchart) -> str:
    """Return the chart as an SVG element without line breaks."""
    order = [node for nodes in chart.folders.values() for node in nodes]
    place = {node: index for index, node in enumerate(order)}
    down = [arrow for arrow in chart.arrows if place[arrow.target] > place[arrow.source]]
    back = [arrow for arrow in chart.arrows if place[arrow.target] <= place[arrow.source]]
    boxes, titles, height = _boxes(chart, down, back)
    left = _STUB + _LANE * (1 + max(_lanes(back, place).values(), default=0))
    right = _STUB + _LANE * (1 + max(_lanes(down, place).values(), default=0))
    parts = [
        f'<rect x="{left - 8}" y="{top}" width="{_WIDTH + 16}" height="{size}" rx="4" fill="none" opacity="0.4"/>'
        f'<text x="{left}" y="{top + 15}" stroke="none" opacity="0.8">{escape(name)}/</text>'
        for name, top, size in titles
    ]
    for box in boxes.values():
        middle = box.top + box.height / 2
        parts.append(f'<rect x="{left}" y="{box.top}" width="{_WIDTH}" height="{box.height}" rx="4" fill="none"/>')
        x = left + _WIDTH / 2
        parts.append(f'<text x="{x}" y="{middle + 4}" stroke="none" text-anchor="middle">{escape(box.label)}</text>')
    parts += _arrows(down, boxes, place, left + _WIDTH, 1)
    parts += _arrows(back, boxes, place, left, -1)
    width = left + _WIDTH + right
    steps = "; ".join(f"{arrow.number}: {arrow.source} calls {arrow.target}" for arrow in chart.arrows)
    return (
        f'<svg class="flowchart" role="img" viewBox="0 0 {width} {height}" width="{width}" '
        f'font-size="12" font-family="monospace" stroke-width="1"><title>{escape(steps)}</title>'
        f'<g stroke="currentColor" fill="currentColor">{"".join(parts)}</g></svg>'
    )


def fence(source: str, language: str, css_class: str, options: dict[str, str], md: Any, **_: Any) -> str:
    """The formatter of ```mermaid blocks, as PyMdown's superfences call it.

    Superfences show a block whose formatter raises as plain text. The warning makes `mkdocs build --strict` fail.
    """
    try:
        return draw(parse(source))
    except ValueError as error:
        logger.warning("%s", error)
        raise


def _boxes(
    chart: Flowchart, down: Sequence[Arrow], back: Sequence[Arrow]
) -> tuple[dict[str, _Box], list[tuple[str, float, float]], float]:
    """Return the boxes of modules, (name, top, height) of the folders around them, and the whole height."""
    boxes: dict[str, _Box] = {}
    titles: list[tuple[str, float, float]] = []
    y = 4.0
    for folder, nodes in chart.folders.items():
        top = y
        y += _FOLDER if folder else 0
        for node, label in nodes.items():
            ends = max(sum((a.source == node) + (a.target == node) for a in side) for side in (down, back))
            boxes[node] = _Box(label, y, max(26, _PORT * ends + 6))
            y += boxes[node].height + _GAP
        if folder:
            titles.append((folder, top, y - top))
        y += _GAP
    return boxes, titles, y


def _lanes(arrows: Iterable[Arrow], place: dict[str, int]) -> dict[Arrow, int]:
    """Give each arrow the nearest lane in which it meets no other; short arrows first."""
    lanes: dict[Arrow, int] = {}
    for arrow in sorted(arrows, key=lambda a: (abs(place[a.target] - place[a.source]), a.number)):
        low, high = sorted((place[arrow.source], place[arrow.target]))
        taken = {
            lane
            for other, lane in lanes.items()
            if low <= max(place[other.source], place[other.target])
            and min(place[other.source], place[other.target]) <= high
        }
        lanes[arrow] = next(lane for lane in range(len(lanes) + 1) if lane not in taken)
    return lanes


def _arrows(
    arrows: Sequence[Arrow], boxes: dict[str, _Box], place: dict[str, int], edge: float, side: int
) -> Iterable[str]:
    """Draw the arrows of one side of the column. `side` is 1 on the right, -1 on the left."""
    lanes = _lanes(arrows, place)
    # A module's calls leave below its own callers' arrows; both in the order of their numbers.
    ends: dict[str, list[tuple[bool, int]]] = {}
    for arrow in arrows:
        ends.setdefault(arrow.source, []).append((True, arrow.number))
        ends.setdefault(arrow.target, []).append((False, arrow.number))

    def y_of(node: str, end: tuple[bool, int]) -> float:
        box, mine = boxes[node], sorted(ends[node])
        return box.top + box.height * (mine.index(end) + 0.5) / len(mine)

    anchor = "start" if side > 0 else "end"
    for arrow in arrows:
        x = edge + side * (_STUB + _LANE * lanes[arrow])
        begin, end = y_of(arrow.source, (True, arrow.number)), y_of(arrow.target, (False, arrow.number))
        yield f'<path d="M{edge} {begin}H{x}V{end}H{edge}" fill="none"/>'
        yield f'<path d="M{edge} {end}l{side * 7} -3.5v7z"/>'
        for y in (begin, end):
            yield (
                f'<text x="{edge + side * 9}" y="{y - 2}" font-size="10" stroke="none" text-anchor="{anchor}">'
                f"{arrow.number}</text>"
            )
