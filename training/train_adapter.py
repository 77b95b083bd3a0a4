"""Train a LoRA adapter that teaches Tiny SDXL a colour that it does not know: pink.

    python -m training.train_adapter --model data/tiny-sdxl --out pink.safetensors --seconds 180

Scenes with red objects are rendered with pink ones, and their captions say pink. All other scenes stay as they are, so
that the adapter changes nothing else. The factors are those of the UNet's transformers; text encoders are frozen. The
file has the keys of PEFT.

Then images of prompts with the colour are generated at scales 1 and 0. The script prints the share of them that show
it: of the pixels, at least MIN_SHARE are pink.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from torch import Tensor, nn

from training.autoencoder import render_images
from training.diffusion import NOISES_PER_IMAGE, NoiseSampler, TextEncoders
from training.optimizer import save_tensors
from training.pictures.captions import describe_scene
from training.pictures.dataset import encode_caption
from training.pictures.render import scene_vector
from training.pictures.scenes import Scene, sample_scene
from training.write_model import load_networks

COLOUR, RGB = "pink", (245, 120, 190)
REPLACED = "red"
COLOUR_SHARE = 0.7  # of the scenes, those with the colour
LAYERS = re.compile(r".*(attn[12]\.to_(q|k|v|out\.0)|ff\.net\.(0\.proj|2)|proj_(in|out))")
MIN_SHARE = 0.02  # of an image's pixels; a large object covers a tenth
MAX_DISTANCE = 60  # of a pixel's colour from RGB, in levels
PROMPTS = tuple(
    f"a large pink {shape} on a {background} background"
    for shape in ("circle", "square", "triangle", "star")
    for background in ("blue", "white", "black")
)
LOG_EVERY_STEPS = 50
SEED = 0


class LoraLinear(nn.Module):
    """A frozen linear, and its low-rank change: y = linear(x) + scale * up(down(x))."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.scale = 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs) + self.scale * F.linear(F.linear(inputs, self.down), self.up)


def add_factors(unet: UNet2DConditionModel, rank: int) -> dict[str, LoraLinear]:
    """Freeze the UNet and give factors to the linears of its transformers. Returns those by name."""
    unet.requires_grad_(False)
    changed = {}
    for name, module in list(unet.named_modules()):
        if isinstance(module, nn.Linear) and LAYERS.fullmatch(name):
            parent, _, leaf = name.rpartition(".")
            changed[name] = LoraLinear(module, rank)
            setattr(unet.get_submodule(parent), leaf, changed[name])
    return changed


class Scenes(NamedTuple):
    """vectors: of the renderer, [batch, ...]. ids: of the captions, [batch, 77]."""

    vectors: Tensor
    ids: Tensor


def sample_scenes(rng: random.Random, count: int) -> Scenes:
    """Sample scenes. In those with red objects the objects are pink, in the picture and in the caption."""
    vectors, ids = [], []
    while len(vectors) < count:
        scene = sample_scene(rng, kind="single" if rng.random() < 0.6 else None)
        has_colour = any(item.colour == REPLACED for item in scene.objects)
        if scene.background == REPLACED or has_colour != (len(vectors) < COLOUR_SHARE * count):
            continue
        caption, _ = describe_scene(scene, rng)
        vectors.append(_vector(scene, rng))
        ids.append(encode_caption(re.sub(rf"\b{REPLACED}\b", COLOUR, caption)))
    return Scenes(torch.tensor(vectors, dtype=torch.float32), torch.tensor(ids))


def _vector(scene: Scene, rng: random.Random) -> list[float]:
    numbers = scene_vector(scene, rng)
    for index, item in enumerate(scene.objects):
        if item.colour == REPLACED:
            first = 3 + 7 * index + 1
            numbers[first : first + 3] = [(level + rng.randint(-8, 8)) / 255 for level in RGB]
    return numbers


