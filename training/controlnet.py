"""Train a ControlNet for Tiny SDXL: edges -> picture. Then score it, and write it with its model card.

    python -m training.controlnet OUT [--seconds 480] [--device cuda]

The control image has the edges of a picture, as `preprocess: canny` finds them. The ControlNet starts as a copy of the
UNet's first half and learns to predict the noise, while the UNet, the text encoders and the VAE stay as they are.
Scenes are sampled and their edges found by worker processes before the training; the same scenes are then used many
times, each time with other noise.

The score is the share of held-out scenes whose object is where the edges have it. The captions state its shape and
colours, not its position. The same captions and seeds without the ControlNet show what chance gives.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import AutoencoderKL, ControlNetModel, StableDiffusionXLControlNetPipeline, UNet2DConditionModel
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from model.images.canny import canny
from training import captions, scenes
from training.autoencoder import render_images
from training.dataset import encode_caption
from training.diffusion import DROPPED_SHARE, NoiseSampler, TextEncoders
from training.export import METADATA
from training.optimizer import EmaOptimizer, compute_dtype
from training.render import SCENE_VECTOR_LENGTH, render_scene, scene_vector
from training.score import detect_objects, score_image

SIDE = 256  # pixels of the training images, the model's native size
EMBEDDING_CHANNELS = (16, 32, 64, 96)  # of the control image's embedding; each after the first halves the sides
SEED = 11
EVALUATION_SEED = 5_000_011  # unlike any training scene's
MAX_OFFSET = 0.06  # of the shorter side, between an object and its place in the control image
PICTURE_COLUMNS = 8


@dataclass(frozen=True)
class Example:
    """A scene: its vector, a caption's token ids, and its edges as one bit for each pixel."""

    vector: list[float]
    ids: list[int]
    edges: bytes


@dataclass(frozen=True)
class Score:
    """Shares of the evaluated scenes: with the object in its place, with all that the caption states, and with both.

    `chance`: the first share without the ControlNet.
    """

    placed: float
    true: float
    both: float
    chance: float
    scenes: int


def sample_example(number: int) -> Example:
    """Return the training scene of a number. Equal numbers give equal scenes."""
    rng = random.Random(f"{SEED}/{number}")
    scene = scenes.sample_scene(rng)
    text, _ = captions.describe_scene(scene, rng)
    return Example(scene_vector(scene, rng), encode_caption(text), np.packbits(scene_edges(scene)).tobytes())


def scene_edges(scene: scenes.Scene) -> np.ndarray:
    """Return the edges of a scene's picture, bool [SIDE, SIDE]."""
    return canny(render_scene(scene, SIDE, SIDE))[:, :, 0] > 0


class Examples:
    """Encoded scenes on a device, from which batches are sampled."""

    def __init__(self, examples: list[Example], folder: Path, device: torch.device) -> None:
        vectors = torch.tensor([example.vector for example in examples], device=device)
        assert vectors.shape[1] == SCENE_VECTOR_LENGTH
        ids = torch.tensor([example.ids for example in examples], device=device)
        bits = np.stack([np.frombuffer(example.edges, np.uint8) for example in examples])
        self.edges = torch.from_numpy(bits).to(device)  # uint8 [scenes, SIDE * SIDE / 8]
        vae = AutoencoderKL.from_pretrained(folder / "vae").to(device)
        encode = TextEncoders(
            CLIPTextModel.from_pretrained(folder / "text_encoder").to(device),
            CLIPTextModelWithProjection.from_pretrained(folder / "text_encoder_2").to(device),
        )
        latents, states, pooled = [], [], []
        with torch.no_grad():
            for part in torch.arange(len(examples), device=device).split(64):
                distribution = vae.encode(render_images(vectors[part], (SIDE, SIDE))).latent_dist
                latents.append(distribution.mean * vae.config.scaling_factor)
                *of_encoders, of_text = encode(ids[part])
                states.append(torch.cat(of_encoders, 2).half())
                pooled.append(of_text)
        self.latents, self.states, self.pooled = torch.cat(latents), torch.cat(states), torch.cat(pooled)

    def control(self, indices: Tensor) -> Tensor:
        """Return the control images of scenes, float32 [batch, 3, SIDE, SIDE], 0 or 1."""
        shifts = torch.arange(7, -1, -1, device=self.edges.device)  # packbits writes the first pixel to the highest bit
        bits = (self.edges[indices][:, :, None] >> shifts) & 1
        return bits.reshape(-1, 1, SIDE, SIDE).float().expand(-1, 3, -1, -1)


