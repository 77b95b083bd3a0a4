"""Captions of scenes: written, read, as an evaluation set, and as arrays for training."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from training.pictures import scenes
from training.pictures.captions import describe_scene, parse_caption
from training.pictures.dataset import CLASS_COUNTS, ChunkRequest, generate_chunk
from training.pictures.evaluation_set import evaluation_set
from training.pictures.render import SCENE_VECTOR_LENGTH

pytestmark = pytest.mark.full


@pytest.mark.parametrize("held_out", [False, True], ids=["seen", "held out"])
def test_evaluation_set_separates_seen_and_held_out(held_out: bool) -> None:
    captions = evaluation_set(held_out)
    assert captions == evaluation_set(held_out)
    assert len({caption.text for caption in captions}) == 200
    assert {caption.kind for caption in captions} == {"single", "count", "pair"}
    assert any(caption.statement.relation for caption in captions)
    for _, text, statement in captions:
        assert statement.background
        triples = {(item.shape, item.colour, statement.background) for item in statement.objects}
        assert bool(triples & scenes.held_out_triples()) == held_out, text


def test_parse_returns_what_describe_stated() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        text, statement = describe_scene(scenes.sample_scene(rng), rng)
        assert parse_caption(text) == statement, text


def test_chunks_depend_only_on_seed_and_number() -> None:
    request = ChunkRequest(seed=1, number=5, scene_count=6, wordings=3, aspect=1.0)
    chunk, again = generate_chunk(request), generate_chunk(request)
    assert chunk.vectors.shape == (6, SCENE_VECTOR_LENGTH) and chunk.token_ids.shape == (6, 3, 77)
    assert chunk.labels.shape == (6, 3, len(CLASS_COUNTS))
    assert (chunk.vectors == again.vectors).all() and (chunk.token_ids == again.token_ids).all()
    for other in (replace(request, number=6), replace(request, seed=2)):
        assert (generate_chunk(other).vectors != chunk.vectors).any()
