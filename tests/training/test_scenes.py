"""Sampled scenes and the held-out split."""

from __future__ import annotations

import random

import pytest

from training.pictures import scenes

pytestmark = pytest.mark.full


def test_only_held_out_scenes_have_held_out_triples() -> None:
    rng = random.Random(1)
    for number in range(1000):
        is_held_out = number % 2 == 1
        found = scenes.sample_scene(rng, held_out=is_held_out).triples() & scenes.held_out_triples()
        assert bool(found) == is_held_out


def test_training_has_every_pair_of_attributes() -> None:
    held_out = scenes.held_out_triples()
    all_triples = scenes.all_triples()
    assert len(held_out) == 22 and held_out < set(all_triples)
    training = set(all_triples) - held_out
    for parts in ((0, 1), (0, 2), (1, 2)):
        pairs = {tuple(triple[i] for i in parts) for triple in all_triples}
        assert {tuple(triple[i] for i in parts) for triple in training} == pairs
