"""Pools of encoded scenes in device memory. The diffusion stages sample their batches from them.

Every few steps fresh scenes replace the oldest ones of a pool.
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
from training.dataset import ChunkRequest
from training.run import TrainingRun
from training.settings import DiffusionSettings

REFRESH_EVERY_STEPS = 4
AESTHETIC_SCORES = (2.0, 7.0)  # range of random scores, because all rendered images are equally good
FIRST_CHUNK = {"base": 10_000_000, "refiner": 20_000_000}  # so that no two stages use the same scenes


@dataclass
class Batch:
    latents: Tensor  # float32 [batch, 4, height/8, width/8], scaled
    ids: Tensor  # [batch, 77]
    labels: Tensor  # [batch, len(CLASS_COUNTS)]
    scores: Tensor  # [batch], aesthetic


class LatentPool:
    """Encoded scenes of one size, with their captions."""

    def __init__(self, run: TrainingRun, vae: AutoencoderKL, size: tuple[int, int], capacity: int) -> None:
        height, width = size
        self.size, self.capacity = size, capacity
        self.filled = self.oldest = 0
        self.device = run.device
        self.vae = vae
        self.latents = torch.empty(capacity, 4, height // 8, width // 8, device=run.device)
        self.ids: Tensor | None = None
        self.labels: Tensor | None = None
        self.scores = torch.empty(capacity, device=run.device)

    @torch.no_grad()
    def put(self, vectors: Tensor, ids: Tensor, labels: Tensor, generator: torch.Generator) -> None:
        """Render and encode scenes, and store them over the oldest ones."""
        if self.ids is None or self.labels is None:
            self.ids = ids.new_empty(self.capacity, *ids.shape[1:])
            self.labels = labels.new_empty(self.capacity, *labels.shape[1:])
        slots = (torch.arange(len(vectors), device=self.device) + self.oldest) % self.capacity
        low, high = AESTHETIC_SCORES
        self.scores[slots] = low + (high - low) * torch.rand(len(vectors), generator=generator, device=self.device)
        images = render_images(vectors, self.size)
        latents = self.vae.encode(images.to(self.vae.dtype)).latent_dist.mean
        self.latents[slots] = latents.float() * self.vae.config.scaling_factor
        self.ids[slots], self.labels[slots] = ids, labels
        self.oldest = (self.oldest + len(vectors)) % self.capacity
        self.filled = min(self.capacity, self.filled + len(vectors))

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        """Return random scenes, each with one of its captions."""
        if self.ids is None or self.labels is None:
            raise RuntimeError("The pool is empty: call put() before sample().")
        slots = torch.randint(self.filled, (count,), generator=generator, device=self.device)
        wording = torch.randint(self.ids.shape[1], (count,), generator=generator, device=self.device)
        return Batch(
            self.latents[slots], self.ids[slots, wording].long(), self.labels[slots, wording], self.scores[slots]
        )


class BatchSource:
    """Batches of one size each. The sizes are sampled by their shares in the settings."""

    def __init__(
        self, run: TrainingRun, vae: AutoencoderKL, settings: DiffusionSettings, stage: str, first_step: int
    ) -> None:
        self.run, self.settings, self.stage = run, settings, stage
        self.generator = torch.Generator(run.device).manual_seed(run.settings.seed * 1_000_003 + first_step)
        sizes = run.settings.sizes
        vae = copy.deepcopy(vae).to(torch.float16 if run.device.type == "cuda" else torch.float32)
        self.shares = [share for *_, share in sizes]
        self.pools = [
            LatentPool(
                run, vae, (height, width), settings.pool if share == max(self.shares) else max(settings.pool // 6, 1)
            )
            for height, width, share in sizes
        ]
        self.chunks = run.workers.stream(self._requests(first_step))
        for pool in self.pools:
            while pool.filled < pool.capacity:
                self._refresh(pool)
        run.log(f"{stage} pools hold {sum(pool.filled for pool in self.pools)} scenes")

    def sample(self, step: int) -> tuple[Batch, tuple[int, int]]:
        """Return a batch and its height and width.

        It has half the images of the setting, because both stages use each of them twice.
        """
        pool = self._pool_of(step)
        if step % REFRESH_EVERY_STEPS == 0:
            self._refresh(pool)
        return pool.sample(self.settings.batch // 2, self.generator), pool.size

    def close(self) -> None:
        self.chunks.close()

    def _requests(self, first_step: int) -> Iterator[ChunkRequest]:
        """Yield the requests that fill the pools, then those of each refresh.

        The numbers differ between stages and between resumed runs.
        """
        first_number = FIRST_CHUNK[self.stage] + first_step * 1000
        numbers = itertools.count(first_number)
        for pool in self.pools:
            for _ in range(-(-pool.capacity // self.settings.fresh)):
                yield self._request(next(numbers), pool)
        first_refresh = -(-first_step // REFRESH_EVERY_STEPS) * REFRESH_EVERY_STEPS
        for step in itertools.count(first_refresh, REFRESH_EVERY_STEPS):
            yield self._request(next(numbers), self._pool_of(step))

    def _request(self, number: int, pool: LatentPool) -> ChunkRequest:
        height, width = pool.size
        return ChunkRequest(self.run.settings.seed, number, self.settings.fresh, self.settings.wordings, width / height)

    def _pool_of(self, step: int) -> LatentPool:
        rng = random.Random(f"{self.run.settings.seed}/{self.stage}/{step}")
        return rng.choices(self.pools, self.shares)[0]

    def _refresh(self, pool: LatentPool) -> None:
        chunk = next(self.chunks)
        vectors, ids, labels = (torch.from_numpy(array).to(self.run.device, non_blocking=True) for array in chunk)
        pool.put(vectors, ids, labels, self.generator)
