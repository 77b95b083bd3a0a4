"""Sampled scenes and the held-out split."""

from __future__ import annotations

import random

import pytest

from training import scenes

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


def test_sizes_and_positions_leave_gaps() -> None:
    rng = random.Random(5)
    for _ in range(1000):
        scene = scenes.sample_scene(rng)
        limit = scenes.MIN_LARGE_RADIUS[len(scene.objects)]
        for item in scene.objects:
            assert (item.radius > limit * 1.05) == (item.size == "large")
            assert (item.radius < limit * 0.95) == (item.size == "small")
        x, y = scene.objects[0].x, scene.objects[0].y
        if scene.position == "left":
            assert x < 0.34
        if scene.position == "centre":
            assert abs(x - 0.5) < 0.08 and abs(y - 0.5) < 0.08
