"""Draw the flowcharts of docs/architecture.md as SVG while the site is built.

The page has them as Mermaid text, which code hosts draw. The site does not use Mermaid's script: it is 3 MB, and every
reader would fetch it from another host. Modules are in one column, in the order of their first calls. Arrows to a later
module are on the right, arrows back on the left, and arrows that overlap have different lanes. An arrow's number is at
both of its ends.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

logger = logging.getLogger("mkdocs.flowchart")

# In SVG units (pixels at full size).
_BOX_WIDTH = 190  # of a module's box
_END_HEIGHT = 15  # of an arrow's end
_GAP = 10  # between modules
_TITLE_HEIGHT = 24  # of a folder's title
_LANE_WIDTH = 13
_STUB_WIDTH = 26  # from a box to the first lane; the arrow's number is here
_NODE = re.compile(r"(\w+)\[([\w./]+)\]")
_ARROW = re.compile(r"(\w+) -+>\|(\d+)\| (\w+)")


@dataclass(frozen=True)
class Arrow:
    """A call. `number`: its position in the order of first calls."""

    number: int
    source: str
    target: str


@dataclass(frozen=True)
class Flowchart:
    """The modules of each folder ("": modules without a folder), as id -> label, and the arrows between them."""

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
    position = {node: index for index, node in enumerate(order)}
    down = [arrow for arrow in chart.arrows if position[arrow.target] > position[arrow.source]]
    back = [arrow for arrow in chart.arrows if position[arrow.target] <= position[arrow.source]]
    boxes, titles, height = _boxes(chart, down, back)
    left = _STUB_WIDTH + _LANE_WIDTH * (1 + max(_lanes(back, position).values(), default=0))
    right = _STUB_WIDTH + _LANE_WIDTH * (1 + max(_lanes(down, position).values(), default=0))
    parts = [
        f'<rect x="{left - 8}" y="{top}" width="{_BOX_WIDTH + 16}" height="{size}" rx="4" fill="none" opacity="0.4"/>'
        f'<text x="{left}" y="{top + 15}" stroke="none" opacity="0.8">{escape(name)}/</text>'
        for name, top, size in titles
    ]
    for box in boxes.values():
        middle = box.top + box.height / 2
        parts.append(f'<rect x="{left}" y="{box.top}" width="{_BOX_WIDTH}" height="{box.height}" rx="4" fill="none"/>')
        x = left + _BOX_WIDTH / 2
        parts.append(f'<text x="{x}" y="{middle + 4}" stroke="none" text-anchor="middle">{escape(box.label)}</text>')
    parts += _arrows(down, boxes, position, left + _BOX_WIDTH, 1)
    parts += _arrows(back, boxes, position, left, -1)
    width = left + _BOX_WIDTH + right
    description = "; ".join(f"{arrow.number}: {arrow.source} calls {arrow.target}" for arrow in chart.arrows)
    return (
        f'<svg class="flowchart" role="img" viewBox="0 0 {width} {height}" width="{width}" '
        f'font-size="12" font-family="monospace" stroke-width="1"><title>{escape(description)}</title>'
        f'<g stroke="currentColor" fill="currentColor">{"".join(parts)}</g></svg>'
    )


def fence(source: str, language: str, css_class: str, options: dict[str, str], md: Any, **_: Any) -> str:
    """Format a ```mermaid block. PyMdown's superfences call this function.

    If it raises, superfences show the block as plain text. The warning makes `mkdocs build --strict` fail.
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
        y += _TITLE_HEIGHT if folder else 0
        for node, label in nodes.items():
            ends = max(sum((a.source == node) + (a.target == node) for a in side) for side in (down, back))
            boxes[node] = _Box(label, y, max(26, _END_HEIGHT * ends + 6))
            y += boxes[node].height + _GAP
        if folder:
            titles.append((folder, top, y - top))
        y += _GAP
    return boxes, titles, y


def _lanes(arrows: Iterable[Arrow], position: dict[str, int]) -> dict[Arrow, int]:
    """Assign each arrow the nearest lane in which it overlaps no other arrow. Short arrows come first."""
    lanes: dict[Arrow, int] = {}
    for arrow in sorted(arrows, key=lambda a: (abs(position[a.target] - position[a.source]), a.number)):
        first, last = sorted((position[arrow.source], position[arrow.target]))
        taken = {
            lane
            for other, lane in lanes.items()
            if first <= max(position[other.source], position[other.target])
            and min(position[other.source], position[other.target]) <= last
        }
        lanes[arrow] = next(lane for lane in range(len(lanes) + 1) if lane not in taken)
    return lanes


def _arrows(
    arrows: Sequence[Arrow], boxes: dict[str, _Box], position: dict[str, int], edge: float, side: int
) -> Iterable[str]:
    """Yield the SVG of the arrows on one side of the column. `edge`: x of the boxes' side. `side`: 1 right, -1 left."""
    lanes = _lanes(arrows, position)
    # At a module the arrows of its callers come first, then those of its calls, each in the order of their numbers.
    ends: dict[str, list[tuple[bool, int]]] = {}
    for arrow in arrows:
        ends.setdefault(arrow.source, []).append((True, arrow.number))
        ends.setdefault(arrow.target, []).append((False, arrow.number))

    def y_of(node: str, end: tuple[bool, int]) -> float:
        box, ordered = boxes[node], sorted(ends[node])
        return box.top + box.height * (ordered.index(end) + 0.5) / len(ordered)

    anchor = "start" if side > 0 else "end"
    for arrow in arrows:
        x = edge + side * (_STUB_WIDTH + _LANE_WIDTH * lanes[arrow])
        begin, end = y_of(arrow.source, (True, arrow.number)), y_of(arrow.target, (False, arrow.number))
        yield f'<path d="M{edge} {begin}H{x}V{end}H{edge}" fill="none"/>'
        yield f'<path d="M{edge} {end}l{side * 7} -3.5v7z"/>'
        for y in (begin, end):
            yield (
                f'<text x="{edge + side * 9}" y="{y - 2}" font-size="10" stroke="none" text-anchor="{anchor}">'
                f"{arrow.number}</text>"
            )
