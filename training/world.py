"""The world that Tiny SDXL draws: scenes of one to three plain figures on a plain background.

Promises: a sampled scene never holds a held-out triple unless asked to, its figures never touch each other or
the border, and its sizes and positions leave the gaps that `training.score` relies on. Knows nothing of pixels
or words. Lengths are fractions: `x` of the width, `y` of the height (downwards), `radius` of the shorter side.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (245, 220, 50),
    "purple": (140, 50, 180),
    "orange": (245, 140, 30),
    "black": (20, 20, 20),
    "white": (245, 245, 245),
}
SHAPES = ("circle", "square", "triangle", "star")
SIZES = ("small", "large")
POSITIONS: dict[str, tuple[float, float]] = {
    "left": (0.25, 0.5),
    "right": (0.75, 0.5),
    "top": (0.5, 0.25),
    "bottom": (0.5, 0.75),
    "centre": (0.5, 0.5),
}
RELATIONS: dict[str, tuple[int, int]] = {  # direction from the second figure to the first
    "left of": (-1, 0),
    "right of": (1, 0),
    "above": (0, -1),
    "below": (0, 1),
}

# Radii by figures in the scene and size: the gap between the two is what makes "small" and "large" checkable.
RADII: dict[int, dict[str, tuple[float, float]]] = {
    1: {"small": (0.092, 0.122), "large": (0.20, 0.26)},
    2: {"small": (0.09, 0.115), "large": (0.16, 0.20)},
    3: {"small": (0.09, 0.108), "large": (0.145, 0.17)},
}
# A radius at least this is "large"; the middle of the gap.
SIZE_BORDER: dict[int, float] = {1: 0.157, 2: 0.135, 3: 0.125}
BORDER = 0.02  # kept free between a figure and the frame, of the shorter side
GAP = 0.05  # kept free between two figures, of the shorter side
REACH = 1.15  # no point of a figure is farther from its centre than this many radii

# Shares of the scenes of each kind: what is hardest to draw comes most.
KINDS: dict[str, float] = {"single": 0.25, "count": 0.4, "pair": 0.35}

HELD_OUT_SEED = 20240607
HELD_OUT_SHARE = 0.1

Triple = tuple[str, str, str]  # shape, figure colour, background colour


@dataclass(frozen=True)
class Figure:
    shape: str
    colour: str
    size: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Scene:
    """`kind` is single, count (alike figures) or pair (two that differ). `position` belongs to singles,
    `relation` (of the first figure to the second) to pairs; either may be None."""

    kind: str
    background: str
    figures: tuple[Figure, ...]
    position: str | None = None
    relation: str | None = None

    def triples(self) -> set[Triple]:
        return {(figure.shape, figure.colour, self.background) for figure in self.figures}


def all_triples() -> list[Triple]:
    return [(s, c, b) for s in SHAPES for c in COLOURS for b in COLOURS if c != b]


@cache
def held_out() -> frozenset[Triple]:
    """The triples that no training scene holds. Any two parts of each still occur in training."""
    triples = all_triples()
    random.Random(HELD_OUT_SEED).shuffle(triples)
    chosen: set[Triple] = set()
    per_shape = {shape: 0 for shape in SHAPES}
    pairs: set[tuple[str, str]] = set()
    wanted = round(HELD_OUT_SHARE * len(triples))
    for shape, colour, background in triples:
        # One per colour pair, and spread over the shapes: no pair of attributes goes missing from training.
        if (colour, background) in pairs or per_shape[shape] >= -(-wanted // len(SHAPES)):
            continue
        pairs.add((colour, background))
        per_shape[shape] += 1
        chosen.add((shape, colour, background))
        if len(chosen) == wanted:
            break
    return frozenset(chosen)


def sample(rng: random.Random, aspect: float = 1.0, held: bool = False, kind: str | None = None) -> Scene:
    """One scene for a picture of width / height = `aspect`. With `held`, at least one figure is a held-out
    triple; without, none is."""
    kind = kind or rng.choices(list(KINDS), KINDS.values())[0]
    while True:
        background = rng.choice(list(COLOURS))
        first = rng.choice(SHAPES), _other_colour(rng, background)
        second = rng.choice(SHAPES), _other_colour(rng, background)
        if held:
            shape, colour, background = rng.choice(sorted(held_out()))
            first = shape, colour
            if second[1] == background:
                continue
            if rng.random() < 0.5:
                first, second = second, first
                if kind != "pair" or first[1] == background:
                    continue
        if kind == "pair" and first == second:
            continue
        looks = {"single": [first], "count": [first] * rng.choice((2, 3)), "pair": [first, second]}[kind]
        found = {(*look, background) for look in looks} & held_out()
        if bool(found) == held:
            break
    sizes = [rng.choice(SIZES) for _ in looks]
    if kind == "count":
        sizes = [sizes[0]] * len(looks)
    while True:
        scene = _place(rng, kind, background, looks, sizes, aspect)
        if scene is not None:
            return scene


def _other_colour(rng: random.Random, background: str) -> str:
    return rng.choice([colour for colour in COLOURS if colour != background])


def _place(
    rng: random.Random,
    kind: str,
    background: str,
    looks: list[tuple[str, str]],
    sizes: list[str],
    aspect: float,
) -> Scene | None:
    """A scene with radii and centres, or None where this draw had no room."""
    radii = [rng.uniform(*RADII[len(looks)][size]) for size in sizes]
    position = relation = None
    if kind == "single":
        position = rng.choice(list(POSITIONS)) if rng.random() < 0.7 else None
        centres = [_near(rng, POSITIONS[position], 0.06) if position else (rng.random(), rng.random())]
    elif kind == "pair" and rng.random() < 0.75:
        relation = rng.choice(list(RELATIONS))
        dx, dy = RELATIONS[relation]
        centres = [_near(rng, (0.5 + side * 0.24 * dx, 0.5 + side * 0.24 * dy), 0.05) for side in (1, -1)]
    else:
        centres = [(rng.random(), rng.random()) for _ in looks]
    wide, high = max(aspect, 1.0), max(1 / aspect, 1.0)  # of the shorter side
    for (x, y), radius in zip(centres, radii, strict=True):
        room = radius * REACH + BORDER
        if position or relation:
            continue
        if min(x, 1 - x) * wide < room or min(y, 1 - y) * high < room:
            return None
    if position or relation:
        centres = [
            (_inside(x, (radius * REACH + BORDER) / wide), _inside(y, (radius * REACH + BORDER) / high))
            for (x, y), radius in zip(centres, radii, strict=True)
        ]
    for i, (x, y) in enumerate(centres):
        for j in range(i):
            apart = (((x - centres[j][0]) * wide) ** 2 + ((y - centres[j][1]) * high) ** 2) ** 0.5
            if apart < (radii[i] + radii[j]) * REACH + GAP:
                return None
    figures = tuple(
        Figure(shape, colour, size, x, y, radius)
        for (shape, colour), size, (x, y), radius in zip(looks, sizes, centres, radii, strict=True)
    )
    return Scene(kind, background, figures, position, relation)


def _near(rng: random.Random, point: tuple[float, float], spread: float) -> tuple[float, float]:
    return point[0] + rng.uniform(-spread, spread), point[1] + rng.uniform(-spread, spread)


def _inside(value: float, room: float) -> float:
    return min(max(value, room), 1 - room)
