"""Stages three and four: the base (text encoders and UNet together) and the refiner (its UNet alone).

Both learn on pools of encoded drawings that lie in device memory; every few steps some of them give way to fresh ones.
The base learns to predict noise; the refiner to predict what the base does, at the timesteps where it takes over, most
of all at the last ones. There the noise itself is a poor teacher: what a caption changes in it is small beside what no
one can foresee, and guidance multiplies the error. The base's prediction is what all that noise averages to. The two
are compared as they are served, with guidance, and with the caption alone.
"""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from training import architecture
from training.architecture import TIME_WIDTH, WIDTH_2
from training.data import CLASSES, Job
from training.draw import CRISP, render
from training.export import Networks
from training.learner import Learner, precision
from training.run import Run
from training.settings import DiffusionSettings
from training.tokenizer import END, LENGTH, START, vocabulary

FRESH_EVERY = 4  # steps
NOISES = 2  # rows of the base's batch that share one picture and caption, with a timestep and noise each
DROPPED = 0.1  # share of captions dropped for guidance, half as zeros and half as the empty caption
OFFSET = 0.1  # offset noise: standard deviation of what a whole channel is shifted by
FIRST_TIMESTEP = 951  # of 20 steps; a sampler starts there from noise that holds nothing of a picture
HEAVIEST = 50.0  # largest weight of a timestep in the loss
REFINED_BELOW = 210  # the refiner's timesteps: it takes over at 200
EDGES = 10.0  # more weight in the refiner's loss near an edge: small figures' corners are few, and what goes wrong
STEP = 1.5  # from one latent to the next: an edge, where the spread of all latents is 1
SCORES = (2.0, 7.0)  # aesthetic scores; they tell nothing, for every drawing is as good as any other


def alphas_cumulative(device: torch.device) -> Tensor:
    """[1000], SDXL's scaled-linear schedule."""
    steps = architecture.SCHEDULER["num_train_timesteps"]
    start, end = architecture.SCHEDULER["beta_start"], architecture.SCHEDULER["beta_end"]
    betas = torch.linspace(start**0.5, end**0.5, steps, dtype=torch.float64) ** 2
    return torch.cumprod(1 - betas, 0).float().to(device)


@dataclass
class Batch:
    latents: Tensor  # [batch, 4, height/8, width/8], scaled
    ids: Tensor  # [batch, 77]
    labels: Tensor  # [batch, len(CLASSES)]
    scores: Tensor  # [batch], aesthetic


