"""Drawings of scenes from signed distance functions, antialiased, on NumPy or PyTorch arrays alike.

The training draws thousands a second on a GPU with `xp=torch`; the tests draw with `xp=numpy` and get the same
picture. A row of ROW numbers describes a scene: its background (red, green, blue in 0..1), then FIGURES times
(shape index, red, green, blue, x, y, radius), radius 0 where there is no figure.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

from training.world import COLOURS, SHAPES, Scene

FIGURES = 3
ROW = 3 + 7 * FIGURES
CRISP = 1.5  # pixels over which an edge passes from one colour to the other
SQUARE_HALF = 0.79  # these three keep every shape within world.REACH radii of the centre
TRIANGLE_OUTER = 1.0
STAR_OUTER, STAR_INNER = 1.1, 0.42
Array = Any


def row(scene: Scene, rng: random.Random | None = None, jitter: int = 8) -> list[float]:
    """The numbers of a scene; with `rng`, colours vary by up to `jitter` of 255."""

    def paint(colour: str) -> list[float]:
        shift = [rng.randint(-jitter, jitter) if rng else 0 for _ in range(3)]
        return [min(max(c + s, 0), 255) / 255 for c, s in zip(COLOURS[colour], shift, strict=True)]

    numbers = paint(scene.background)
    for figure in scene.figures:
        numbers += [SHAPES.index(figure.shape), *paint(figure.colour), figure.x, figure.y, figure.radius]
    return numbers + [0.0] * (ROW - len(numbers))


def distance(shape: int, x: Array, y: Array, radius: Array, xp: Any) -> Array:
    """Signed distance (negative inside) of points to a shape at the origin, y upwards."""
    if SHAPES[shape] == "circle":
        return xp.sqrt(x * x + y * y) - radius
    if SHAPES[shape] == "square":
        return xp.maximum(xp.abs(x), xp.abs(y)) - SQUARE_HALF * radius
    if SHAPES[shape] == "triangle":
        slope = math.sqrt(3) / 2
        y = y + TRIANGLE_OUTER * radius / 4  # the centre is that of the bounding box
        return xp.maximum(xp.abs(x) * slope + y * 0.5, -y) - TRIANGLE_OUTER * radius / 2
    return _star(x, y, STAR_OUTER * radius, xp)


def _star(x: Array, y: Array, radius: Array, xp: Any) -> Array:
    """Five-pointed star, after Inigo Quilez, "2D distance functions", sdStar5."""
    kx, ky = math.cos(math.pi / 5), -math.sin(math.pi / 5)
    x = xp.abs(x)
    dot = (kx * x + ky * y).clip(0, None)
    x, y = x - 2 * dot * kx, y - 2 * dot * ky
    dot = (-kx * x + ky * y).clip(0, None)
    x, y = x + 2 * dot * kx, y - 2 * dot * ky
    x, y = xp.abs(x), y - radius
    bx, by = -STAR_INNER * ky, STAR_INNER * kx - 1
    along = ((x * bx + y * by) / (bx * bx + by * by)).clip(0, None)
    along = xp.minimum(along, radius)
    dx, dy = x - bx * along, y - by * along
    outside = y * bx - x * by > 0
    return xp.sqrt(dx * dx + dy * dy) * (2 * outside - 1)


def render(rows: Array, height: int, width: int, soft: Array, xp: Any, window: Any = None) -> Array:
    """Pictures [batch, height, width, 3] in 0..1 of `rows` [batch, ROW]. `soft` [batch] is the width of edges in
    pixels. With `window` = (top, left, full height, full width), top and left [batch], only that part of the
    full picture is drawn."""
    top, left, full_height, full_width = window or (0 * soft, 0 * soft, height, width)
    short = min(full_height, full_width)
    if xp is np:
        ys, xs = np.arange(height, dtype=np.float32), np.arange(width, dtype=np.float32)
    else:
        ys, xs = (xp.arange(n, dtype=xp.float32, device=rows.device) for n in (height, width))
    ys = top[:, None, None] + ys[None, :, None] + 0.5  # [batch, height, 1]
    xs = left[:, None, None] + xs[None, None, :] + 0.5  # [batch, 1, width]
    picture = rows[:, None, None, 0:3] + 0 * (ys + xs)[..., None]
    for i in range(FIGURES):
        figure = rows[:, 3 + 7 * i : 10 + 7 * i, None, None]  # [batch, 7, 1, 1]
        x, y = xs - figure[:, 4] * full_width, figure[:, 5] * full_height - ys
        radius = figure[:, 6] * short
        away = distance(0, x, y, radius, xp)
        for shape in range(1, len(SHAPES)):
            away = xp.where(figure[:, 0] == shape, distance(shape, x, y, radius, xp), away)
        cover = (0.5 - away / soft[:, None, None]).clip(0, 1) * (radius > 0)
        cover = cover[..., None]
        picture = picture * (1 - cover) + rows[:, None, None, 4 + 7 * i : 7 + 7 * i] * cover
    return picture


def draw(scene: Scene, height: int = 256, width: int = 256, soft: float = CRISP) -> np.ndarray:
    """One picture, uint8 [height, width, 3]."""
    rows = np.array([row(scene)], dtype=np.float32)
    picture = render(rows, height, width, np.array([soft], dtype=np.float32), np)[0]
    return (picture * 255 + 0.5).astype(np.uint8)
