"""Captions of scenes: written, read, as an evaluation set, and as arrays for training."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from training import scenes
from training.captions import CaptionError, StatedObject, Statement, describe_scene, parse_caption
from training.dataset import CLASS_COUNTS, ChunkRequest, class_labels, generate_chunk
from training.evaluation_set import evaluation_set
from training.render import SCENE_VECTOR_LENGTH


@pytest.mark.parametrize("held_out", [False, True], ids=["seen", "held out"])
def test_evaluation_set_separates_seen_and_held_out(held_out: bool) -> None:
    captions = evaluation_set(held_out)
    assert len({caption.text for caption in captions}) == 200
    assert {caption.kind for caption in captions} == {"single", "count", "pair"}
    assert any(caption.statement.relation for caption in captions)
    for _, text, statement in captions:
        assert statement.background
        triples = {(item.shape, item.colour, statement.background) for item in statement.objects}
        assert bool(triples & scenes.held_out_triples()) == held_out, text


def test_evaluation_set_is_the_same_each_time() -> None:
    assert evaluation_set(True) == evaluation_set(True)


def test_parse_returns_what_describe_stated() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        text, statement = describe_scene(scenes.sample_scene(rng), rng)
        assert parse_caption(text) == statement, text


def test_full_captions_leave_nothing_out() -> None:
    rng = random.Random(4)
    for _ in range(300):
        scene = scenes.sample_scene(rng)
        _, statement = describe_scene(scene, rng, full=True)
        assert statement.background == scene.background and statement.position == scene.position
        assert (statement.relation is None) == (scene.relation is None)
        assert sorted(item.size or "" for item in statement.objects) == sorted(item.size for item in scene.objects)


OTHER_WORDINGS = {
    "A BIG red circle, on a Blue background!": Statement((StatedObject("circle", "red", "large"),), "blue"),
    "a pair of green squares": Statement((StatedObject("square", "green"),) * 2),
    "3 tiny white stars on black": Statement((StatedObject("star", "white", "small"),) * 3, "black"),
    "a yellow triangle to the left of a purple square on a black background": Statement(
        (StatedObject("triangle", "yellow"), StatedObject("square", "purple")), "black", None, "left of"
    ),
    "please draw one orange star near the top": Statement((StatedObject("star", "orange"),), None, "top"),
}


@pytest.mark.parametrize(("caption", "statement"), OTHER_WORDINGS.items(), ids=OTHER_WORDINGS)
def test_parse_reads_other_wordings(caption: str, statement: Statement) -> None:
    assert parse_caption(caption) == statement


def test_parse_refuses_a_caption_without_an_object() -> None:
    with pytest.raises(CaptionError, match="names no object"):
        parse_caption("a photo of an astronaut")


def test_chunks_depend_only_on_seed_and_number() -> None:
    request = ChunkRequest(seed=1, number=5, scene_count=6, wordings=3, aspect=1.0)
    chunk, again = generate_chunk(request), generate_chunk(request)
    assert chunk.vectors.shape == (6, SCENE_VECTOR_LENGTH) and chunk.token_ids.shape == (6, 3, 77)
    assert chunk.labels.shape == (6, 3, len(CLASS_COUNTS))
    assert (chunk.vectors == again.vectors).all() and (chunk.token_ids == again.token_ids).all()
    for other in (replace(request, number=6), replace(request, seed=2)):
        assert (generate_chunk(other).vectors != chunk.vectors).any()


def test_labels_contain_only_what_is_stated() -> None:
    labels = class_labels(parse_caption("a large red circle on a blue background"))
    assert all(0 <= label < count for label, count in zip(labels, CLASS_COUNTS, strict=True))
    assert labels[:3] == [scenes.SHAPES.index("circle"), list(scenes.COLOURS).index("red"), 1]
    assert labels[3:9] == [count - 1 for count in CLASS_COUNTS[3:9]]
    assert labels[10:] == [count - 1 for count in CLASS_COUNTS[10:]]
    assert class_labels(Statement((StatedObject("circle", "red"),)))[2] == 2
