"""Fresh scenes with captions, as arrays, made by worker processes in a fixed order.

A chunk depends on the run's seed and its number alone, so a resumed run goes on with the chunks that come next.
Knows nothing of torch.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache
from typing import NamedTuple

import numpy as np

from training import captions, tokenizer, world
from training.captions import Demand
from training.draw import ROW, row

# What the auxiliary head reads back from a caption: classes of each answer, the last one "not stated".
FIGURE_CLASSES = (len(world.SHAPES) + 1, len(world.COLOURS) + 1, len(world.SIZES) + 1)
CLASSES = FIGURE_CLASSES * 3 + (len(world.COLOURS) + 1, len(world.POSITIONS) + 1, len(world.RELATIONS) + 1)

_PIECES = re.compile(r"[a-z]+|[0-9]|[^\sa-z0-9]+")  # CLIP's splitting, for the ASCII words of captions


class Chunk(NamedTuple):
    rows: np.ndarray  # float32 [scenes, ROW]
    ids: np.ndarray  # int16 [scenes, wordings, 77], padded with <|endoftext|>
    labels: np.ndarray  # int8 [scenes, wordings, len(CLASSES)]


class Job(NamedTuple):
    seed: int
    number: int
    scenes: int
    wordings: int
    aspect: float  # width / height


@cache
def _merge_ranks() -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    vocab, merges = tokenizer.vocabulary()
    return vocab, {pair: rank for rank, pair in enumerate(merges)}


@cache
def _piece_ids(piece: str) -> tuple[int, ...]:
    """BPE of one ASCII word; the tests hold it against transformers' tokenizer."""
    vocab, ranks = _merge_ranks()
    parts = [*piece[:-1], piece[-1] + "</w>"]
    while True:
        pairs = [pair for pair in zip(parts, parts[1:], strict=False) if pair in ranks]
        if not pairs:
            return tuple(vocab[part] for part in parts)
        parts = tokenizer.merged(parts, min(pairs, key=lambda pair: ranks[pair]))


def token_ids(text: str) -> list[int]:
    """77 ids of an ASCII caption, padded with <|endoftext|>."""
    vocab, _ = _merge_ranks()
    ids = [i for piece in _PIECES.findall(text.lower()) for i in _piece_ids(piece)][: tokenizer.LENGTH - 2]
    ids = [vocab[tokenizer.START], *ids]
    return ids + [vocab[tokenizer.END]] * (tokenizer.LENGTH - len(ids))


def labels(demand: Demand) -> list[int]:
    """The demand as class numbers, in the order of CLASSES."""

    def number(names: object, name: str | None) -> int:
        known = list(names)  # type: ignore[call-overload]
        return known.index(name) if name is not None else len(known)

    out: list[int] = []
    for i in range(3):
        figure = demand.figures[i] if i < len(demand.figures) else None
        out += [
            number(world.SHAPES, figure.shape if figure else None),
            number(world.COLOURS, figure.colour if figure else None),
            number(world.SIZES, figure.size if figure else None),
        ]
    return out + [
        number(world.COLOURS, demand.background),
        number(world.POSITIONS, demand.position),
        number(world.RELATIONS, demand.relation),
    ]


def make(job: Job) -> Chunk:
    rng = random.Random(f"{job.seed}/{job.number}")
    rows = np.empty((job.scenes, ROW), np.float32)
    ids = np.empty((job.scenes, job.wordings, tokenizer.LENGTH), np.int16)
    stated = np.empty((job.scenes, job.wordings, len(CLASSES)), np.int8)
    for i in range(job.scenes):
        scene = world.sample(rng, job.aspect)
        rows[i] = row(scene, rng)
        for j in range(job.wordings):
            text, demand = captions.describe(scene, rng)
            ids[i, j] = token_ids(text)
            stated[i, j] = labels(demand)
    return Chunk(rows, ids, stated)


class Workers:
    """Makes chunks ahead in `count` processes (0: in this one). Start it before CUDA: it forks."""

    def __init__(self, count: int) -> None:
        self._pool = ProcessPoolExecutor(count) if count else None
        self._ahead = 2 * count
        if self._pool:
            list(self._pool.map(abs, range(count)))  # fork now

    def stream(self, jobs: Iterator[Job]) -> Iterator[Chunk]:
        """The chunks of `jobs`, in their order."""
        if self._pool is None:
            yield from map(make, jobs)
            return
        waiting: deque[Future[Chunk]] = deque()
        for job in jobs:
            waiting.append(self._pool.submit(make, job))
            if len(waiting) > self._ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
