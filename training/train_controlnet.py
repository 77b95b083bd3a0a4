"""Train a ControlNet for Tiny SDXL: edges -> picture. Then score it, and write it with its model card.

    python -m training.train_controlnet OUT [--seconds 480] [--device cuda]

The control image has the edges of a picture, as `preprocess: canny` finds them. The ControlNet starts as a copy of the
UNet's first half and learns to predict the noise, while the UNet, the text encoders and the VAE stay as they are.
Scenes are sampled and their edges found by worker processes before the training; the same scenes are then used many
times, each time with other noise.

The score is the share of held-out scenes whose object is where the edges have it. The captions state its shape and
colours, not its position. The same captions and seeds without the ControlNet show what chance gives.
"""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import ControlNetModel, StableDiffusionXLControlNetPipeline, UNet2DConditionModel
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from model.images.canny import canny
from training import conditioning
from training.conditioning import SIDE
from training.diffusion import DROPPED_SHARE, NoisedLatents
from training.optimizer import EmaOptimizer, compute_dtype
from training.pictures import captions, scenes
from training.pictures.dataset import encode_caption
from training.pictures.render import SCENE_VECTOR_LENGTH, render_scene, scene_vector
from training.pictures.score import detect_objects, score_image
from training.write_model import METADATA

EMBEDDING_CHANNELS = (16, 32, 64, 96)  # of the control image's embedding; each after the first halves the sides
SEED = 11
MAX_OFFSET = 0.06  # of the shorter side, between an object and its place in the control image
WORKERS = 14  # processes that make the scenes


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
        self.latents = conditioning.encode_scenes(vectors, folder)
        states, self.pooled = conditioning.encode_captions(ids, folder)
        self.states = states.half()

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
    dtype = compute_dtype(device)

    def loss(indices: Tensor, noised: NoisedLatents, generator: torch.Generator) -> Tensor:
        kept = torch.rand(batch, generator=generator, device=device) >= DROPPED_SHARE
        states = (examples.states[indices] * kept[:, None, None]).to(dtype)
        added = conditioning.added_conditions((examples.pooled[indices] * kept[:, None]).to(dtype))
        sample = noised.latents.to(dtype)
        down, middle = network(
            sample, noised.timesteps, states, examples.control(indices).to(dtype), added_cond_kwargs=added,
            return_dict=False,
        )  # fmt: skip
        [predicted] = unet(
            sample, noised.timesteps, states, added_cond_kwargs=added, return_dict=False,
            down_block_additional_residuals=down, mid_block_additional_residual=middle,
        )  # fmt: skip
        return conditioning.noise_error(predicted, noised)

    finished, last = conditioning.optimize(optimizer, examples.latents, batch, seconds, SEED, loss)
    return network.eval(), finished, last


def held_out_scenes(count: int) -> list[scenes.Scene]:
    """Return scenes of one object whose triple no training scene has."""
    rng = random.Random(conditioning.EVALUATION_SEED)
    return [scenes.sample_scene(rng, held_out=True, kind="single") for _ in range(count)]


def caption_of(scene: scenes.Scene) -> str:
    """Return a caption that states an object's colour, shape and background, and not its position."""
    [item] = scene.objects
    return f"a {item.colour} {item.shape} on a {scene.background} background"


def evaluate(folder: Path, network: ControlNetModel, count: int, steps: int, device: torch.device) -> Score:
    """Score the ControlNet on held-out scenes."""
    pipeline: Any = StableDiffusionXLControlNetPipeline.from_pretrained(
        folder, controlnet=network, add_watermarker=False
    )
    pipeline.to(device).set_progress_bar_config(disable=True)
    counts = {"placed": 0, "true": 0, "both": 0, "chance": 0}
    for number, scene in enumerate(held_out_scenes(count)):
        edges = Image.fromarray(scene_edges(scene).astype(np.uint8) * 255).convert("RGB")
        text = caption_of(scene)
        picture, without = (
            conditioning.generate(pipeline, text, number, steps, image=edges, controlnet_conditioning_scale=scale)
            for scale in (1.0, 0.0)
        )
        placed, true = is_placed(picture, scene), score_image(picture, captions.parse_caption(text)).ok
        counts["placed"] += placed
        counts["true"] += true
        counts["both"] += placed and true
        counts["chance"] += is_placed(without, scene)
    return Score(**{name: found / count for name, found in counts.items()}, scenes=count)


def is_placed(image: Image.Image | np.ndarray, scene: scenes.Scene) -> bool:
    """True if the image has exactly one object, and this is where the scene has it."""
    _, objects = detect_objects(image)
    [item] = scene.objects
    return len(objects) == 1 and bool(np.hypot(objects[0].x - item.x, objects[0].y - item.y) <= MAX_OFFSET)


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

Trained by `python -m training.train_controlnet` on {facts["examples"]:,} random scenes of {SIDE}x{SIDE} pixels:
{facts["steps"]:,} steps of {facts["batch"]} images in {facts["seconds"]:.0f} s on one {facts["device"]} (torch
{torch.__version__}, diffusers {diffusers.__version__}). UNet, text encoders and VAE did not change. Weights in fp16.
All data is drawn by `training/pictures/render.py`.

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


def train_and_score(out: Path, seconds: float, device: torch.device) -> tuple[Score, dict[str, Any]]:
    """Train a ControlNet, score it, and write it."""
    start = time.monotonic()
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        made = list(pool.map(sample_example, range(conditioning.EXAMPLES), chunksize=50))
    print(f"{len(made)} scenes in {time.monotonic() - start:.0f} s", flush=True)
    examples = Examples(made, conditioning.MODEL, device)
    begun = time.monotonic()
    network, steps, loss = train(
        conditioning.MODEL, examples, conditioning.STEPS, conditioning.BATCH, conditioning.RATE, seconds, device
    )
    facts = conditioning.facts_of(steps, loss, time.monotonic() - begun, device)
    score = evaluate(conditioning.MODEL, network, conditioning.EVALUATED, conditioning.SAMPLING_STEPS, device)
    export(network, out, model_card(score, facts))
    return score, facts


if __name__ == "__main__":
    conditioning.run(__doc__, train_and_score)
