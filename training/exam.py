"""The captions that a trained model is examined on: seen triples, and triples held out of the training.

Every caption names the background (a held-out triple is none without it); all are fixed by a seed.
"""

from __future__ import annotations

import random

from training import captions, world
from training.captions import Demand

KINDS = ("single", "single", "count", "pair", "pair")
SEED = 4_000_037  # unlike any seed of training chunks
FULL = 0.5  # share of the captions that leave nothing out


def exam(held: bool, count: int = 200) -> list[tuple[str, str, Demand]]:
    """(kind, caption, demand). With `held`, at least one figure of each scene is a held-out triple; without,
    none is."""
    rng = random.Random(f"{SEED}/{held}")
    questions: list[tuple[str, str, Demand]] = []
    asked: set[str] = set()
    while len(questions) < count:
        kind = KINDS[len(questions) % len(KINDS)]
        scene = world.sample(rng, held=held, kind=kind)
        text, demand = captions.describe(scene, rng, full=rng.random() < FULL)
        if demand.background is not None and text not in asked:
            asked.add(text)
            questions.append((kind, text, demand))
    return questions
