"""The captions that a trained model is evaluated on: of triples seen in training, and of held-out triples.

Every caption states the background, because a triple is held out only on its background. Fixed seeds make the
captions the same each time.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from training.pictures import captions, scenes
from training.pictures.captions import Statement

KIND_CYCLE = ("single", "single", "count", "pair", "pair")
SEED = 4_000_037  # unlike any seed of training chunks
FULL_SHARE = 0.5  # share of the captions that leave nothing out


class EvaluationCaption(NamedTuple):
    kind: str
    text: str
    statement: Statement


def evaluation_set(held_out: bool, count: int = 200) -> list[EvaluationCaption]:
    """Return `count` different captions.

    With `held_out`, at least one object of each scene is part of a held-out triple; otherwise no object is.
    """
    rng = random.Random(f"{SEED}/{held_out}")
    chosen: dict[str, EvaluationCaption] = {}
    while len(chosen) < count:
        kind = KIND_CYCLE[len(chosen) % len(KIND_CYCLE)]
        scene = scenes.sample_scene(rng, held_out=held_out, kind=kind)
        text, statement = captions.describe_scene(scene, rng, full=rng.random() < FULL_SHARE)
        if statement.background is not None and text not in chosen:
            chosen[text] = EvaluationCaption(kind, text, statement)
    return list(chosen.values())
