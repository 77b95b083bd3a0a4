"""The scorer on drawings with known answers: right ones pass, each kind of wrong one is refused by name."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from training import captions, world
from training.captions import Demand, FigureDemand, parse
from training.draw import draw
from training.score import look, score
from training.world import Figure, Scene


def single(
    shape: str = "star", colour: str = "red", size: str = "large", x: float = 0.5, y: float = 0.5, ground: str = "white"
) -> Scene:
    radius = sum(world.RADII[1][size]) / 2
    return Scene("single", ground, (Figure(shape, colour, size, x, y, radius),))


def pair(first: tuple[str, str], second: tuple[str, str], across: bool = True, ground: str = "black") -> Scene:
    places = ((0.27, 0.5), (0.73, 0.5)) if across else ((0.5, 0.27), (0.5, 0.73))
    return Scene(
        "pair",
        ground,
        tuple(
            Figure(shape, colour, "large", x, y, 0.18)
            for (shape, colour), (x, y) in zip((first, second), places, strict=True)
        ),
    )


@pytest.mark.parametrize("kind", ["single", "count", "pair"])
@pytest.mark.parametrize(("height", "width"), [(256, 256), (192, 320), (320, 192)])
def test_accepts_every_sampled_scene(kind: str, height: int, width: int) -> None:
    rng = random.Random(f"{kind}{height}")
    for _ in range(25):
        scene = world.sample(rng, width / height, kind=kind)
        text, demand = captions.describe(scene, rng, full=True)
        verdict = score(draw(scene, height, width), demand)
        assert verdict.ok, (text, verdict)


@pytest.mark.parametrize("shape", world.SHAPES)
@pytest.mark.parametrize("size", world.SIZES)
def test_names_each_shape_size_and_place(shape: str, size: str) -> None:
    scene = single(shape=shape, size=size, x=0.4, y=0.6)
    background, (seen,) = look(draw(scene))
    assert (background, seen.shape, seen.colour) == ("white", shape, "red")
    assert seen.x == pytest.approx(0.4, abs=0.02) and seen.y == pytest.approx(0.6, abs=0.03)
    assert seen.radius == pytest.approx(scene.figures[0].radius, rel=0.08)


@pytest.mark.parametrize("ground", world.COLOURS)
@pytest.mark.parametrize("colour", world.COLOURS)
def test_tells_every_colour_from_every_other(ground: str, colour: str) -> None:
    if ground == colour:
        return
    background, (seen,) = look(draw(single("circle", colour, ground=ground)))
    assert (background, seen.colour) == (ground, colour)


WRONG = [
    (single(ground="blue"), "a red star on a white background", "background is blue"),
    (single(colour="orange"), "a red star on a white background", "orange, not red"),
    (single(shape="square"), "a red star on a white background", "square, not star"),
    (single(shape="circle"), "a red square on a white background", "circle, not square"),
    (single(size="small"), "a large red star", "small, not large"),
    (single(size="large"), "a small red star", "large, not small"),
    (single(size="small", x=0.5), "a red star on the left", "not left"),
    (single(size="small", x=0.7), "a red star on the left", "not left"),
    (single(size="small", y=0.8), "a red star at the top", "not top"),
    (single(size="small", y=0.25), "a red star in the centre", "not centre"),
    (single(), "two red stars on a white background", "1 figures, not 2"),
    (pair(("star", "red"), ("star", "red")), "a red star on a black background", "2 figures, not 1"),
    (
        pair(("star", "red"), ("circle", "blue")),
        "a red star to the right of a blue circle",
        "not right of",
    ),
    (pair(("star", "red"), ("circle", "blue"), across=False), "a blue circle above a red star", "not above"),
    (pair(("star", "red"), ("circle", "blue")), "a red star above a blue circle", "not above"),
    # The attributes are all there, on the wrong figures.
    (pair(("star", "blue"), ("circle", "red")), "a red star and a blue circle", "not red|not star|not circle|not blue"),
]


@pytest.mark.parametrize(("scene", "caption", "reason"), WRONG, ids=[f"{c}: {r}" for _, c, r in WRONG])
def test_refuses_a_wrong_picture_and_says_why(scene: Scene, caption: str, reason: str) -> None:
    verdict = score(draw(scene), parse(caption))
    assert not verdict.ok
    assert any(part in verdict.reason for part in reason.split("|")), verdict.reason


RIGHT = [
    (single(), "a large red star in the middle on white"),
    (single(size="small", x=0.2), "small red star on the left"),
    (pair(("star", "red"), ("circle", "blue")), "a blue circle to the right of a red star on a black background"),
    (pair(("star", "red"), ("circle", "blue"), across=False), "a blue circle under a red star"),
    (pair(("star", "red"), ("star", "red")), "two large red stars on black"),
]


@pytest.mark.parametrize(("scene", "caption"), RIGHT, ids=[caption for _, caption in RIGHT])
def test_accepts_a_right_picture(scene: Scene, caption: str) -> None:
    verdict = score(draw(scene), parse(caption))
    assert verdict.ok, verdict.reason


def test_a_soft_picture_still_passes() -> None:
    assert score(draw(single(), soft=6.0), parse("a large red star on a white background")).ok


def test_refuses_a_figure_of_two_colours() -> None:
    picture = draw(single("circle"))
    picture[:, 128:][np.linalg.norm(picture[:, 128:].astype(float) - 245, axis=2) > 60] = (40, 80, 220)
    assert not score(picture, parse("a red circle on a white background")).ok


def test_refuses_a_background_of_two_colours() -> None:
    picture = draw(single("circle"))
    picture[-30:] = (40, 160, 60)
    assert not score(picture, parse("a red circle on a white background")).ok


def test_refuses_noise_and_an_empty_picture() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    assert not score(noise, Demand((FigureDemand("circle", "red"),))).ok
    empty = np.full((256, 256, 3), 245, np.uint8)
    assert score(empty, parse("a red circle on white")).reason == "0 figures, not 1"


def test_refuses_a_shape_with_a_bite_taken_out() -> None:
    picture = draw(single("circle"))
    picture[:128, 128:] = 245
    assert not score(picture, parse("a red circle on a white background")).ok


def test_a_figure_too_many_of_the_right_kind_is_refused() -> None:
    scene = single(size="small", x=0.25)
    more = replace(scene, figures=(*scene.figures, replace(scene.figures[0], x=0.75)))
    assert score(draw(scene), parse("a small red star")).ok
    assert not score(draw(more), parse("a small red star")).ok


def test_refuses_an_array_that_is_no_picture() -> None:
    with pytest.raises(ValueError, match=r"\[height, width, 3\]"):
        look(np.zeros((8, 8), np.uint8))
