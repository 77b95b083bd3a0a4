"""The scorer on rendered scenes: it accepts correct images, and names what is wrong with the others."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import permutations

import numpy as np

from training.pictures import captions, scenes
from training.pictures.captions import parse_caption
from training.pictures.render import render_scene
from training.pictures.scenes import Scene, SceneObject
from training.pictures.score import detect_objects, score_image


def single(
    shape: str = "star", colour: str = "red", size: str = "large", x: float = 0.5, y: float = 0.5,
    background: str = "white",
) -> Scene:  # fmt: skip
    radius = sum(scenes.RADII[1][size]) / 2
    return Scene("single", background, (SceneObject(shape, colour, size, x, y, radius),))


def pair(first: tuple[str, str], second: tuple[str, str], horizontal: bool = True) -> Scene:
    """Return a scene of two large objects, (shape, colour), next to each other or one above the other."""
    positions = ((0.27, 0.5), (0.73, 0.5)) if horizontal else ((0.5, 0.27), (0.5, 0.73))
    objects = tuple(
        SceneObject(shape, colour, "large", x, y, 0.18)
        for (shape, colour), (x, y) in zip((first, second), positions, strict=True)
    )
    return Scene("pair", "black", objects)


RED_STAR, RED_CIRCLE = ("star", "red"), ("circle", "red")
BLUE_STAR, BLUE_CIRCLE = ("star", "blue"), ("circle", "blue")


def test_accepts_every_sampled_scene() -> None:
    for kind in ("single", "count", "pair"):
        for height, width in ((256, 256), (192, 320), (320, 192)):
            rng = random.Random(f"{kind}{height}")
            for _ in range(8):
                scene = scenes.sample_scene(rng, width / height, kind=kind)
                text, statement = captions.describe_scene(scene, rng, full=True)
                verdict = score_image(render_scene(scene, height, width), statement)
                assert verdict.ok, (text, verdict)


def test_detects_every_colour_on_every_other() -> None:
    for colour, background in permutations(scenes.COLOURS, 2):
        detected_background, (detected,) = detect_objects(render_scene(single("circle", colour, background=background)))
        assert (detected_background, detected.colour) == (background, colour)


WRONG = [
    (single(background="blue"), "a red star on a white background", "background is blue"),
    (single(colour="orange"), "a red star on a white background", "orange, not red"),
    (single(shape="square"), "a red star on a white background", "square, not star"),
    (single(shape="circle"), "a red square on a white background", "circle, not square"),
    (single(size="small"), "a large red star", "small, not large"),
    (single(size="large"), "a small red star", "large, not small"),
    (single(size="small", x=0.5), "a red star on the left", "(0.50, 0.49), not left"),
    (single(size="small", x=0.7), "a red star on the left", "(0.70, 0.49), not left"),
    (single(size="small", y=0.8), "a red star at the top", "not top"),
    (single(size="small", y=0.25), "a red star in the centre", "not centre"),
    (single(), "two red stars on a white background", "1 objects, not 2"),
    (pair(RED_STAR, RED_STAR), "a red star on a black background", "2 objects, not 1"),
    (pair(RED_STAR, BLUE_CIRCLE), "a red star to the right of a blue circle", "not right of"),
    (pair(RED_STAR, BLUE_CIRCLE, horizontal=False), "a blue circle above a red star", "not above"),
    (pair(RED_STAR, BLUE_CIRCLE), "a red star above a blue circle", "not above"),
    # All stated attributes are there, but on the wrong objects.
    (pair(BLUE_STAR, RED_CIRCLE), "a red star and a blue circle", "blue, not red"),
]


def test_refuses_wrong_scene() -> None:
    for scene, caption, reason in WRONG:
        verdict = score_image(render_scene(scene), parse_caption(caption))
        assert not verdict.ok and reason in verdict.reason, (caption, reason)


def paint_half_of_the_circle(image: np.ndarray) -> None:
    right = image[:, 128:]
    right[np.linalg.norm(right.astype(float) - 245, axis=2) > 60] = scenes.COLOURS["blue"]


def paint_the_bottom(image: np.ndarray) -> None:
    image[-30:] = scenes.COLOURS["green"]


def erase_a_quarter_of_the_circle(image: np.ndarray) -> None:
    image[:128, 128:] = scenes.COLOURS["white"]


def fill_with_noise(image: np.ndarray) -> None:
    image[:] = np.random.default_rng(0).integers(0, 256, image.shape, dtype=np.uint8)


def erase_everything(image: np.ndarray) -> None:
    image[:] = scenes.COLOURS["white"]


DAMAGE: dict[Callable[[np.ndarray], None], str] = {
    paint_half_of_the_circle: "an object's colour is unclear, not red",
    paint_the_bottom: "the background does not have one named colour",
    erase_a_quarter_of_the_circle: "shape is unclear, not circle",
    fill_with_noise: "the background does not have one named colour",
    erase_everything: "0 objects, not 1",
}


def test_refuses_damaged_image() -> None:
    statement = parse_caption("a red circle on a white background")
    for damage, reason in DAMAGE.items():
        image = render_scene(single("circle"))
        assert score_image(image, statement).ok
        damage(image)
        verdict = score_image(image, statement)
        assert not verdict.ok and reason in verdict.reason, reason