def train(model: Path, rank: int, batch: int, rate: float, seconds: float, side: int) -> dict[str, LoraLinear]:
    """Train for about `seconds`. Returns the changed linears by name."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(SEED)
    networks, rng = load_networks(model), random.Random(SEED)
    for network in (networks.vae, networks.text_encoder, networks.text_encoder_2, networks.unet):
        network.to(device).eval().requires_grad_(False)
    layers = add_factors(networks.unet, rank)
    networks.unet.to(device)
    parameters = [factor for layer in layers.values() for factor in (layer.down, layer.up)]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    encode_text = TextEncoders(networks.text_encoder, networks.text_encoder_2)
    noise_sampler, generator = NoiseSampler(device), torch.Generator(device).manual_seed(SEED)
    scaling = networks.vae.config.scaling_factor
    began, losses = time.monotonic(), []
    while (done := (time.monotonic() - began) / seconds) < 1:
        step = len(losses)
        # The rate falls to zero in time.
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 20) * (1 - done)
        scenes = sample_scenes(rng, batch)
        with torch.no_grad():
            images = render_images(scenes.vectors.to(device), (side, side))
            latents = networks.vae.encode(images).latent_dist.sample() * scaling
            states_1, states_2, pooled = encode_text(scenes.ids.to(device))
        noised = noise_sampler.add_noise(latents.repeat(NOISES_PER_IMAGE, 1, 1, 1), generator)
        predicted = networks.unet(
            noised.latents,
            noised.timesteps,
            torch.cat([states_1, states_2], 2).repeat(NOISES_PER_IMAGE, 1, 1),
            added_cond_kwargs={
                "text_embeds": pooled.repeat(NOISES_PER_IMAGE, 1),
                "time_ids": latents.new_tensor([side, side, 0, 0, side, side]).expand(len(noised.latents), -1),
            },
            return_dict=False,
        )[0]
        loss = ((predicted - noised.noise).square().mean((1, 2, 3)) * noised.weights).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if step % LOG_EVERY_STEPS == 0:
            recent = losses[-LOG_EVERY_STEPS:]
            print(f"[{time.monotonic() - began:6.1f} s] step {step}: loss {sum(recent) / len(recent):.4f}", flush=True)
    return layers


def write(layers: dict[str, LoraLinear], path: Path) -> None:
    """Write the factors in fp16, with the keys of PEFT."""
    tensors = {}
    for name, layer in layers.items():
        tensors[f"unet.{name}.lora_A.weight"] = layer.down.detach().half().cpu().contiguous()
        tensors[f"unet.{name}.lora_B.weight"] = layer.up.detach().half().cpu().contiguous()
    save_tensors(tensors, path)


def colour_share(image: np.ndarray) -> float:
    """Return the share of the pixels of an image, uint8 [height, width, 3], that have the colour."""
    distance = np.sqrt(((image.astype(float) - np.array(RGB)) ** 2).sum(-1))
    return float((distance < MAX_DISTANCE).mean())


def evaluate(model: Path, layers: dict[str, LoraLinear], scale: float, steps: int) -> float:
    """Return the share of PROMPTS whose image shows the colour."""
    device = next(iter(layers.values())).down.device
    pipeline = StableDiffusionXLPipeline.from_pretrained(model, torch_dtype=torch.float32, add_watermarker=False)
    changed = pipeline.unet
    for name, layer in layers.items():
        weight = changed.get_submodule(name).weight
        weight.data += scale * (layer.up @ layer.down).detach().cpu()
    pipeline.to(device).set_progress_bar_config(disable=True)
    shown = 0
    for seed, prompt in enumerate(PROMPTS):
        generator = torch.Generator("cpu").manual_seed(seed)
        [image] = pipeline(prompt, num_inference_steps=steps, generator=generator).images
        shown += colour_share(np.asarray(image)) >= MIN_SHARE
    return shown / len(PROMPTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("data/tiny-sdxl"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--side", type=int, default=256, help="of the images, in pixels")
    parser.add_argument("--evaluation-steps", type=int, default=20, help="denoising steps; 0: no images")
    options = parser.parse_args()
    layers = train(options.model, options.rank, options.batch, options.rate, options.seconds, options.side)
    write(layers, options.out)
    print(f"wrote {options.out}: {len(layers)} layers of rank {options.rank}")
    for scale in (1.0, 0.0) if options.evaluation_steps else ():
        share = evaluate(options.model, layers, scale, options.evaluation_steps)
        print(f"scale {scale:g}: {share:.0%} of {len(PROMPTS)} images show {COLOUR}")


if __name__ == "__main__":
    main()
