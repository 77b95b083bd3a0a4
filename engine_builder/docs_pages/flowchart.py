"""Draw the flowcharts of docs/architecture.md as SVG while the site is built.

The page has each flowchart as Mermaid text, which code hosts draw. The site does not use Mermaid's script: the script
is 3 MB, and every reader would fetch it from another host.

All modules are in one column, in the order of their first calls. Calls of a later module are arrows to the right of the
column, other calls are arrows to the left. Arrows that would overlap are in different lanes. Each arrow has its number
at both ends.
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
_ARROW_END_HEIGHT = 15  # what each end of an arrow takes of the side of a box
_GAP = 10  # between boxes, and between folders
_TITLE_HEIGHT = 24  # of a folder's title
_LANE_WIDTH = 13
_STUB_WIDTH = 26  # from a box to the first lane, with space for the arrow's number
_RIGHT, _LEFT = 1, -1  # the sides of the column, as the sign of x
_NODE = re.compile(r"(?P<id>\w+)\[(?P<label>[\w./]+)\]")
_ARROW = re.compile(r"(?P<caller>\w+) -+>\|(?P<number>\d+)\| (?P<called>\w+)")


@dataclass(frozen=True)
class Arrow:
    """A call of one module by another. `number`: the position in the order of first calls."""

    number: int
    caller: str
    called: str


@dataclass(frozen=True)
class Flowchart:
    """Modules and the calls between them.

    folders: for each folder, the labels of its modules by id. The folder "" has the modules outside of all folders.
    arrows: the calls. Their ends are ids of modules.
    """

    folders: dict[str, dict[str, str]]
    arrows: list[Arrow]


@dataclass(frozen=True)
class _Box:
    """The rectangle of a module."""

    label: str
    top: float
    height: float


@dataclass(frozen=True)
class _Frame:
    """The rectangle around the modules of a folder."""

    folder: str
    top: float
    height: float


@dataclass(frozen=True)
class _ArrowsOfSide:
    """The arrows on one side of the column, and the lane of each arrow. Lane 0 is next to the boxes."""

    side: int
    arrows: list[Arrow]
    lanes: dict[Arrow, int]

    @property
    def width(self) -> int:
        """The width of the space that the arrows take."""
        return _STUB_WIDTH + _LANE_WIDTH * (1 + max(self.lanes.values(), default=0))


def parse(text: str) -> Flowchart:
    """Read a Mermaid flowchart of modules.

    Raises ValueError for a line of any other form, and for an arrow from or to a module that no line declares.
    """
    first, *lines = [line.strip() for line in text.strip().splitlines()]
    if not first.startswith("flowchart "):
        raise ValueError(
            f"A diagram begins with {first!r}. Only `flowchart` is drawn. Write a flowchart, or use another language "
            "than mermaid for the block."
        )
    folders: dict[str, dict[str, str]] = {}
    arrows: list[Arrow] = []
    folder = ""
    for line in lines:
        if line.startswith("subgraph "):
            folder = line.removeprefix("subgraph ")
        elif line == "end":
            folder = ""
        elif node := _NODE.fullmatch(line):
            folders.setdefault(folder, {})[node["id"]] = node["label"]
        elif call := _ARROW.fullmatch(line):
            arrows.append(Arrow(int(call["number"]), call["caller"], call["called"]))
        else:
            raise ValueError(f"A flowchart has the line {line!r}. Write a node as id[label], a call as a -->|1| b.")
    declared = {module for modules in folders.values() for module in modules}
    for arrow in arrows:
        if undeclared := {arrow.caller, arrow.called} - declared:
            raise ValueError(
                f"Arrow {arrow.number} of a flowchart names {min(undeclared)}, which is not declared. Write its node "
                "as id[label]."
            )
    return Flowchart(folders, arrows)


def draw(chart: Flowchart) -> str:
    """Return the chart as an SVG element without line breaks."""
    modules = [module for folder in chart.folders.values() for module in folder]
    positions = {module: position for position, module in enumerate(modules)}
    forward = [arrow for arrow in chart.arrows if positions[arrow.called] > positions[arrow.caller]]
    backward = [arrow for arrow in chart.arrows if positions[arrow.called] <= positions[arrow.caller]]
    on_right = _ArrowsOfSide(_RIGHT, forward, _assign_lanes(forward, positions))
    on_left = _ArrowsOfSide(_LEFT, backward, _assign_lanes(backward, positions))
    boxes, frames, height = _place_boxes(chart, (on_right, on_left))
    column_left = on_left.width
    column_right = column_left + _BOX_WIDTH
    elements = [_frame_svg(frame, column_left) for frame in frames]
    elements += [_box_svg(box, column_left) for box in boxes.values()]
    elements += _arrow_elements(on_right, boxes, column_right)
    elements += _arrow_elements(on_left, boxes, column_left)
    width = column_right + on_right.width
    description = "; ".join(f"{arrow.number}: {arrow.caller} calls {arrow.called}" for arrow in chart.arrows)
    return (
        f'<svg class="flowchart" role="img" viewBox="0 0 {width} {height}" width="{width}" '
        f'font-size="12" font-family="monospace" stroke-width="1"><title>{escape(description)}</title>'
        f'<g stroke="currentColor" fill="currentColor">{"".join(elements)}</g></svg>'
    )


def fence(source: str, language: str, css_class: str, options: dict[str, str], md: Any, **_: Any) -> str:
    """Return the SVG of a ```mermaid block. PyMdown's superfences call this function.

    If this function raises an exception, superfences show the block as plain text. The warning makes
    `mkdocs build --strict` fail. Raises ValueError for a block that cannot be drawn.
    """
    try:
        return draw(parse(source))
    except ValueError as error:
        logger.warning("%s", error)
        raise


def _place_boxes(chart: Flowchart, sides: Sequence[_ArrowsOfSide]) -> tuple[dict[str, _Box], list[_Frame], float]:
    """Return the boxes by module, the frames of folders, and the height of the chart."""
    boxes: dict[str, _Box] = {}
    frames: list[_Frame] = []
    y = 4.0
    for folder, modules in chart.folders.items():
        top = y
        y += _TITLE_HEIGHT if folder else 0
        for module, label in modules.items():
            end_counts = [sum((a.caller == module) + (a.called == module) for a in side.arrows) for side in sides]
            boxes[module] = _Box(label, y, max(26, _ARROW_END_HEIGHT * max(end_counts) + 6))
            y += boxes[module].height + _GAP
        if folder:
            frames.append(_Frame(folder, top, y - top))
        y += _GAP
    return boxes, frames, y


def _assign_lanes(arrows: Iterable[Arrow], positions: dict[str, int]) -> dict[Arrow, int]:
    """Assign each arrow the nearest lane in which it overlaps no other arrow. Short arrows are assigned first.

    `positions`: each module's place in the column.
    """

    def span(arrow: Arrow) -> tuple[int, int]:
        ends = positions[arrow.caller], positions[arrow.called]
        return min(ends), max(ends)

    def length(arrow: Arrow) -> int:
        first, last = span(arrow)
        return last - first

    lanes: dict[Arrow, int] = {}
    for arrow in sorted(arrows, key=lambda arrow: (length(arrow), arrow.number)):
        first, last = span(arrow)
        taken = {lane for other, lane in lanes.items() if first <= span(other)[1] and span(other)[0] <= last}
        lanes[arrow] = next(lane for lane in range(len(lanes) + 1) if lane not in taken)
    return lanes


def _frame_svg(frame: _Frame, column_left: float) -> str:
    return (
        f'<rect x="{column_left - 8}" y="{frame.top}" width="{_BOX_WIDTH + 16}" height="{frame.height}" rx="4" '
        'fill="none" opacity="0.4"/>'
        f'<text x="{column_left}" y="{frame.top + 15}" stroke="none" opacity="0.8">{escape(frame.folder)}/</text>'
    )


def _box_svg(box: _Box, column_left: float) -> str:
    x, y = column_left + _BOX_WIDTH / 2, box.top + box.height / 2 + 4
    return (
        f'<rect x="{column_left}" y="{box.top}" width="{_BOX_WIDTH}" height="{box.height}" rx="4" fill="none"/>'
        f'<text x="{x}" y="{y}" stroke="none" text-anchor="middle">{escape(box.label)}</text>'
    )


def _arrow_elements(placed: _ArrowsOfSide, boxes: dict[str, _Box], edge: float) -> Iterable[str]:
    """Yield the SVG of the arrows on one side of the column. `edge`: x of the boxes' edge on that side."""
    # From top to bottom a module has first the ends of calls of this module, then those of its own calls. Both groups
    # are in the order of the arrows' numbers.
    ends: dict[str, list[tuple[bool, int]]] = {}
    for arrow in placed.arrows:
        ends.setdefault(arrow.caller, []).append((True, arrow.number))
        ends.setdefault(arrow.called, []).append((False, arrow.number))

    def end_y(module: str, is_caller: bool, number: int) -> float:
        box, sorted_ends = boxes[module], sorted(ends[module])
        return box.top + box.height * (sorted_ends.index((is_caller, number)) + 0.5) / len(sorted_ends)

    side = placed.side
    anchor = "start" if side == _RIGHT else "end"
    for arrow in placed.arrows:
        lane_x = edge + side * (_STUB_WIDTH + _LANE_WIDTH * placed.lanes[arrow])
        start = end_y(arrow.caller, is_caller=True, number=arrow.number)
        end = end_y(arrow.called, is_caller=False, number=arrow.number)
        yield f'<path d="M{edge} {start}H{lane_x}V{end}H{edge}" fill="none"/>'
        yield f'<path d="M{edge} {end}l{side * 7} -3.5v7z"/>'
        for y in (start, end):
            yield (
                f'<text x="{edge + side * 9}" y="{y - 2}" font-size="10" stroke="none" text-anchor="{anchor}">'
                f"{arrow.number}</text>"
            )