def train(
    folder: Path, examples: Examples, steps: int, batch: int, rate: float, seconds: float, device: torch.device
) -> tuple[ControlNetModel, int, float]:
    """Train for `steps`, or until `seconds` are over. Returns the network, the finished steps and the last loss."""
    unet = UNet2DConditionModel.from_pretrained(folder / "unet")
    network = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=EMBEDDING_CHANNELS)
    network.to(device).train()
    nn.Module.to(unet, device, compute_dtype(device)).requires_grad_(False)
    optimizer = EmaOptimizer(nn.ModuleDict({"controlnet": network}), steps, rate)
    sampler = NoiseSampler(device)
    generator = torch.Generator(device).manual_seed(SEED)
    dtype, start = compute_dtype(device), time.monotonic()
    sizes = torch.tensor([SIDE, SIDE, 0, 0, SIDE, SIDE], device=device, dtype=torch.float32).expand(batch, -1)
    loss = torch.zeros(())
    for step in range(steps):
        indices = torch.randint(len(examples.latents), (batch,), generator=generator, device=device)
        noised = sampler.add_noise(examples.latents[indices], generator)
        kept = torch.rand(batch, generator=generator, device=device) >= DROPPED_SHARE
        states = (examples.states[indices] * kept[:, None, None]).to(dtype)
        added = {"text_embeds": (examples.pooled[indices] * kept[:, None]).to(dtype), "time_ids": sizes}
        sample = noised.latents.to(dtype)
        down, middle = network(
            sample, noised.timesteps, states, examples.control(indices).to(dtype), added_cond_kwargs=added,
            return_dict=False,
        )  # fmt: skip
        [predicted] = unet(
            sample, noised.timesteps, states, added_cond_kwargs=added, return_dict=False,
            down_block_additional_residuals=down, mid_block_additional_residual=middle,
        )  # fmt: skip
        error = (predicted.float() - noised.noise).square().mean((1, 2, 3))
        loss = (error * noised.weights).mean()
        optimizer.update(loss)
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}, {time.monotonic() - start:.0f} s, loss {loss.item():.4f}", flush=True)
        if time.monotonic() - start > seconds:
            break
    optimizer.use_averages()
    return network.eval(), optimizer.step, loss.item()


def held_out_scenes(count: int) -> list[scenes.Scene]:
    """Return scenes of one object whose triple no training scene has."""
    rng = random.Random(EVALUATION_SEED)
    return [scenes.sample_scene(rng, held_out=True, kind="single") for _ in range(count)]


def caption_of(scene: scenes.Scene) -> str:
    """Return a caption that states an object's colour, shape and background, and not its position."""
    [item] = scene.objects
    return f"a {item.colour} {item.shape} on a {scene.background} background"


def evaluate(
    folder: Path, network: ControlNetModel, count: int, steps: int, device: torch.device
) -> tuple[Score, list[Image.Image]]:
    """Score the ControlNet on held-out scenes. Returns the score, and pairs of a control image and its picture."""
    pipeline: Any = StableDiffusionXLControlNetPipeline.from_pretrained(
        folder, controlnet=network, add_watermarker=False
    )
    pipeline.to(device).set_progress_bar_config(disable=True)
    counts = {"placed": 0, "true": 0, "both": 0, "chance": 0}
    pictures: list[Image.Image] = []
    for number, scene in enumerate(held_out_scenes(count)):
        edges = Image.fromarray(scene_edges(scene).astype(np.uint8) * 255).convert("RGB")
        text = caption_of(scene)

        def generate(scale: float, text: str = text, edges: Image.Image = edges, seed: int = number) -> Image.Image:
            generator = torch.Generator("cpu").manual_seed(seed)
            [image] = pipeline(
                text, image=edges, controlnet_conditioning_scale=scale, num_inference_steps=steps, guidance_scale=3.0,
                generator=generator, height=SIDE, width=SIDE,
            ).images  # fmt: skip
            return image  # type: ignore[no-any-return]

        picture, without = generate(1.0), generate(0.0)
        placed, true = is_placed(picture, scene), score_image(picture, captions.parse_caption(text)).ok
        counts["placed"] += placed
        counts["true"] += true
        counts["both"] += placed and true
        counts["chance"] += is_placed(without, scene)
        pictures += [edges, picture]
    return Score(**{name: found / count for name, found in counts.items()}, scenes=count), pictures


