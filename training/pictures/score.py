"""Compare an image with what a caption states, from its pixels alone.

Detects the background (the colour of the border) and the objects (connected regions of another colour), with each
object's colour, shape, size and position. Everything that a `captions.Statement` states must hold, and the image must
contain no other object. Needs only NumPy, Pillow and SciPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
from PIL import Image
from scipy import ndimage

from training.pictures.captions import StatedObject, Statement
from training.pictures.render import signed_distance
from training.pictures.scenes import COLOURS, MIN_LARGE_RADIUS, SHAPES

COLOUR_NAMES = tuple(COLOURS)
PALETTE = np.array([COLOURS[name] for name in COLOUR_NAMES], dtype=np.float32)
UNCLEAR = "unclear"  # a colour or shape that has no name
# Euclidean distances of colours, channels in 0..255
MAX_NAME_DISTANCE = 60.0  # to a named colour
MIN_OBJECT_DISTANCE = 45.0  # of an object's pixels to the background
BORDER_PIXELS = 3  # width of the border that shows the background
MIN_BORDER_SHARE = 0.95  # of the border's pixels that have the background's colour
MIN_COLOUR_SHARE = 0.85  # of an object's pixels that have its colour
MIN_REGION_AREA = 0.0008  # smallest area of an object, as a share of the squared shorter side
GRID_SIDE = 48  # side of the grid on which shapes are compared
MIN_SHAPE_OVERLAP = 0.80  # least intersection over union with the best shape


@dataclass(frozen=True)
class DetectedObject:
    """An object in an image. `colour` and `shape` may be UNCLEAR.

    x, y: centre of the bounding box, as fractions of the width and height.
    radius: as a fraction of the shorter side.
    """

    shape: str
    colour: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison. `reason` is the first difference, and empty if `ok`."""

    ok: bool
    reason: str
    background: str
    objects: tuple[DetectedObject, ...]


def score_image(image: Image.Image | np.ndarray, statement: Statement) -> Verdict:
    """Compare an image, PIL or uint8 [height, width, 3], with a statement."""
    background, objects = detect_objects(image)
    reason = _background_difference(background, statement) or _objects_difference(objects, statement)
    return Verdict(not reason, reason, background, objects)


def detect_objects(image: Image.Image | np.ndarray) -> tuple[str, tuple[DetectedObject, ...]]:
    """Return the background's colour and the objects of an image, PIL or uint8 [height, width, 3]."""
    pixels = np.asarray(image.convert("RGB") if isinstance(image, Image.Image) else image, dtype=np.float32)
    if pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(f"An image has the shape {list(pixels.shape)}. Expected: [height, width, 3].")
    n = BORDER_PIXELS
    border = np.concatenate([part.reshape(-1, 3) for part in (pixels[:n], pixels[-n:], pixels[:, :n], pixels[:, -n:])])
    background_rgb = np.median(border, axis=0)
    background = _colour_name(background_rgb)
    if (np.linalg.norm(border - background_rgb, axis=1) < MIN_OBJECT_DISTANCE).mean() < MIN_BORDER_SHARE:
        background = UNCLEAR
    distances = np.linalg.norm(pixels - background_rgb, axis=2)  # [height, width]
    labels, count = ndimage.label(distances > MIN_OBJECT_DISTANCE)
    shorter_side = min(pixels.shape[:2])
    objects = []
    for index in range(1, count + 1):
        region = labels == index
        if region.sum() >= MIN_REGION_AREA * shorter_side * shorter_side:
            objects.append(_describe_region(pixels, distances, region, background_rgb))
    return background, tuple(sorted(objects, key=lambda item: (item.x, item.y)))


def _colour_name(colour: np.ndarray) -> str:
    distances = np.linalg.norm(PALETTE - colour, axis=1)
    return COLOUR_NAMES[int(distances.argmin())] if distances.min() <= MAX_NAME_DISTANCE else UNCLEAR


def _describe_region(
    pixels: np.ndarray, distances: np.ndarray, region: np.ndarray, background_rgb: np.ndarray
) -> DetectedObject:
    """pixels: [height, width, 3]. distances: [height, width], to the background. region: bool [height, width]."""
    eroded = ndimage.binary_erosion(region, iterations=2)
    core = pixels[eroded if eroded.any() else region]
    colour = np.median(core, axis=0)
    name = _colour_name(colour)
    if (_distance_to_blends(core, colour, background_rgb) < MAX_NAME_DISTANCE).mean() < MIN_COLOUR_SHARE:
        name = UNCLEAR
    # An edge, sharp or soft, is where the colour is halfway between the object and the background.
    solid = region & (distances > 0.5 * np.linalg.norm(colour - background_rgb))
    if not solid.any():
        solid = region
    rows, columns = np.flatnonzero(solid.any(axis=1)), np.flatnonzero(solid.any(axis=0))
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    height, width = pixels.shape[:2]
    shape, radius = _shape_and_radius(solid[top:bottom, left:right])
    x, y = float((left + right) / 2 / width), float((top + bottom) / 2 / height)
    return DetectedObject(shape, name, x, y, radius / min(height, width))


