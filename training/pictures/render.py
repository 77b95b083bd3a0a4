"""Render scenes to images from signed distance functions, antialiased, with NumPy or PyTorch.

Training renders thousands of images a second on a GPU with `xp=torch`. Tests render with `xp=numpy` and get the same
images.

A scene vector has SCENE_VECTOR_LENGTH numbers: the background (red, green, blue in 0..1), then for each of MAX_OBJECTS
objects (shape index, red, green, blue, x, y, radius). A radius of 0 means no object.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

from training.pictures.scenes import COLOURS, SHAPES, Scene

MAX_OBJECTS = 3
SCENE_VECTOR_LENGTH = 3 + 7 * MAX_OBJECTS
SHARP_EDGE_PIXELS = 1.5  # width over which a sharp edge changes from one colour to the other
# Sizes of the shapes in radii. They keep every shape within scenes.REACH radii of its centre.
SQUARE_HALF_SIDE = 0.79
TRIANGLE_OUTER = 1.0
STAR_OUTER, STAR_INNER = 1.1, 0.42
Array = Any  # np.ndarray or Tensor


def scene_vector(scene: Scene, rng: random.Random | None = None, jitter: int = 8) -> list[float]:
    """Return the scene vector of a scene. With `rng`, each colour channel varies by up to `jitter` of 255."""

    def rgb(colour: str) -> list[float]:
        shift = [rng.randint(-jitter, jitter) if rng else 0 for _ in range(3)]
        return [min(max(c + s, 0), 255) / 255 for c, s in zip(COLOURS[colour], shift, strict=True)]

    numbers = rgb(scene.background)
    for item in scene.objects:
        numbers += [SHAPES.index(item.shape), *rgb(item.colour), item.x, item.y, item.radius]
    return numbers + [0.0] * (SCENE_VECTOR_LENGTH - len(numbers))


def signed_distance(shape: int, x: Array, y: Array, radius: Array, xp: Any) -> Array:
    """Return the distance of points to the edge of a shape at the origin, negative inside. y points upwards."""
    if SHAPES[shape] == "circle":
        return xp.sqrt(x * x + y * y) - radius
    if SHAPES[shape] == "square":
        return xp.maximum(xp.abs(x), xp.abs(y)) - SQUARE_HALF_SIDE * radius
    if SHAPES[shape] == "triangle":
        slope = math.sqrt(3) / 2
        y = y + TRIANGLE_OUTER * radius / 4  # the origin is the centre of the bounding box
        return xp.maximum(xp.abs(x) * slope + y * 0.5, -y) - TRIANGLE_OUTER * radius / 2
    return _star_distance(x, y, STAR_OUTER * radius, xp)


def _star_distance(x: Array, y: Array, radius: Array, xp: Any) -> Array:
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


def render(vectors: Array, height: int, width: int, edge_pixels: Array, xp: Any, crop: Any = None) -> Array:
    """Render scene vectors.

    vectors: float32 [batch, SCENE_VECTOR_LENGTH].
    edge_pixels: float32 [batch], the width of edges in pixels.
    crop: (top, left, full height, full width), top and left [batch]. Renders only this part of the full image.
    Returns float32 [batch, height, width, 3] in 0..1.
    """
    top, left, full_height, full_width = crop or (0 * edge_pixels, 0 * edge_pixels, height, width)
    shorter_side = min(full_height, full_width)
    if xp is np:
        ys, xs = np.arange(height, dtype=np.float32), np.arange(width, dtype=np.float32)
    else:
        ys, xs = (xp.arange(n, dtype=xp.float32, device=vectors.device) for n in (height, width))
    ys = top[:, None, None] + ys[None, :, None] + 0.5  # [batch, height, 1]
    xs = left[:, None, None] + xs[None, None, :] + 0.5  # [batch, 1, width]
    images = vectors[:, None, None, 0:3] + 0 * (ys + xs)[..., None]
    for i in range(MAX_OBJECTS):
        item = vectors[:, 3 + 7 * i : 10 + 7 * i, None, None]  # [batch, 7, 1, 1]
        x, y = xs - item[:, 4] * full_width, item[:, 5] * full_height - ys
        radius = item[:, 6] * shorter_side
        distance = signed_distance(0, x, y, radius, xp)
        for shape in range(1, len(SHAPES)):
            distance = xp.where(item[:, 0] == shape, signed_distance(shape, x, y, radius, xp), distance)
        coverage = (0.5 - distance / edge_pixels[:, None, None]).clip(0, 1) * (radius > 0)
        coverage = coverage[..., None]
        images = images * (1 - coverage) + vectors[:, None, None, 4 + 7 * i : 7 + 7 * i] * coverage
    return images


def render_scene(
    scene: Scene, height: int = 256, width: int = 256, edge_pixels: float = SHARP_EDGE_PIXELS
) -> np.ndarray:
    """Render one scene to uint8 [height, width, 3]."""
    vectors = np.array([scene_vector(scene)], dtype=np.float32)
    image = render(vectors, height, width, np.array([edge_pixels], dtype=np.float32), np)[0]
    return (image * 255 + 0.5).astype(np.uint8)
