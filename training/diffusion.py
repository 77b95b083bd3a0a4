"""Stages three and four: the base (both text encoders and its UNet), then the refiner (its UNet alone).

The base learns to predict noise. The refiner learns to predict what the base predicts, at the timesteps where it takes
over, most often at the last ones. There the noise itself is a poor target: the caption changes little of it, and
guidance multiplies the error. The base's prediction is the mean of that noise. Both predictions are compared with
guidance, as they are served, and with the caption alone.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from training import architecture
from training.architecture import TEXT_WIDTH_1, TEXT_WIDTH_2, TIME_ID_WIDTH
from training.autoencoder import neighbour_difference
from training.optimizer import EmaOptimizer, compute_dtype
from training.pictures.dataset import CLASS_COUNTS
from training.pictures.latent_pool import BatchSource
from training.run import TrainingRun
from training.tokenizer import END_TOKEN, MAX_LENGTH, START_TOKEN, vocabulary
from training.write_model import Networks

NOISES_PER_IMAGE = 2  # each with its own timestep; only the base
DROPPED_SHARE = 0.1  # captions dropped for guidance: half become zeros, half the empty caption
CHANNEL_NOISE = 0.1  # offset noise: standard deviation of the shift of a whole channel
FIRST_SAMPLED_TIMESTEP = 951  # of 20 steps: a sampler starts there, from pure noise
MAX_TIMESTEP_WEIGHT = 50.0  # largest weight of a timestep in the base's loss
REFINER_TIMESTEPS = 210  # the refiner trains on the timesteps below; it takes over at 200
EDGE_WEIGHT = 10.0  # additional weight near an edge in the refiner's loss: corners of small objects are few
MIN_EDGE_DIFFERENCE = 1.5  # a larger `neighbour_difference` is an edge; the latents' standard deviation is 1


def alphas_cumprod(device: torch.device) -> Tensor:
    """Return SDXL's scaled-linear noise schedule, float32 [1000]."""
    steps = architecture.SCHEDULER["num_train_timesteps"]
    start, end = architecture.SCHEDULER["beta_start"], architecture.SCHEDULER["beta_end"]
    betas = torch.linspace(start**0.5, end**0.5, steps, dtype=torch.float64) ** 2
    return torch.cumprod(1 - betas, 0).float().to(device)


class TextEncoders:
    """Both text encoders, and the token ids of the empty caption, [77]."""

    def __init__(self, first: CLIPTextModel, second: CLIPTextModelWithProjection) -> None:
        self.first, self.second = first, second
        vocab, _ = vocabulary()
        self.end_id = vocab[END_TOKEN]
        ids = [vocab[START_TOKEN]] + [self.end_id] * (MAX_LENGTH - 1)
        self.empty_ids = torch.tensor(ids, device=first.device)

    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode ids [batch, 77] that are padded with <|endoftext|>.

        Returns the penultimate states of both encoders, [batch, 77, TEXT_WIDTH_1] and [batch, 77, TEXT_WIDTH_2], and
        the pooled projection [batch, TEXT_WIDTH_2].
        """
        is_padding = (ids == self.end_id).cumsum(-1) > 1
        ids_2 = torch.where(is_padding, 0, ids)  # tokenizer_2 pads with "!", whose id is 0
        states_1 = self.first(ids, output_hidden_states=True).hidden_states[-2]
        output_2 = self.second(ids_2, output_hidden_states=True)
        return states_1, output_2.hidden_states[-2], output_2.text_embeds


class AuxiliaryHead(nn.Module):
    """Classify what a caption states, from its states at <|endoftext|> and its pooled projection.

    Its loss trains the text encoders. The head itself is not exported.
    """

    def __init__(self) -> None:
        super().__init__()
        width = TEXT_WIDTH_1 + 2 * TEXT_WIDTH_2
        self.layers = nn.Sequential(nn.Linear(width, 384), nn.GELU(), nn.Linear(384, sum(CLASS_COUNTS)))

    def forward(self, states: Tensor, pooled: Tensor, ends: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy.

        states: [batch, 77, TEXT_WIDTH_1 + TEXT_WIDTH_2]. pooled: [batch, TEXT_WIDTH_2]. ends: [batch], positions of
        <|endoftext|>. labels: [batch, len(CLASS_COUNTS)].
        """
        end_states = states[torch.arange(len(states), device=states.device), ends]
        logits = self.layers(torch.cat([end_states, pooled], 1)).float().split(CLASS_COUNTS, dim=1)
        losses = [F.cross_entropy(label_logits, labels[:, i].long()) for i, label_logits in enumerate(logits)]
        return torch.stack(losses).mean()