def _distance_to_blends(pixels: np.ndarray, colour: np.ndarray, background_rgb: np.ndarray) -> np.ndarray:
    """Return the distance of each pixel, [n, 3] -> [n], to the blends of an object's colour and the background.

    Pixels of soft edges are blends, so they do not count as another colour.
    """
    line = background_rgb - colour
    fraction = ((pixels - colour) @ line / max(float(line @ line), 1.0)).clip(0, 0.75)
    distances: np.ndarray = np.linalg.norm(pixels - colour - fraction[:, None] * line, axis=1)
    return distances


def _shape_and_radius(mask: np.ndarray) -> tuple[str, float]:
    """Return the shape and the radius in pixels of a mask that fills its bounding box."""
    grid = _resample(mask)
    best, best_overlap = UNCLEAR, 0.0
    for name, (template, width, height) in _templates().items():
        overlap = float((grid & template).sum() / (grid | template).sum())
        relative_aspect = (mask.shape[1] / mask.shape[0]) / (width / height)
        if overlap > best_overlap and 0.75 < relative_aspect < 1.34:
            best, best_overlap = name, overlap
    if best_overlap < MIN_SHAPE_OVERLAP:
        return UNCLEAR, (mask.shape[0] + mask.shape[1]) / 4
    _, width, height = _templates()[best]
    return best, (mask.shape[1] / width + mask.shape[0] / height) / 2


def _resample(mask: np.ndarray) -> np.ndarray:
    """Return the mask at GRID_SIDE x GRID_SIDE points."""
    rows = ((np.arange(GRID_SIDE) + 0.5) * mask.shape[0] / GRID_SIDE).astype(int)
    columns = ((np.arange(GRID_SIDE) + 0.5) * mask.shape[1] / GRID_SIDE).astype(int)
    return mask[np.ix_(rows, columns)]


@cache
def _templates() -> dict[str, tuple[Any, float, float]]:
    """Return each shape's mask on the grid of its bounding box, and the box's width and height in radii."""
    templates = {}
    step = 0.005
    axis = np.arange(-1.3, 1.3, step)
    for index, name in enumerate(SHAPES):
        inside = signed_distance(index, axis[None, :], -axis[:, None], np.float64(1.0), np) < 0
        rows, columns = np.flatnonzero(inside.any(axis=1)), np.flatnonzero(inside.any(axis=0))
        box = inside[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        templates[name] = (_resample(box), box.shape[1] * step, box.shape[0] * step)
    return templates


def _background_difference(background: str, statement: Statement) -> str:
    if background == UNCLEAR:
        return "the background does not have one named colour"
    if statement.background and background != statement.background:
        return f"the background is {background}, not {statement.background}"
    return ""


def _objects_difference(objects: tuple[DetectedObject, ...], statement: Statement) -> str:
    if len(objects) != len(statement.objects):
        return f"{len(objects)} objects, not {len(statement.objects)}"
    # Detected objects have no order: compare the order that differs least.
    return min(_differences_in_order(order, statement) for order in permutations(objects))[1]


def _differences_in_order(objects: tuple[DetectedObject, ...], statement: Statement) -> tuple[int, str]:
    """Compare objects with the stated ones in this order. Returns the number of differences and the first one."""
    pairs = zip(objects, statement.objects, strict=True)
    differences = [text for detected, stated in pairs if (text := _object_difference(detected, stated, len(objects)))]
    if not differences and statement.position and not _is_at(objects[0], statement.position):
        differences = [f"the object is at ({objects[0].x:.2f}, {objects[0].y:.2f}), not {statement.position}"]
    if not differences and statement.relation and not _is_related(objects[0], objects[1], statement.relation):
        differences = [f"the {objects[0].colour} {objects[0].shape} is not {statement.relation} the other"]
    return len(differences), differences[0] if differences else ""


def _object_difference(detected: DetectedObject, stated: StatedObject, count: int) -> str:
    """count: number of objects in the image, which the limit between small and large depends on."""
    if detected.colour != stated.colour:
        return f"an object's colour is {detected.colour}, not {stated.colour}"
    if detected.shape != stated.shape:
        return f"the {detected.colour} object's shape is {detected.shape}, not {stated.shape}"
    size = "large" if detected.radius >= MIN_LARGE_RADIUS[min(count, 3)] else "small"
    if stated.size and size != stated.size:
        return f"the {detected.colour} {detected.shape} is {size}, not {stated.size}"
    return ""


def _is_at(item: DetectedObject, position: str) -> bool:
    return {
        "left": item.x < 0.4,
        "right": item.x > 0.6,
        "top": item.y < 0.4,
        "bottom": item.y > 0.6,
        "centre": abs(item.x - 0.5) < 0.12 and abs(item.y - 0.5) < 0.12,
    }[position]


def _is_related(first: DetectedObject, second: DetectedObject, relation: str) -> bool:
    dx, dy = second.x - first.x, second.y - first.y
    along, across = {"left of": (dx, dy), "right of": (-dx, dy), "above": (dy, dx), "below": (-dy, dx)}[relation]
    return along > 0.15 and along > abs(across)