def is_placed(image: Image.Image | np.ndarray, scene: scenes.Scene) -> bool:
    """True if the image has exactly one object, and this is where the scene has it."""
    _, objects = detect_objects(image)
    [item] = scene.objects
    return len(objects) == 1 and bool(np.hypot(objects[0].x - item.x, objects[0].y - item.y) <= MAX_OFFSET)


def write_sheet(pictures: list[Image.Image], path: Path) -> None:
    """Write rows of control images, each with the row of their pictures below."""
    controls, results = pictures[::2][: 2 * PICTURE_COLUMNS], pictures[1::2][: 2 * PICTURE_COLUMNS]
    rows = -(-len(controls) // PICTURE_COLUMNS)
    sheet = Image.new("RGB", (PICTURE_COLUMNS * SIDE // 2, rows * SIDE), "white")
    for number, pair in enumerate(zip(controls, results, strict=True)):
        row, column = divmod(number, PICTURE_COLUMNS)
        for below, picture in enumerate(pair):
            small = picture.resize((SIDE // 2, SIDE // 2), Image.Resampling.LANCZOS)
            sheet.paste(small, (column * SIDE // 2, row * SIDE + below * SIDE // 2))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def export(network: ControlNetModel, folder: Path, card: str) -> None:
    """Write config, fp16 weights and model card, in diffusers' layout."""
    folder.mkdir(parents=True, exist_ok=True)
    network.save_config(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.detach().cpu().half().contiguous() for name, tensor in network.state_dict().items()}
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors", METADATA)
    (folder / "README.md").write_text(card)


def model_card(score: Score, facts: dict[str, Any]) -> str:
    """Return the text of the model card."""
    return f"""# Tiny SDXL ControlNet (edges)

A ControlNet for [Tiny SDXL](../tiny-sdxl/README.md): the figure appears where the control image has its edges. For
tests and demos. The control image is white edges on black, as `preprocess: canny` makes it.

    .venv/bin/preheat build data/tiny-sdxl --controlnet edges=data/tiny-sdxl-controlnet

Trained by `python -m training.controlnet` on {facts["scenes"]:,} random scenes of {SIDE}x{SIDE} pixels:
{facts["steps"]:,} steps of {facts["batch"]} images in {facts["seconds"]:.0f} s on one {facts["device"]} (torch
{torch.__version__}, diffusers {diffusers.__version__}). UNet, text encoders and VAE did not change. Weights in fp16.
All data is drawn by `training/render.py`.

| {score.scenes} held-out scenes, {facts["sampling_steps"]} Euler steps, guidance 3 | share |
|---|---|
| the figure is within {MAX_OFFSET:g} of the side of where the edges have it | {score.placed:.0%} |
| the same without the ControlNet | {score.chance:.0%} |
| the picture has all that the caption states | {score.true:.0%} |
| both | {score.both:.0%} |

The captions state shape, colour and background, and not the position. No training scene has the combinations of shape,
colour and background.

Limits: edges of plain figures on a plain background only, and no other use.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=Path("data/tiny-sdxl"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scenes", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--seconds", type=float, default=420, help="the training ends after so many seconds")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--evaluate", type=int, default=100, help="number of held-out scenes")
    parser.add_argument("--sampling-steps", type=int, default=20)
    parser.add_argument("--pictures", type=Path, help="write a sheet of control images and pictures, a PNG")
    arguments = parser.parse_args()
    device, start = torch.device(arguments.device), time.monotonic()
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        made = list(pool.map(sample_example, range(arguments.scenes), chunksize=50))
    print(f"{len(made)} scenes in {time.monotonic() - start:.0f} s", flush=True)
    examples = Examples(made, arguments.model, device)
    begun = time.monotonic()
    network, steps, loss = train(
        arguments.model, examples, arguments.steps, arguments.batch, arguments.rate, arguments.seconds, device
    )
    seconds = time.monotonic() - begun
    score, pictures = evaluate(arguments.model, network, arguments.evaluate, arguments.sampling_steps, device)
    if arguments.pictures:
        write_sheet(pictures, arguments.pictures)
    facts: dict[str, Any] = {
        "scenes": arguments.scenes, "steps": steps, "batch": arguments.batch, "seconds": seconds, "loss": loss,
        "sampling_steps": arguments.sampling_steps,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
    }  # fmt: skip
    export(network, arguments.out, model_card(score, facts))
    print(json.dumps(facts | asdict(score)))


if __name__ == "__main__":
    main()
