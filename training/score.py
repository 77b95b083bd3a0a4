"""Judges a picture against what a caption demands, from its pixels alone.

Finds the background (the colour of the border), the figures (connected regions of another colour), and each one's
colour, shape, size and place; then compares with a `captions.Demand`. Everything the demand states must hold, and
nothing may be in the picture that it does not name. Needs NumPy, Pillow and SciPy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
from PIL import Image
from scipy import ndimage

from training.captions import Demand, FigureDemand
from training.draw import distance
from training.world import COLOURS, SHAPES, SIZE_BORDER

NAMES = tuple(COLOURS)
PALETTE = np.array([COLOURS[name] for name in NAMES], dtype=np.float32)
FAR = 60.0  # a colour farther than this (Euclidean, of 255) from every named one has no name
DIFFERENT = 45.0  # pixels this far from the background belong to a figure
SPECK = 0.0008  # regions smaller than this share of the shorter side squared are ignored
GRID = 48  # side of the grid on which shapes are compared
ALIKE = 0.80  # least intersection over union with the best shape


@dataclass(frozen=True)
class Seen:
    """`colour` or `shape` is "unclear" where none fits. x, y: centre of the bounding box, of width and height;
    radius: of the shorter side."""

    shape: str
    colour: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Verdict:
    """`reason` is empty where `ok`; otherwise it says the first thing that is wrong."""

    ok: bool
    reason: str
    background: str
    figures: tuple[Seen, ...]


def score(image: Image.Image | np.ndarray, demand: Demand) -> Verdict:
    background, figures = look(image)
    reason = _background_fault(background, demand) or _figures_fault(figures, demand)
    return Verdict(not reason, reason, background, figures)


def look(image: Image.Image | np.ndarray) -> tuple[str, tuple[Seen, ...]]:
    """Background colour and figures of a picture: PIL, or uint8 [height, width, 3]."""
    pixels = np.asarray(image.convert("RGB") if isinstance(image, Image.Image) else image, dtype=np.float32)
    if pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(f"expected [height, width, 3], got {list(pixels.shape)}")
    ring = np.concatenate([pixels[:3].reshape(-1, 3), pixels[-3:].reshape(-1, 3)])
    ring = np.concatenate([ring, pixels[:, :3].reshape(-1, 3), pixels[:, -3:].reshape(-1, 3)])
    ground = np.median(ring, axis=0)
    background = _name(ground)
    if (np.linalg.norm(ring - ground, axis=1) < DIFFERENT).mean() < 0.95:
        background = "unclear"
    away = np.linalg.norm(pixels - ground, axis=2)
    labels, count = ndimage.label(away > DIFFERENT)
    short = min(pixels.shape[:2])
    figures = []
    for index in range(1, count + 1):
        region = labels == index
        if region.sum() >= SPECK * short * short:
            figures.append(_figure(pixels, away, region, ground))
    return background, tuple(sorted(figures, key=lambda figure: (figure.x, figure.y)))


def _name(colour: np.ndarray) -> str:
    gaps = np.linalg.norm(PALETTE - colour, axis=1)
    return NAMES[int(gaps.argmin())] if gaps.min() <= FAR else "unclear"


def _figure(pixels: np.ndarray, away: np.ndarray, region: np.ndarray, ground: np.ndarray) -> Seen:
    inner = ndimage.binary_erosion(region, iterations=2)
    core = pixels[inner if inner.any() else region]
    colour = np.median(core, axis=0)
    name = _name(colour)
    if (_off_line(core, colour, ground) < FAR).mean() < 0.85:
        name = "unclear"
    # Half way to the figure's own colour is where its edge is, however soft.
    solid = region & (away > 0.5 * np.linalg.norm(colour - ground))
    if not solid.any():
        solid = region
    rows, columns = np.flatnonzero(solid.any(axis=1)), np.flatnonzero(solid.any(axis=0))
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    height, width = pixels.shape[:2]
    shape, radius = _shape(solid[top:bottom, left:right])
    return Seen(
        shape, name, float((left + right) / 2 / width), float((top + bottom) / 2 / height), radius / min(height, width)
    )


def _off_line(pixels: np.ndarray, colour: np.ndarray, ground: np.ndarray) -> np.ndarray:
    """How far each pixel [n, 3] is from the blends of a figure's colour and its background: soft edges are none
    of another colour."""
    line = ground - colour
    share = ((pixels - colour) @ line / max(float(line @ line), 1.0)).clip(0, 0.75)
    away: np.ndarray = np.linalg.norm(pixels - colour - share[:, None] * line, axis=1)
    return away


def _shape(mask: np.ndarray) -> tuple[str, float]:
    """Name and radius in pixels of a mask that fills its bounding box."""
    grid = _resampled(mask)
    best, fit = "unclear", 0.0
    for name, (template, wide, high) in _templates().items():
        overlap = float((grid & template).sum() / (grid | template).sum())
        aspect = (mask.shape[1] / mask.shape[0]) / (wide / high)
        if overlap > fit and 0.75 < aspect < 1.34:
            best, fit = name, overlap
    if fit < ALIKE:
        return "unclear", (mask.shape[0] + mask.shape[1]) / 4
    _, wide, high = _templates()[best]
    return best, (mask.shape[1] / wide + mask.shape[0] / high) / 2


def _resampled(mask: np.ndarray) -> np.ndarray:
    rows = ((np.arange(GRID) + 0.5) * mask.shape[0] / GRID).astype(int)
    columns = ((np.arange(GRID) + 0.5) * mask.shape[1] / GRID).astype(int)
    return mask[np.ix_(rows, columns)]


@cache
def _templates() -> dict[str, tuple[Any, float, float]]:
    """Shape -> its mask on the grid of its bounding box, and the box's width and height in radii."""
    templates = {}
    step = 0.005
    axis = np.arange(-1.3, 1.3, step)
    for index, name in enumerate(SHAPES):
        inside = distance(index, axis[None, :], -axis[:, None], np.float64(1.0), np) < 0
        rows, columns = np.flatnonzero(inside.any(axis=1)), np.flatnonzero(inside.any(axis=0))
        box = inside[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        templates[name] = (_resampled(box), box.shape[1] * step, box.shape[0] * step)
    return templates


def _background_fault(background: str, demand: Demand) -> str:
    if background == "unclear":
        return "the background is not of one named colour"
    if demand.background and background != demand.background:
        return f"the background is {background}, not {demand.background}"
    return ""


def _figures_fault(figures: tuple[Seen, ...], demand: Demand) -> str:
    if len(figures) != len(demand.figures):
        return f"{len(figures)} figures, not {len(demand.figures)}"
    # Of the ways to match found figures with asked ones, the best one's fault is the telling one.
    return min(_order_faults(order, demand) for order in permutations(figures))[1]


def _order_faults(figures: tuple[Seen, ...], demand: Demand) -> tuple[int, str]:
    """How many faults there are when found and asked figures are matched in this order, and the first one."""
    pairs = zip(figures, demand.figures, strict=True)
    faults = [fault for seen, asked in pairs if (fault := _figure_fault(seen, asked, len(figures)))]
    if not faults and demand.position and not _in_place(figures[0], demand.position):
        faults = [f"the figure is at ({figures[0].x:.2f}, {figures[0].y:.2f}), not {demand.position}"]
    if not faults and demand.relation and not _related(figures[0], figures[1], demand.relation):
        faults = [f"the {figures[0].colour} {figures[0].shape} is not {demand.relation} the other"]
    return len(faults), faults[0] if faults else ""


def _figure_fault(seen: Seen, asked: FigureDemand, count: int) -> str:
    if seen.colour != asked.colour:
        return f"a figure is {seen.colour}, not {asked.colour}"
    if seen.shape != asked.shape:
        return f"the {seen.colour} figure's shape is {seen.shape}, not {asked.shape}"
    size = "large" if seen.radius >= SIZE_BORDER[min(count, 3)] else "small"
    if asked.size and size != asked.size:
        return f"the {seen.colour} {seen.shape} is {size}, not {asked.size}"
    return ""


def _in_place(seen: Seen, position: str) -> bool:
    return {
        "left": seen.x < 0.4,
        "right": seen.x > 0.6,
        "top": seen.y < 0.4,
        "bottom": seen.y > 0.6,
        "centre": abs(seen.x - 0.5) < 0.12 and abs(seen.y - 0.5) < 0.12,
    }[position]


def _related(first: Seen, second: Seen, relation: str) -> bool:
    dx, dy = second.x - first.x, second.y - first.y
    along, across = {"left of": (dx, dy), "right of": (-dx, dy), "above": (dy, dx), "below": (-dy, dx)}[relation]
    return along > 0.15 and along > abs(across)
