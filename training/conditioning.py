"""What the trainings of a ControlNet and of an IP-Adapter share: encoded scenes, the loop, pictures, the command."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from PIL import Image
from torch import Tensor
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from training.autoencoder import render_images
from training.diffusion import NoisedLatents, NoiseSampler, TextEncoders
from training.optimizer import EmaOptimizer

MODEL = Path("data/tiny-sdxl")
SIDE = 256  # pixels of the training images, the model's native size
EVALUATION_SEED = 5_000_011  # unlike any training scene's
EXAMPLES, STEPS, BATCH, RATE = 20_000, 6000, 256, 5e-4
EVALUATED, SAMPLING_STEPS = 100, 20


def encode_scenes(vectors: Tensor, folder: Path) -> Tensor:
    """Return the scaled latents of scenes, float32 [scenes, 4, SIDE/8, SIDE/8]."""
    vae = AutoencoderKL.from_pretrained(folder / "vae").to(vectors.device)
    latents = []
    with torch.no_grad():
        for part in vectors.split(64):
            distribution = vae.encode(render_images(part, (SIDE, SIDE))).latent_dist
            latents.append(distribution.mean * vae.config.scaling_factor)
    return torch.cat(latents)


@torch.no_grad()
def encode_captions(ids: Tensor, folder: Path) -> tuple[Tensor, Tensor]:
    """Return states [captions, 77, width of both encoders] and pooled projections of token ids [captions, 77]."""
    encode = TextEncoders(
        CLIPTextModel.from_pretrained(folder / "text_encoder").to(ids.device),
        CLIPTextModelWithProjection.from_pretrained(folder / "text_encoder_2").to(ids.device),
    )
    parts = [encode(part) for part in ids.split(64)]
    states = torch.cat([torch.cat([first, second], 2) for first, second, _ in parts])
    return states, torch.cat([pooled for _, _, pooled in parts])


def optimize(
    optimizer: EmaOptimizer,
    latents: Tensor,
    batch: int,
    seconds: float,
    seed: int,
    loss: Callable[[Tensor, NoisedLatents, torch.Generator], Tensor],
) -> tuple[int, float]:
    """Update `optimizer` to its last step, or until `seconds` are over. Returns the finished steps and the last loss.

    `loss(indices, noised, generator)`: the loss of a batch of examples, of whose latents noise was added.
    """
    device, start = latents.device, time.monotonic()
    sampler, generator = NoiseSampler(device), torch.Generator(device).manual_seed(seed)
    last = torch.zeros(())
    for step in range(optimizer.steps):
        indices = torch.randint(len(latents), (batch,), generator=generator, device=device)
        last = loss(indices, sampler.add_noise(latents[indices], generator), generator)
        optimizer.update(last)
        if step % 100 == 0 or step == optimizer.steps - 1:
            print(f"step {step}, {time.monotonic() - start:.0f} s, loss {last.item():.4f}", flush=True)
        if time.monotonic() - start > seconds:
            break
    optimizer.use_averages()
    return optimizer.step, last.item()


def added_conditions(pooled: Tensor) -> dict[str, Any]:
    """Return the UNet's added conditions: pooled projections, and the sizes of a whole image of the native size."""
    sizes = torch.tensor([SIDE, SIDE, 0, 0, SIDE, SIDE], device=pooled.device, dtype=torch.float32)
    return {"text_embeds": pooled, "time_ids": sizes.expand(len(pooled), -1)}


def noise_error(predicted: Tensor, noised: NoisedLatents) -> Tensor:
    """Return the weighted mean error of predicted noise."""
    error = (predicted.float() - noised.noise).square().mean((1, 2, 3))
    return (error * noised.weights).mean()


def generate(pipeline: Any, prompt: str, seed: int, steps: int, **options: Any) -> Image.Image:
    """Generate an image of the native size with guidance 3."""
    generator = torch.Generator("cpu").manual_seed(seed)
    [image] = pipeline(
        prompt, num_inference_steps=steps, guidance_scale=3.0, generator=generator, height=SIDE, width=SIDE, **options
    ).images
    return image  # type: ignore[no-any-return]


def run(description: str, train_and_score: Callable[[Path, float, torch.device], tuple[Any, dict[str, Any]]]) -> None:
    """Run a command. `train_and_score(out, seconds, device)` writes the files. It returns the score and the facts."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=420, help="the training ends after so many seconds")
    arguments = parser.parse_args()
    score, facts = train_and_score(arguments.out, arguments.seconds, torch.device(arguments.device))
    print(json.dumps(facts | asdict(score)))


def facts_of(steps: int, loss: float, seconds: float, device: torch.device) -> dict[str, Any]:
    """Return what a model card states of a training."""
    return {
        "examples": EXAMPLES, "steps": steps, "batch": BATCH, "seconds": seconds, "loss": loss,
        "sampling_steps": SAMPLING_STEPS, "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
    }  # fmt: skip
