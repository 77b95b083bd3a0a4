"""Scenes, the held-out split, and words for scenes and back."""

from __future__ import annotations

import random

import pytest

from training import captions, world
from training.captions import CaptionError, Demand, FigureDemand, describe, parse
from training.data import CLASSES, Job, labels, make
from training.draw import ROW
from training.exam import exam


def test_no_training_scene_holds_a_held_out_triple() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        assert not world.sample(rng).triples() & world.held_out()


def test_every_held_out_scene_holds_one() -> None:
    rng = random.Random(2)
    for _ in range(500):
        assert world.sample(rng, held=True).triples() & world.held_out()


def test_held_out_triples_are_a_tenth_and_leave_every_pair_of_attributes_in_training() -> None:
    held = world.held_out()
    everything = world.all_triples()
    assert len(held) == 22 and held < set(everything)
    training = set(everything) - held
    for parts in ((0, 1), (0, 2), (1, 2)):
        project = {tuple(triple[i] for i in parts) for triple in everything}
        assert {tuple(triple[i] for i in parts) for triple in training} == project


def test_the_exam_keeps_seen_and_held_out_apart() -> None:
    for held in (False, True):
        questions = exam(held)
        assert len({text for _, text, _ in questions}) == 200
        assert {kind for kind, *_ in questions} == {"single", "count", "pair"}
        assert any(demand.relation for *_, demand in questions)
        for _, text, demand in questions:
            assert demand.background
            triples = {(f.shape, f.colour, demand.background) for f in demand.figures}
            assert bool(triples & world.held_out()) == held, text


def test_the_exam_is_the_same_each_time() -> None:
    assert exam(True) == exam(True)


def test_parse_gives_back_what_describe_stated() -> None:
    rng = random.Random(3)
    for _ in range(4000):
        text, demand = describe(world.sample(rng), rng)
        assert parse(text) == demand, text


def test_full_captions_leave_nothing_out() -> None:
    rng = random.Random(4)
    for _ in range(300):
        scene = world.sample(rng)
        _, demand = describe(scene, rng, full=True)
        assert demand.background == scene.background and demand.position == scene.position
        assert (demand.relation is None) == (scene.relation is None)
        assert sorted(f.size or "" for f in demand.figures) == sorted(f.size for f in scene.figures)


@pytest.mark.parametrize(
    ("caption", "demand"),
    [
        (
            "A BIG red circle, on a Blue background!",
            Demand((FigureDemand("circle", "red", "large"),), "blue"),
        ),
        ("a pair of green squares", Demand((FigureDemand("square", "green"),) * 2)),
        ("3 tiny white stars on black", Demand((FigureDemand("star", "white", "small"),) * 3, "black")),
        (
            "a yellow triangle to the left of a purple square on a black background",
            Demand((FigureDemand("triangle", "yellow"), FigureDemand("square", "purple")), "black", None, "left of"),
        ),
        ("please draw one orange star near the top", Demand((FigureDemand("star", "orange"),), None, "top")),
    ],
)
def test_parse_understands_a_strangers_words(caption: str, demand: Demand) -> None:
    assert parse(caption) == demand


def test_parse_refuses_a_caption_without_a_figure() -> None:
    with pytest.raises(CaptionError, match="no figure"):
        parse("a photo of an astronaut")


def test_sizes_and_places_leave_gaps() -> None:
    rng = random.Random(5)
    for _ in range(1000):
        scene = world.sample(rng)
        border = world.SIZE_BORDER[len(scene.figures)]
        for figure in scene.figures:
            assert (figure.radius > border * 1.05) == (figure.size == "large")
            assert (figure.radius < border * 0.95) == (figure.size == "small")
        x, y = scene.figures[0].x, scene.figures[0].y
        if scene.position == "left":
            assert x < 0.34
        if scene.position == "centre":
            assert abs(x - 0.5) < 0.08 and abs(y - 0.5) < 0.08


def test_chunks_depend_on_seed_and_number_alone() -> None:
    job = Job(seed=1, number=5, scenes=6, wordings=3, aspect=1.0)
    chunk, again = make(job), make(job)
    assert chunk.rows.shape == (6, ROW) and chunk.ids.shape == (6, 3, 77)
    assert chunk.labels.shape == (6, 3, len(CLASSES))
    assert (chunk.rows == again.rows).all() and (chunk.ids == again.ids).all()
    assert (make(job._replace(number=6)).rows != chunk.rows).any()


def test_labels_name_what_is_stated_and_nothing_else() -> None:
    demand = parse("a large red circle on a blue background")
    found = labels(demand)
    assert all(0 <= label < classes for label, classes in zip(found, CLASSES, strict=True))
    assert found[:3] == [world.SHAPES.index("circle"), list(world.COLOURS).index("red"), 1]
    assert found[3:9] == [classes - 1 for classes in CLASSES[3:9]]
    assert found[10:] == [classes - 1 for classes in CLASSES[10:]]
    assert labels(captions.Demand((FigureDemand("circle", "red"),)))[2] == 2