class Pool:
    """Encoded drawings of one size, with their captions."""

    def __init__(self, run: Run, vae: AutoencoderKL, size: tuple[int, int], capacity: int) -> None:
        height, width = size
        self.size, self.capacity = size, capacity
        self.filled = self.next = 0
        self.device = run.device
        self.factor = vae.config.scaling_factor
        self.vae = vae
        self.latents = torch.empty(capacity, 4, height // 8, width // 8, device=run.device)
        self.ids: Tensor | None = None
        self.labels: Tensor | None = None
        self.scores = torch.empty(capacity, device=run.device)

    @torch.no_grad()
    def put(self, rows: Tensor, ids: Tensor, labels: Tensor, random: torch.Generator) -> None:
        """Draws, encodes and stores scenes over the oldest ones."""
        if self.ids is None or self.labels is None:
            self.ids = ids.new_empty(self.capacity, *ids.shape[1:])
            self.labels = labels.new_empty(self.capacity, *labels.shape[1:])
        places = (torch.arange(len(rows), device=self.device) + self.next) % self.capacity
        low, high = SCORES
        scores = low + (high - low) * torch.rand(len(rows), generator=random, device=self.device)
        soft = torch.full_like(scores, CRISP)
        pictures = (render(rows, *self.size, soft, torch) * 2 - 1).permute(0, 3, 1, 2)
        latents = self.vae.encode(pictures.to(self.vae.dtype)).latent_dist.mean
        self.latents[places] = latents.float() * self.factor
        self.ids[places], self.labels[places], self.scores[places] = ids, labels, scores
        self.next = (self.next + len(rows)) % self.capacity
        self.filled = min(self.capacity, self.filled + len(rows))

    def take(self, count: int, random: torch.Generator) -> Batch:
        if self.ids is None or self.labels is None:
            raise RuntimeError("take() from a pool that nothing was put into")
        places = torch.randint(self.filled, (count,), generator=random, device=self.device)
        wording = torch.randint(self.ids.shape[1], (count,), generator=random, device=self.device)
        return Batch(
            self.latents[places], self.ids[places, wording].long(), self.labels[places, wording], self.scores[places]
        )


class Feed:
    """Batches of one size each, sizes drawn by their shares."""

    def __init__(self, run: Run, vae: AutoencoderKL, settings: DiffusionSettings, stage: str, step: int) -> None:
        self.run, self.settings, self.stage = run, settings, stage
        self.random = torch.Generator(run.device).manual_seed(run.settings.seed * 1_000_003 + step)
        sizes = run.settings.sizes
        vae = copy.deepcopy(vae).to(torch.float16 if run.device.type == "cuda" else torch.float32)
        most = max(share for *_, share in sizes)
        self.pools = [
            Pool(run, vae, (h, w), settings.pool if share == most else max(settings.pool // 6, 1))
            for h, w, share in sizes
        ]
        self.shares = [share for *_, share in sizes]
        self.chunks = run.workers.stream(self._jobs(step))
        for pool in self.pools:
            while pool.filled < pool.capacity:
                self._refresh(pool)
        run.log(f"{stage} pools hold {sum(pool.filled for pool in self.pools)} scenes")

    def _jobs(self, step: int):  # type: ignore[no-untyped-def]
        """First what fills the pools, then what each step adds: numbers differ between stages and resumptions."""
        base = {"base": 10_000_000, "refiner": 20_000_000}[self.stage]
        numbers = itertools.count(base + step * 1000 if step else base)
        fresh = self.settings.fresh
        for pool in self.pools:
            for _ in range(-(-pool.capacity // fresh)):
                yield self._job(next(numbers), pool)
        for later in itertools.count(-(-step // FRESH_EVERY) * FRESH_EVERY, FRESH_EVERY):
            yield self._job(next(numbers), self.pool_of(later))

    def _job(self, number: int, pool: Pool) -> Job:
        height, width = pool.size
        return Job(self.run.settings.seed, number, self.settings.fresh, self.settings.wordings, width / height)

    def pool_of(self, step: int) -> Pool:
        draw = random.Random(f"{self.run.settings.seed}/{self.stage}/{step}")
        return draw.choices(self.pools, self.shares)[0]

    def _refresh(self, pool: Pool) -> None:
        chunk = next(self.chunks)
        rows, ids, labels = (torch.from_numpy(array).to(self.run.device, non_blocking=True) for array in chunk)
        pool.put(rows, ids, labels, self.random)

    def batch(self, step: int) -> tuple[Batch, tuple[int, int]]:
        """Half as many pictures as the batch has rows, and their size."""
        pool = self.pool_of(step)
        if step % FRESH_EVERY == 0:
            self._refresh(pool)
        return pool.take(self.settings.batch // 2, self.random), pool.size


class Text:
    """Captions' ids to what the UNets see of them."""

    def __init__(self, first: CLIPTextModel, second: CLIPTextModelWithProjection) -> None:
        self.first, self.second = first, second
        vocab, _ = vocabulary()
        self.end = vocab[END]
        self.empty = torch.tensor([vocab[START]] + [self.end] * (LENGTH - 1), device=first.device)

    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ids [batch, 77] padded with <|endoftext|> -> both encoders' penultimate states [batch, 77, width_1] and
        [batch, 77, width_2], and the pooled projection [batch, width_2]."""
        ends = (ids == self.end).cumsum(-1)
        ids_2 = torch.where(ends > 1, 0, ids)  # tokenizer_2 pads with "!", which is 0
        states = self.first(ids, output_hidden_states=True).hidden_states[-2]
        out = self.second(ids_2, output_hidden_states=True)
        return states, out.hidden_states[-2], out.text_embeds


class Reader(nn.Module):
    """The auxiliary head: what a caption states, read from its encodings at <|endoftext|>. Thrown away later."""

    def __init__(self) -> None:
        super().__init__()
        width = architecture.WIDTH_1 + 2 * architecture.WIDTH_2
        self.layers = nn.Sequential(nn.Linear(width, 384), nn.GELU(), nn.Linear(384, sum(CLASSES)))

    def forward(self, states: Tensor, pooled: Tensor, ends: Tensor, labels: Tensor) -> Tensor:
        last = states[torch.arange(len(states), device=states.device), ends]
        answers = self.layers(torch.cat([last, pooled], 1)).float().split(CLASSES, dim=1)
        wrong = [F.cross_entropy(answer, labels[:, i].long()) for i, answer in enumerate(answers)]
        return torch.stack(wrong).mean()


class Noise:
    """Noise, timesteps and weights of the loss."""

    def __init__(self, device: torch.device, refines: bool = False) -> None:
        self.alphas = alphas_cumulative(device)
        self.refines = refines
        self.below = REFINED_BELOW if refines else 1000
        self.start = float(((1 - self.alphas[FIRST_TIMESTEP]) / self.alphas[FIRST_TIMESTEP]) ** 0.5)

    def add(self, latents: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Noised latents, timesteps [batch], the noise in them, and weights [batch].

        A sampler starts from pure noise, which the training's noisiest latents are not: they still show the
        picture's mean. Seen from the finished picture x, a sampler's path is x + sigma * (n - x / sigma_start);
        half of the batch trains on such noise, the rest on plain noise. Far below the start the two are the same."""
        count = len(latents)
        draws = torch.rand(3, count, generator=random, device=latents.device)
        if self.refines:
            share = draws[1] ** 3  # a third at the last hundredth: whoever refines is always asked there
        else:
            share = torch.where(draws[0] < 0.3, 1 - draws[1] ** 2, draws[1])  # a third leans to high noise
        timesteps = (share * self.below).long().clip(0, self.below - 1)
        noise = torch.randn(latents.shape, generator=random, device=latents.device)
        noise += OFFSET * torch.randn(*latents.shape[:2], 1, 1, generator=random, device=latents.device)
        if not self.refines:
            noise -= (draws[2] < 0.5)[:, None, None, None] * latents / self.start
        kept = self.alphas[timesteps][:, None, None, None]
        noised = kept.sqrt() * latents + (1 - kept).sqrt() * noise
        return noised, timesteps, noise, (1 / kept.flatten()).clip(max=HEAVIEST)


def _drop(ids: Tensor, empty: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """ids with half of the dropped captions emptied, and which ones become zeros [batch], the other half."""
    draw = torch.rand(len(ids), generator=random, device=ids.device)
    ids = torch.where((draw < DROPPED / 2)[:, None], empty, ids)
    return ids, (draw >= DROPPED / 2) & (draw < DROPPED)


def train_base(run: Run, networks: Networks) -> float:
    """Not compiled: from the same weights, on the same batches, compiled steps left a loss 5 % higher (docs/log)."""
    settings = run.settings.base
    trained = {"text_encoder": networks.text_encoder, "text_encoder_2": networks.text_encoder_2}
    modules = nn.ModuleDict({**trained, "unet": networks.unet, "reader": Reader()})
    modules.to(run.device, memory_format=torch.channels_last).train()
    learner = Learner(modules, settings.steps, settings.rate)
    run.resume("base", learner)
    feed = Feed(run, networks.vae, settings, "base", learner.step)
    text = Text(networks.text_encoder, networks.text_encoder_2)
    noise = Noise(run.device)
    reader = modules["reader"]

    def forward(
        noised: Tensor, timesteps: Tensor, ids: Tensor, zeros: Tensor, time_ids: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        states_1, states_2, pooled = text(ids)
        states = torch.cat([states_1, states_2], 2)
        ends = (ids == text.end).int().argmax(-1)
        read = reader(states, pooled, ends, labels) if settings.auxiliary else pooled.new_zeros(())
        shown = (states * ~zeros[:, None, None]).repeat(NOISES, 1, 1)
        added = {"text_embeds": (pooled * ~zeros[:, None]).repeat(NOISES, 1), "time_ids": time_ids}
        return networks.unet(noised, timesteps, shown, added_cond_kwargs=added, return_dict=False)[0], read

    def loss(step: int) -> Tensor:
        batch, size = feed.batch(step)
        ids, zeros = _drop(batch.ids, text.empty, feed.random)
        noised, timesteps, added, weights = noise.add(batch.latents.repeat(NOISES, 1, 1, 1), feed.random)
        time_ids = batch.latents.new_tensor([*size, 0, 0, *size]).expand(len(noised), -1)
        plain = zeros | (ids == text.empty).all(1)
        labels = torch.where(plain[:, None], batch.latents.new_tensor(CLASSES).to(batch.labels) - 1, batch.labels)
        noised = noised.to(precision(run.device), memory_format=torch.channels_last)
        predicted, read = forward(noised, timesteps, ids, zeros, time_ids, labels)
        wrong = (predicted.float() - added).square().mean((1, 2, 3))
        return (wrong * weights).mean() + settings.auxiliary * read

    seconds = run.learn("base", learner, loss)
    feed.chunks.close()
    return seconds


def edges(latents: Tensor) -> Tensor:
    """Weights [rows, 1, height/8, width/8]: EDGES more for latents beside which the picture changes."""
    down = F.pad(latents.diff(dim=2).abs().amax(1, keepdim=True), (0, 0, 0, 1))
    across = F.pad(latents.diff(dim=3).abs().amax(1, keepdim=True), (0, 1, 0, 0))
    return 1 + EDGES * (F.max_pool2d(down + across, 3, stride=1, padding=1) > STEP).float()


@torch.no_grad()
def start_from_base(refiner: UNet2DConditionModel, base: UNet2DConditionModel) -> None:
    """Gives the refiner the base's weights in all that the two have in common: every level but the deepest, which is
    next to nothing in the refiner.

    Of what it reads of the text, the second encoder's part. The base's weights for the target size are added to those
    for the original size, which is the same in training; the aesthetic score begins as nothing, and so does what comes
    up from the deepest level.
    """
    known = dict(base.named_parameters())
    width = refiner.config.block_out_channels[-2]
    for name, weight in refiner.named_parameters():
        source = known[name]
        if source.shape == weight.shape:
            weight.copy_(source)
        elif ".attn2.to_" in name and len(source) == len(weight):
            weight.copy_(source[:, -WIDTH_2:])
        elif name.startswith("up_blocks.1.resnets.0.") and weight.ndim > 1:  # below and skip beside each other
            weight.zero_()[:, -width:].copy_(source[:, -width:])
        elif name.startswith("up_blocks.1.resnets.0."):
            weight[-width:].copy_(source[-width:])
    told = WIDTH_2 + 4 * TIME_WIDTH  # the pooled text; height, width, top and left
    embedding, source = refiner.add_embedding.linear_1.weight, base.add_embedding.linear_1.weight
    embedding.zero_()[:, :told].copy_(source[:, :told])
    embedding[:, WIDTH_2 : WIDTH_2 + 2 * TIME_WIDTH] += source[:, told:].to(embedding)


def train_refiner(run: Run, networks: Networks) -> float:
    """The base, as it will be served, teaches it: networks.unet and the text encoders stay as they are."""
    settings = run.settings.refiner
    start_from_base(networks.refiner_unet, networks.unet)
    modules = nn.ModuleDict({"unet": networks.refiner_unet})
    modules.to(run.device, memory_format=torch.channels_last).train()
    served = torch.float16 if run.device.type == "cuda" else torch.float32
    teacher = copy.deepcopy(networks.unet).to(run.device, served, memory_format=torch.channels_last)
    teacher.eval().requires_grad_(False)
    encoders = (copy.deepcopy(networks.text_encoder), copy.deepcopy(networks.text_encoder_2))
    text = Text(*(encoder.to(run.device, served).eval().requires_grad_(False) for encoder in encoders))
    learner = Learner(modules, settings.steps, settings.rate)
    run.resume("refiner", learner)
    feed = Feed(run, networks.vae, settings, "refiner", learner.step)
    noise = Noise(run.device, refines=True)
    with torch.no_grad():
        _, nothing, unpooled = text(text.empty[None])

    def forward(
        noised: Tensor, timesteps: Tensor, states: Tensor, pooled: Tensor, time_ids: Tensor, scored_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The refiner's predictions and the base's, [2 * rows, ...]: with the captions, then as both are served without
        one, the base with zeros and the refiner with the empty caption."""
        noised, timesteps, time_ids = [torch.cat([twice, twice]) for twice in (noised, timesteps, time_ids)]
        with torch.no_grad():
            shown, embeds = [torch.cat([told, torch.zeros_like(told)]) for told in (states, pooled)]
            added = {"text_embeds": embeds, "time_ids": time_ids}
            taught = teacher(noised.to(served), timesteps, shown, added_cond_kwargs=added, return_dict=False)[0]
            second = states[..., -nothing.shape[-1] :]
            shown, embeds = [
                torch.cat([told, e.expand_as(told)]) for told, e in ((second, nothing), (pooled, unpooled))
            ]
        added = {"text_embeds": embeds.to(noised.dtype), "time_ids": scored_ids}
        shown = shown.to(noised.dtype)
        return networks.refiner_unet(noised, timesteps, shown, added_cond_kwargs=added, return_dict=False)[0], taught

    fast = run.compiled(forward, modules)

    def loss(step: int) -> Tensor:
        batch, size = feed.batch(step)
        noised, timesteps, _, _ = noise.add(batch.latents, feed.random)
        with torch.no_grad():
            states_1, states_2, pooled = text(batch.ids)
        states = torch.cat([states_1, states_2], 2)
        frame = batch.latents.new_tensor([*size, 0, 0]).expand(len(noised), -1)
        time_ids = torch.cat([frame, frame[:, :2]], 1)
        scores = torch.cat([batch.scores, batch.scores.roll(1)])[:, None]
        scored_ids = torch.cat([frame.repeat(2, 1), scores], 1)
        native = size == run.settings.sizes[0][:2]
        noised = noised.to(precision(run.device), memory_format=torch.channels_last)
        predicted, taught = (fast if native else forward)(noised, timesteps, states, pooled, time_ids, scored_ids)
        told, untold = (predicted.float() - taught.float()).chunk(2)  # errors, each [rows, 4, height/8, width/8]
        guided = untold + architecture.DEFAULTS["guidance_scale"] * (told - untold)
        wrong = (guided.square() + told.square()).mean(1, keepdim=True)
        near = edges(batch.latents)
        return (wrong * near).sum() / near.sum()

    seconds = run.learn("refiner", learner, loss)
    feed.chunks.close()
    return seconds