class NoisedLatents(NamedTuple):
    latents: Tensor  # [batch, 4, height/8, width/8]
    timesteps: Tensor  # [batch]
    noise: Tensor  # like latents: the noise in them
    weights: Tensor  # [batch], weights of the timesteps in the loss


class NoiseSampler:
    """Samples timesteps and adds noise to latents."""

    def __init__(self, device: torch.device, for_refiner: bool = False) -> None:
        self.alphas = alphas_cumprod(device)
        self.for_refiner = for_refiner
        self.timesteps = REFINER_TIMESTEPS if for_refiner else len(self.alphas)
        first_alpha = self.alphas[FIRST_SAMPLED_TIMESTEP]
        self.first_sigma = float(((1 - first_alpha) / first_alpha) ** 0.5)

    def add_noise(self, latents: Tensor, generator: torch.Generator) -> NoisedLatents:
        """Add noise to latents at random timesteps.

        A sampler starts from pure noise, but the noisiest latents of plain training still show the image's mean. For
        the finished image x, a sampler's path is x + sigma * (n - x / first_sigma). Half of the base's batch trains
        on such noise, the rest on plain noise. At small sigmas the two are equal.
        """
        count = len(latents)
        uniform = torch.rand(3, count, generator=generator, device=latents.device)
        if self.for_refiner:
            fraction = uniform[1] ** 3  # a fifth in the last hundredth, because every refined image passes there
        else:
            # Three tenths lean to high noise.
            fraction = torch.where(uniform[0] < 0.3, 1 - uniform[1] ** 2, uniform[1])
        timesteps = (fraction * self.timesteps).long().clip(0, self.timesteps - 1)
        noise = torch.randn(latents.shape, generator=generator, device=latents.device)
        noise += CHANNEL_NOISE * torch.randn(*latents.shape[:2], 1, 1, generator=generator, device=latents.device)
        if not self.for_refiner:
            noise -= (uniform[2] < 0.5)[:, None, None, None] * latents / self.first_sigma
        alphas = self.alphas[timesteps][:, None, None, None]
        noised = alphas.sqrt() * latents + (1 - alphas).sqrt() * noise
        return NoisedLatents(noised, timesteps, noise, (1 / alphas.flatten()).clip(max=MAX_TIMESTEP_WEIGHT))


