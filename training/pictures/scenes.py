"""The scenes that Tiny SDXL generates: one to three plain objects on a plain background.

A sampled scene contains a held-out triple only on request. Its objects touch neither each other nor the border. Its
sizes and positions leave the gaps that `training.pictures.score` relies on.

Lengths are fractions: `x` of the width, `y` of the height (downwards), `radius` of the shorter side. Pixels and words
are not part of this module.
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
RELATIONS: dict[str, tuple[int, int]] = {  # direction from the second object to the first
    "left of": (-1, 0),
    "right of": (1, 0),
    "above": (0, -1),
    "below": (0, 1),
}

# Ranges of radii by the number of objects and their size. The gap between the two sizes makes them distinguishable.
RADII: dict[int, dict[str, tuple[float, float]]] = {
    1: {"small": (0.092, 0.122), "large": (0.20, 0.26)},
    2: {"small": (0.09, 0.115), "large": (0.16, 0.20)},
    3: {"small": (0.09, 0.108), "large": (0.145, 0.17)},
}
# The smallest "large" radius by the number of objects: the middle of the gap.
MIN_LARGE_RADIUS: dict[int, float] = {1: 0.157, 2: 0.135, 3: 0.125}
BORDER = 0.02  # free space between an object and the frame, as a fraction of the shorter side
GAP = 0.05  # free space between two objects, as a fraction of the shorter side
REACH = 1.15  # largest distance of an object's points from its centre, in radii

# Share of each kind in the training scenes. The hardest kind to generate has the largest share.
KIND_SHARES: dict[str, float] = {"single": 0.25, "count": 0.4, "pair": 0.35}

HELD_OUT_SEED = 20240607
HELD_OUT_SHARE = 0.1

Triple = tuple[str, str, str]  # shape, object colour, background colour


@dataclass(frozen=True)
class SceneObject:
    shape: str
    colour: str
    size: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Scene:
    """A background colour and one to three objects.

    `kind` is single, count (two or three equal objects) or pair (two different objects). `position` is set for some
    singles. `relation` is set for some pairs and is that of the first object to the second.
    """

    kind: str
    background: str
    objects: tuple[SceneObject, ...]
    position: str | None = None
    relation: str | None = None

    def triples(self) -> set[Triple]:
        return {(item.shape, item.colour, self.background) for item in self.objects}


def all_triples() -> list[Triple]:
    return [(s, c, b) for s in SHAPES for c in COLOURS for b in COLOURS if c != b]


@cache
def held_out_triples() -> frozenset[Triple]:
    """Return the triples that no training scene contains. Any two parts of each still occur in training."""
    triples = all_triples()
    random.Random(HELD_OUT_SEED).shuffle(triples)
    chosen: set[Triple] = set()
    per_shape = {shape: 0 for shape in SHAPES}
    colour_pairs: set[tuple[str, str]] = set()
    count = round(HELD_OUT_SHARE * len(triples))
    for shape, colour, background in triples:
        # At most one triple per pair of colours, spread over the shapes, so that training has every pair of attributes.
        if (colour, background) in colour_pairs or per_shape[shape] >= -(-count // len(SHAPES)):
            continue
        colour_pairs.add((colour, background))
        per_shape[shape] += 1
        chosen.add((shape, colour, background))
        if len(chosen) == count:
            break
    return frozenset(chosen)


def sample_scene(rng: random.Random, aspect: float = 1.0, held_out: bool = False, kind: str | None = None) -> Scene:
    """Sample a scene for an image of width / height = `aspect`.

    With `held_out`, at least one object is part of a held-out triple; otherwise no object is.
    """
    kind = kind or rng.choices(list(KIND_SHARES), KIND_SHARES.values())[0]
    while True:
        background = rng.choice(list(COLOURS))
        first = rng.choice(SHAPES), _other_colour(rng, background)
        second = rng.choice(SHAPES), _other_colour(rng, background)
        if held_out:
            shape, colour, background = rng.choice(sorted(held_out_triples()))
            first = shape, colour
            if second[1] == background:
                continue
            if rng.random() < 0.5:
                first, second = second, first
                if kind != "pair" or first[1] == background:
                    continue
        if kind == "pair" and first == second:
            continue
        # (shape, colour) of each object
        looks = {"single": [first], "count": [first] * rng.choice((2, 3)), "pair": [first, second]}[kind]
        if bool({(*look, background) for look in looks} & held_out_triples()) == held_out:
            break
    sizes = [rng.choice(SIZES) for _ in looks]
    if kind == "count":
        sizes = [sizes[0]] * len(looks)
    while True:
        scene = _place_objects(rng, kind, background, looks, sizes, aspect)
        if scene is not None:
            return scene


def _other_colour(rng: random.Random, background: str) -> str:
    return rng.choice([colour for colour in COLOURS if colour != background])


def _place_objects(
    rng: random.Random, kind: str, background: str, looks: list[tuple[str, str]], sizes: list[str], aspect: float
) -> Scene | None:
    """Sample radii and centres once. Return None if the objects do not fit there."""
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
    width, height = max(aspect, 1.0), max(1 / aspect, 1.0)  # in shorter sides
    margins = [radius * REACH + BORDER for radius in radii]
    if position or relation:
        centres = [
            (_clamp(x, margin / width), _clamp(y, margin / height))
            for (x, y), margin in zip(centres, margins, strict=True)
        ]
    elif any(
        min(x, 1 - x) * width < margin or min(y, 1 - y) * height < margin
        for (x, y), margin in zip(centres, margins, strict=True)
    ):
        return None
    for i, (x, y) in enumerate(centres):
        for j in range(i):
            distance = (((x - centres[j][0]) * width) ** 2 + ((y - centres[j][1]) * height) ** 2) ** 0.5
            if distance < (radii[i] + radii[j]) * REACH + GAP:
                return None
    objects = tuple(
        SceneObject(shape, colour, size, x, y, radius)
        for (shape, colour), size, (x, y), radius in zip(looks, sizes, centres, radii, strict=True)
    )
    return Scene(kind, background, objects, position, relation)


def _near(rng: random.Random, point: tuple[float, float], spread: float) -> tuple[float, float]:
    return point[0] + rng.uniform(-spread, spread), point[1] + rng.uniform(-spread, spread)


def _clamp(value: float, margin: float) -> float:
    return min(max(value, margin), 1 - margin)
