"""Encoded scenes in device memory, from which the base and the refiner sample their training batches.

A scene is what an image shows; its wordings are captions of it. Worker processes generate scenes in chunks
(dataset.py). A pool renders and encodes the scenes of a chunk, and every few steps a new chunk replaces the oldest
scenes of one pool.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from training.autoencoder import render_images
from training.pictures.dataset import ChunkRequest
from training.run import TrainingRun
from training.settings import DiffusionSettings, SettingsError

REFRESH_EVERY_STEPS = 4
RARE_SIZE_DIVISOR = 6  # pools of all sizes but the most frequent one hold this fraction of `pool` scenes
MIN_AESTHETIC_SCORE, MAX_AESTHETIC_SCORE = 2.0, 7.0  # scores are random, because all rendered images are equally good
STAGES = ("base", "refiner")
CHUNKS_PER_BLOCK = 10_000_000
# A run that resumes at step n starts with chunk n * CHUNKS_PER_STEP. Its scenes are new as long as fewer chunks fill
# the pools: 570 with the settings of data/tiny-sdxl.
CHUNKS_PER_STEP = 1000


@dataclass
class Batch:
    latents: Tensor  # float32 [batch, 4, height/8, width/8], scaled
    ids: Tensor  # int64 [batch, 77], one caption of each scene
    labels: Tensor  # int8 [batch, len(CLASS_COUNTS)], of the same captions
    scores: Tensor  # float32 [batch], aesthetic


def chunk_number(stage: str, index: int) -> int:
    """Return the number of a stage's chunk with this index.

    The stages never share a number, and so never use the same chunk. Blocks of numbers belong to the base and the
    refiner alternately. The first block belongs to the autoencoder, which numbers its chunks by step.
    """
    own_block, offset = divmod(index, CHUNKS_PER_BLOCK)
    block = 1 + own_block * len(STAGES) + STAGES.index(stage)
    return block * CHUNKS_PER_BLOCK + offset


class LatentPool:
    """Encoded scenes of one size, with their captions.

    size: height and width in pixels.
    """

    def __init__(self, run: TrainingRun, vae: AutoencoderKL, size: tuple[int, int], capacity: int) -> None:
        height, width = size
        self.size, self.capacity = size, capacity
        self.scene_count = self.oldest_slot = 0
        self.device = run.device
        self.vae = vae
        self.latents = torch.empty(capacity, 4, height // 8, width // 8, device=run.device)
        self.ids: Tensor | None = None
        self.labels: Tensor | None = None
        self.scores = torch.empty(capacity, device=run.device)

    @torch.no_grad()
    def put(self, vectors: Tensor, ids: Tensor, labels: Tensor, generator: torch.Generator) -> None:
        """Render and encode the scenes of a chunk, and store them over the oldest scenes.

        vectors: float32 [scenes, SCENE_VECTOR_LENGTH]. ids: int16 [scenes, wordings, 77]. labels: int8 [scenes,
        wordings, len(CLASS_COUNTS)]. Raises SettingsError if the pool holds fewer scenes than the chunk.
        """
        if len(vectors) > self.capacity:
            height, width = self.size
            raise SettingsError(
                f"A chunk has {len(vectors)} scenes, but the pool of {height}x{width} holds {self.capacity}. "
                "Lower `fresh` or raise `pool`."
            )
        if self.ids is None or self.labels is None:
            self.ids = ids.new_empty(self.capacity, *ids.shape[1:])
            self.labels = labels.new_empty(self.capacity, *labels.shape[1:])
        slots = (torch.arange(len(vectors), device=self.device) + self.oldest_slot) % self.capacity
        uniform = torch.rand(len(vectors), generator=generator, device=self.device)
        self.scores[slots] = MIN_AESTHETIC_SCORE + (MAX_AESTHETIC_SCORE - MIN_AESTHETIC_SCORE) * uniform
        images = render_images(vectors, self.size)
        latents = self.vae.encode(images.to(self.vae.dtype)).latent_dist.mean
        self.latents[slots] = latents.float() * self.vae.config.scaling_factor
        self.ids[slots], self.labels[slots] = ids, labels
        self.oldest_slot = (self.oldest_slot + len(vectors)) % self.capacity
        self.scene_count = min(self.capacity, self.scene_count + len(vectors))

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        """Return `count` random scenes, each with one of its captions."""
        if self.ids is None or self.labels is None:
            raise RuntimeError("The pool is empty: call put() before sample().")
        slots = torch.randint(self.scene_count, (count,), generator=generator, device=self.device)
        wordings = torch.randint(self.ids.shape[1], (count,), generator=generator, device=self.device)
        return Batch(
            latents=self.latents[slots],
            ids=self.ids[slots, wordings].long(),
            labels=self.labels[slots, wordings],
            scores=self.scores[slots],
        )


class BatchSource:
    """The batches of one stage, from `first_step` on. A batch has one size, chosen by the sizes' shares."""

    def __init__(
        self, run: TrainingRun, vae: AutoencoderKL, settings: DiffusionSettings, stage: str, first_step: int
    ) -> None:
        self.run, self.settings, self.stage = run, settings, stage
        self.generator = torch.Generator(run.device).manual_seed(run.settings.seed * 1_000_003 + first_step)
        sizes = run.settings.sizes
        vae = copy.deepcopy(vae).to(torch.float16 if run.device.type == "cuda" else torch.float32)
        self.shares = [share for *_, share in sizes]
        rare_capacity = max(settings.pool // RARE_SIZE_DIVISOR, 1)
        self.pools = [
            LatentPool(run, vae, (height, width), settings.pool if share == max(self.shares) else rare_capacity)
            for height, width, share in sizes
        ]
        self.chunks = run.workers.stream(self._chunk_requests(first_step))
        for pool in self.pools:
            while pool.scene_count < pool.capacity:
                self._refresh(pool)
        run.log(f"{stage} pools hold {sum(pool.scene_count for pool in self.pools)} scenes")

    def sample(self, step: int) -> tuple[Batch, tuple[int, int]]:
        """Return a batch, and its height and width in pixels.

        Call it for each step from `first_step` on, in order: the chunks are generated for these steps. The batch has
        half of the configured `batch` images, because both stages use each image twice.
        """
        pool = self._choose_pool(step)
        if step % REFRESH_EVERY_STEPS == 0:
            self._refresh(pool)
        return pool.sample(self.settings.batch // 2, self.generator), pool.size

    def close(self) -> None:
        """Stop generating chunks."""
        self.chunks.close()

    def _chunk_requests(self, first_step: int) -> Iterator[ChunkRequest]:
        """Yield the requests for the chunks that fill the pools, then for the chunk of each refresh."""
        indices = itertools.count(first_step * CHUNKS_PER_STEP)
        for pool in self.pools:
            for _ in range(-(-pool.capacity // self.settings.fresh)):
                yield self._chunk_request(next(indices), pool)
        first_refresh = -(-first_step // REFRESH_EVERY_STEPS) * REFRESH_EVERY_STEPS
        for step in itertools.count(first_refresh, REFRESH_EVERY_STEPS):
            yield self._chunk_request(next(indices), self._choose_pool(step))

    def _chunk_request(self, index: int, pool: LatentPool) -> ChunkRequest:
        height, width = pool.size
        return ChunkRequest(
            seed=self.run.settings.seed,
            number=chunk_number(self.stage, index),
            scene_count=self.settings.fresh,
            wordings=self.settings.wordings,
            aspect=width / height,
        )

    def _choose_pool(self, step: int) -> LatentPool:
        """Return the pool of a step. It depends only on the seed, the stage and the step."""
        rng = random.Random(f"{self.run.settings.seed}/{self.stage}/{step}")
        return rng.choices(self.pools, self.shares)[0]

    def _refresh(self, pool: LatentPool) -> None:
        """Put the next chunk into a pool."""
        chunk = next(self.chunks)
        vectors, ids, labels = (torch.from_numpy(array).to(self.run.device, non_blocking=True) for array in chunk)
        pool.put(vectors, ids, labels, self.generator)