def _drop_captions(ids: Tensor, empty_ids: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Drop random captions. Returns ids with some captions empty, and a mask [batch] of those to replace by zeros."""
    uniform = torch.rand(len(ids), generator=generator, device=ids.device)
    ids = torch.where((uniform < DROPPED_SHARE / 2)[:, None], empty_ids, ids)
    return ids, (uniform >= DROPPED_SHARE / 2) & (uniform < DROPPED_SHARE)


def train_base(run: TrainingRun, networks: Networks) -> float:
    """Train the text encoders and the base's UNet in place. Returns the seconds that it took.

    Not compiled: with the same weights and batches, compiled steps had a 5 % higher loss (docs/log/tiny-model.md).
    """
    settings = run.settings.base
    auxiliary_head = AuxiliaryHead()
    modules = nn.ModuleDict(
        {
            "text_encoder": networks.text_encoder,
            "text_encoder_2": networks.text_encoder_2,
            "unet": networks.unet,
            "auxiliary_head": auxiliary_head,
        }
    )
    modules.to(run.device, memory_format=torch.channels_last).train()
    optimizer = EmaOptimizer(modules, settings.steps, settings.rate)
    run.resume("base", optimizer)
    source = BatchSource(run, networks.vae, settings, "base", optimizer.step)
    encode_text = TextEncoders(networks.text_encoder, networks.text_encoder_2)
    noise_sampler = NoiseSampler(run.device)

    def loss(step: int) -> Tensor:
        batch, size = source.sample(step)
        ids, is_zeroed = _drop_captions(batch.ids, encode_text.empty_ids, source.generator)
        noised = noise_sampler.add_noise(batch.latents.repeat(NOISES_PER_IMAGE, 1, 1, 1), source.generator)
        is_dropped = is_zeroed | (ids == encode_text.empty_ids).all(1)
        not_stated = batch.latents.new_tensor(CLASS_COUNTS).to(batch.labels) - 1
        labels = torch.where(is_dropped[:, None], not_stated, batch.labels)

        states_1, states_2, pooled = encode_text(ids)
        states = torch.cat([states_1, states_2], 2)
        ends = (ids == encode_text.end_id).int().argmax(-1)
        auxiliary_loss = auxiliary_head(states, pooled, ends, labels) if settings.auxiliary else pooled.new_zeros(())
        predicted = networks.unet(
            noised.latents.to(compute_dtype(run.device), memory_format=torch.channels_last),
            noised.timesteps,
            (states * ~is_zeroed[:, None, None]).repeat(NOISES_PER_IMAGE, 1, 1),
            added_cond_kwargs={
                "text_embeds": (pooled * ~is_zeroed[:, None]).repeat(NOISES_PER_IMAGE, 1),
                "time_ids": batch.latents.new_tensor([*size, 0, 0, *size]).expand(len(noised.latents), -1),
            },
            return_dict=False,
        )[0]
        error = (predicted.float() - noised.noise).square().mean((1, 2, 3))
        return (error * noised.weights).mean() + settings.auxiliary * auxiliary_loss

    seconds = run.optimize("base", optimizer, loss)
    source.close()
    return seconds


def edge_weights(latents: Tensor) -> Tensor:
    """Return loss weights [batch, 1, height/8, width/8]: 1, and 1 + EDGE_WEIGHT for latents next to an edge."""
    near_edge = F.max_pool2d(neighbour_difference(latents), 3, stride=1, padding=1) > MIN_EDGE_DIFFERENCE
    return 1 + EDGE_WEIGHT * near_edge.float()


@torch.no_grad()
def start_from_base(refiner: UNet2DConditionModel, base: UNet2DConditionModel) -> None:
    """Copy the base's weights to the refiner where the two agree: all levels but the deepest, which is very narrow.

    Where the refiner's inputs are fewer, it gets the weights of those that both have:

    - text: the second encoder's states and pooled projection;
    - time_ids: original size and crop. The base's weights for the target size are added to those for the original
      size, because the two sizes are equal in training. The weights of the aesthetic score become zero;
    - the first layers above the deepest level: the skip connection. The weights of the deepest level become zero.
    """
    base_weights = dict(base.named_parameters())
    skip_width = refiner.config.block_out_channels[-2]
    for name, weight in refiner.named_parameters():
        source = base_weights[name]
        if source.shape == weight.shape:
            weight.copy_(source)
        elif ".attn2.to_" in name and len(source) == len(weight):
            weight.copy_(source[:, -TEXT_WIDTH_2:])
        elif name.startswith("up_blocks.1.resnets.0.") and weight.ndim > 1:  # inputs: deepest level, then skip
            weight.zero_()[:, -skip_width:].copy_(source[:, -skip_width:])
        elif name.startswith("up_blocks.1.resnets.0."):
            weight[-skip_width:].copy_(source[-skip_width:])
    common = TEXT_WIDTH_2 + 4 * TIME_ID_WIDTH  # the pooled text, then height, width, top and left
    embedding, source = refiner.add_embedding.linear_1.weight, base.add_embedding.linear_1.weight
    embedding.zero_()[:, :common].copy_(source[:, :common])
    embedding[:, TEXT_WIDTH_2 : TEXT_WIDTH_2 + 2 * TIME_ID_WIDTH] += source[:, common:].to(embedding)


def train_refiner(run: TrainingRun, networks: Networks) -> float:
    """Train the refiner's UNet in place, on the predictions of the base. Returns the seconds that it took.

    The other networks do not change.
    """
    settings = run.settings.refiner
    modules = nn.ModuleDict({"unet": networks.refiner_unet})
    modules.to(run.device, memory_format=torch.channels_last).train()
    serving_dtype = torch.float16 if run.device.type == "cuda" else torch.float32
    base_unet = copy.deepcopy(networks.unet).to(run.device, serving_dtype, memory_format=torch.channels_last)
    base_unet.eval().requires_grad_(False)
    encoders = [copy.deepcopy(encoder) for encoder in (networks.text_encoder, networks.text_encoder_2)]
    encode_text = TextEncoders(*(e.to(run.device, serving_dtype).eval().requires_grad_(False) for e in encoders))
    optimizer = EmaOptimizer(modules, settings.steps, settings.rate)
    run.resume("refiner", optimizer)
    source = BatchSource(run, networks.vae, settings, "refiner", optimizer.step)
    noise_sampler = NoiseSampler(run.device, for_refiner=True)
    with torch.no_grad():
        _, empty_states, empty_pooled = encode_text(encode_text.empty_ids[None])

    def predict(
        noised: Tensor, timesteps: Tensor, states: Tensor, pooled: Tensor, time_ids: Tensor, refiner_time_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the predictions of the refiner and of the base, each [2 * batch, 4, height/8, width/8].

        The first half is conditional. The second half is unconditional as it is served: zeros for the base, the empty
        caption for the refiner. `refiner_time_ids` are [2 * batch, 5], the other inputs are of one half.
        """
        noised, timesteps, time_ids = [torch.cat([half, half]) for half in (noised, timesteps, time_ids)]
        with torch.no_grad():
            base_states, base_pooled = [torch.cat([cond, torch.zeros_like(cond)]) for cond in (states, pooled)]
            base_added = {"text_embeds": base_pooled, "time_ids": time_ids}
            target = base_unet(
                noised.to(serving_dtype), timesteps, base_states, added_cond_kwargs=base_added, return_dict=False
            )[0]
            cond_states = states[..., -TEXT_WIDTH_2:]
            refiner_states = torch.cat([cond_states, empty_states.expand_as(cond_states)]).to(noised.dtype)
            refiner_pooled = torch.cat([pooled, empty_pooled.expand_as(pooled)]).to(noised.dtype)
        refiner_added = {"text_embeds": refiner_pooled, "time_ids": refiner_time_ids}
        predicted = networks.refiner_unet(
            noised, timesteps, refiner_states, added_cond_kwargs=refiner_added, return_dict=False
        )[0]
        return predicted, target

    compiled_predict = run.compile(predict, modules)

    def loss(step: int) -> Tensor:
        batch, size = source.sample(step)
        noised = noise_sampler.add_noise(batch.latents, source.generator)
        with torch.no_grad():
            states_1, states_2, pooled = encode_text(batch.ids)
        states = torch.cat([states_1, states_2], 2)
        size_and_crop = batch.latents.new_tensor([*size, 0, 0]).expand(len(batch.latents), -1)
        time_ids = torch.cat([size_and_crop, size_and_crop[:, :2]], 1)
        scores = torch.cat([batch.scores, batch.scores.roll(1)])[:, None]  # any scores for the unconditional half
        refiner_time_ids = torch.cat([size_and_crop.repeat(2, 1), scores], 1)
        latents = noised.latents.to(compute_dtype(run.device), memory_format=torch.channels_last)
        # Only the native size is compiled: the others are too rare to be worth the time.
        predict_size = compiled_predict if size == run.settings.native_size else predict
        predicted, target = predict_size(latents, noised.timesteps, states, pooled, time_ids, refiner_time_ids)
        # Each [batch, 4, height/8, width/8]
        cond_error, uncond_error = (predicted.float() - target.float()).chunk(2)
        guided_error = uncond_error + architecture.DEFAULTS["guidance_scale"] * (cond_error - uncond_error)
        squared_error = (guided_error.square() + cond_error.square()).mean(1, keepdim=True)
        weights = edge_weights(batch.latents)
        return (squared_error * weights).sum() / weights.sum()

    seconds = run.optimize("refiner", optimizer, loss)
    source.close()
    return seconds
