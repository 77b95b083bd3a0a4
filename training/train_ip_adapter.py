"""Train an IP-Adapter for Tiny SDXL with its CLIP image encoder: the figure gets the colour of a reference image's.

    python -m training.train_ip_adapter OUT [--seconds 420] [--device cuda]

A reference image has one figure of the target's colour, of any shape, size and place, on any other background. The
caption states shape and background of the target, and no colour. The UNet, the text encoders and the VAE stay as they
are. The encoder learns from the noise's error and from a head that classifies the figure's colour, which is not
exported. Keys and values of the adapter start as copies of the UNet's.

OUT gets colour.safetensors in the form of h94/IP-Adapter, the folder image_encoder, and a model card. The score is the
share of held-out references whose colour the picture has. The written files are scored. The same captions and seeds
without the adapter show what chance gives.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from training import conditioning
from training.autoencoder import render_images
from training.conditioning import SIDE
from training.diffusion import DROPPED_SHARE, NoisedLatents
from training.optimizer import EmaOptimizer, compute_dtype
from training.pictures import scenes
from training.pictures.captions import StatedObject, Statement
from training.pictures.dataset import encode_caption
from training.pictures.render import render_scene, scene_vector
from training.pictures.score import detect_objects, score_image
from training.write_model import METADATA

SEED = 13
TOKENS = 4  # of an image; diffusers has the same constant for plain adapters
FILE = "colour.safetensors"
COLOUR_WEIGHT = 0.1  # of the head's loss
ENCODER: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 8,
    "image_size": 64, "projection_dim": 64, "hidden_act": "gelu",
}  # fmt: skip
# Of CLIP's training images, in [0, 1]: transformers' OPENAI_CLIP_MEAN and OPENAI_CLIP_STD.
MEAN, DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_COLOURS = list(scenes.COLOURS)


@dataclass(frozen=True)
class Example:
    """A target scene and a reference scene as vectors, the caption's token ids, and the number of the colour."""

    vector: list[float]
    reference: list[float]
    ids: list[int]
    colour: int


@dataclass(frozen=True)
class Score:
    """Shares of the evaluated references: with the colour, with shape and background of the caption, and with both.

    `chance`: the first share without the adapter.
    """

    colour: float
    caption: float
    both: float
    chance: float
    references: int


def sample_example(number: int) -> Example:
    """Return the training example of a number. Equal numbers give equal examples."""
    rng = random.Random(f"{SEED}/{number}")
    target = scenes.sample_scene(rng, kind="single")
    [item] = target.objects
    reference = scenes.sample_scene(rng, kind="single")
    while reference.objects[0].colour != item.colour:
        reference = scenes.sample_scene(rng, kind="single")
    ids = encode_caption(caption_of(item.shape, target.background))
    return Example(scene_vector(target, rng), scene_vector(reference, rng), ids, _COLOURS.index(item.colour))


def caption_of(shape: str, background: str) -> str:
    """Return a caption that states no colour of the figure."""
    return f"a {shape} on a {background} background"


def reference_pixels(vectors: Tensor) -> Tensor:
    """Return the normalized pixels of reference scenes, float32 [batch, 3, side, side]."""
    pixels = render_images(vectors, (SIDE, SIDE)) / 2 + 0.5
    side = ENCODER["image_size"]
    pixels = F.interpolate(pixels.contiguous(), (side, side), mode="bicubic", antialias=True).clamp(0, 1)
    mean, deviation = (torch.tensor(values, device=pixels.device)[:, None, None] for values in (MEAN, DEVIATION))
    return (pixels - mean) / deviation


class Examples:
    """Encoded examples on a device, from which batches are sampled."""

    def __init__(self, examples: list[Example], folder: Path, device: torch.device) -> None:
        vectors = torch.tensor([example.vector for example in examples], device=device)
        self.references = torch.tensor([example.reference for example in examples], device=device)
        self.colours = torch.tensor([example.colour for example in examples], device=device)
        # There are few captions: of each shape and background.
        captions = sorted({tuple(example.ids) for example in examples})
        self.captions = torch.tensor([captions.index(tuple(example.ids)) for example in examples], device=device)
        self.states, self.pooled = conditioning.encode_captions(torch.tensor(captions, device=device), folder)
        self.latents = conditioning.encode_scenes(vectors, folder)


class IpAdapter:
    """A UNet with an adapter, and the parts that are trained: image encoder, projection, keys and values, and head."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        torch.manual_seed(SEED)
        self.unet: Any = UNet2DConditionModel.from_pretrained(folder / "unet")
        self.unet.requires_grad_(False)
        context, width = self.unet.config.cross_attention_dim, ENCODER["projection_dim"]
        projection = nn.Linear(width, TOKENS * context)
        of_projection = {f"proj.{name}": tensor for name, tensor in projection.state_dict().items()}
        of_projection |= {"norm.weight": torch.ones(context), "norm.bias": torch.zeros(context)}
        keys_values = {}
        for number, name in self._numbered():
            attention = self.unet.get_submodule(name.removesuffix(".processor"))
            for part in ("to_k", "to_v"):
                keys_values[f"{number}.{part}_ip.weight"] = getattr(attention, part).weight.clone()
        self.unet._load_ip_adapter_weights([{"image_proj": of_projection, "ip_adapter": keys_values}])
        nn.Module.to(self.unet, device, compute_dtype(device))
        self.encoder: Any = CLIPVisionModelWithProjection(CLIPVisionConfig(**ENCODER)).to(device)
        self.head = nn.Linear(width, len(_COLOURS)).to(device)
        self.projection = self.unet.encoder_hid_proj.image_projection_layers[0]
        processors = [self.unet.attn_processors[name] for _, name in self._numbered()]
        self.trained = nn.ModuleDict(
            {
                "encoder": self.encoder,
                "head": self.head,
                "projection": self.projection,
                "processors": nn.ModuleList(processors),
            }
        ).requires_grad_(True)
        self.trained.float()

    def _numbered(self) -> list[tuple[int, str]]:
        """Return the number that a file has for each cross-attention, and the name of its processor."""
        names = [name for name in self.unet.attn_processors if not name.endswith("attn1.processor")]
        return [(1 + 2 * index, name) for index, name in enumerate(names)]

    def tensors(self) -> dict[str, Tensor]:
        """Return the adapter's tensors by their names in a file, in fp16."""
        named = {
            f"image_proj.{name.replace('image_embeds', 'proj')}": tensor
            for name, tensor in self.projection.state_dict().items()
        }
        for number, name in self._numbered():
            processor = self.unet.attn_processors[name]
            for part in ("to_k_ip", "to_v_ip"):
                named[f"ip_adapter.{number}.{part}.weight"] = getattr(processor, part)[0].weight
        return {name: tensor.detach().cpu().half().contiguous() for name, tensor in named.items()}


def train(
    adapter: IpAdapter, examples: Examples, steps: int, batch: int, rate: float, seconds: float, device: torch.device
) -> tuple[int, float]:
    """Train for `steps`, or until `seconds` are over. Returns the finished steps and the last loss."""
    dtype = compute_dtype(device)

    def loss(indices: Tensor, noised: NoisedLatents, generator: torch.Generator) -> Tensor:
        kept = torch.rand(2, batch, generator=generator, device=device) >= DROPPED_SHARE
        of_text = examples.captions[indices]
        states = (examples.states[of_text] * kept[0, :, None, None]).to(dtype)
        pooled = (examples.pooled[of_text] * kept[0, :, None]).to(dtype)
        embeds = adapter.encoder(reference_pixels(examples.references[indices]).to(dtype)).image_embeds
        colour = F.cross_entropy(adapter.head(embeds).float(), examples.colours[indices])
        added = conditioning.added_conditions(pooled) | {"image_embeds": [(embeds * kept[1, :, None])[:, None]]}
        [predicted] = adapter.unet(
            noised.latents.to(dtype), noised.timesteps, states, added_cond_kwargs=added, return_dict=False
        )
        return conditioning.noise_error(predicted, noised) + COLOUR_WEIGHT * colour

    optimizer = EmaOptimizer(adapter.trained, steps, rate)
    return conditioning.optimize(optimizer, examples.latents, batch, seconds, SEED, loss)


def export(adapter: IpAdapter, folder: Path) -> None:
    """Write the adapter and its image encoder in fp16."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(adapter.tensors(), folder / FILE, METADATA)
    encoder = CLIPVisionModelWithProjection(CLIPVisionConfig(**ENCODER))
    encoder.load_state_dict(adapter.encoder.state_dict())
    encoder.half().save_pretrained(folder / "image_encoder")


@dataclass(frozen=True)
class Case:
    """A held-out reference, and shape and background of the picture that follows its colour."""

    reference: scenes.Scene
    shape: str
    background: str

    @property
    def statement(self) -> Statement:
        """What the picture must show."""
        return Statement((StatedObject(self.shape, self.reference.objects[0].colour),), self.background)


def held_out_cases(count: int) -> list[Case]:
    """Return references of one object whose triple no training scene has."""
    rng = random.Random(conditioning.EVALUATION_SEED)
    cases = []
    for _ in range(count):
        reference = scenes.sample_scene(rng, held_out=True, kind="single")
        others = [colour for colour in scenes.COLOURS if colour != reference.objects[0].colour]
        cases.append(Case(reference, rng.choice(scenes.SHAPES), rng.choice(others)))
    return cases


def evaluate(model: Path, folder: Path, count: int, steps: int, device: torch.device) -> Score:
    """Score the files of a folder on held-out references."""
    pipeline: Any = StableDiffusionXLPipeline.from_pretrained(model, add_watermarker=False)
    pipeline.load_ip_adapter(str(folder), subfolder="", weight_name=FILE, image_encoder_folder="image_encoder")
    pipeline.to(device).set_progress_bar_config(disable=True)
    counts = {"colour": 0, "caption": 0, "both": 0, "chance": 0}
    for number, case in enumerate(held_out_cases(count)):
        reference = Image.fromarray(render_scene(case.reference, SIDE, SIDE))
        made = []
        for scale in (1.0, 0.0):
            pipeline.set_ip_adapter_scale(scale)
            text = caption_of(case.shape, case.background)
            made.append(conditioning.generate(pipeline, text, number, steps, ip_adapter_image=reference))
        colour = case.reference.objects[0].colour
        counts["colour"] += has_colour(made[0], colour)
        counts["caption"] += follows_caption(made[0], case)
        counts["both"] += score_image(made[0], case.statement).ok
        counts["chance"] += has_colour(made[1], colour)
    return Score(**{name: found / count for name, found in counts.items()}, references=count)


def has_colour(image: Image.Image | np.ndarray, colour: str) -> bool:
    """True if an image has exactly one object, and this has the colour."""
    _, objects = detect_objects(image)
    return [item.colour for item in objects] == [colour]


def follows_caption(image: Image.Image | np.ndarray, case: Case) -> bool:
    """True if an image has exactly one object of the caption's shape on the caption's background."""
    background, objects = detect_objects(image)
    return background == case.background and [item.shape for item in objects] == [case.shape]


def model_card(score: Score, facts: dict[str, Any]) -> str:
    """Return the text of the model card."""
    return f"""# Tiny SDXL IP-Adapter (colour)

An IP-Adapter for [Tiny SDXL](../tiny-sdxl/README.md), with its CLIP image encoder: the figure gets the colour of the
figure in a reference image. For tests and demos. The caption states shape and background, and no colour.

    .venv/bin/preheat build data/tiny-sdxl --ip-adapter colour=data/tiny-sdxl-ip-adapter/{FILE}

Trained by `python -m training.train_ip_adapter` on {facts["examples"]:,} pairs of random scenes
of {SIDE}x{SIDE} pixels: {facts["steps"]:,} steps of {facts["batch"]} images in {facts["seconds"]:.0f} s on one
{facts["device"]} (torch {torch.__version__}, diffusers {diffusers.__version__}). UNet, text encoders and VAE did not
change. Weights in fp16. All data is drawn by `training/pictures/render.py`.

| {score.references} held-out references, {facts["sampling_steps"]} Euler steps, guidance 3, scale 1 | share |
|---|---|
| the figure has the reference's colour | {score.colour:.0%} |
| the same without the adapter | {score.chance:.0%} |
| the picture has the caption's shape and background | {score.caption:.0%} |
| both | {score.both:.0%} |

No training scene has the references' combinations of shape, colour and background.

Limits: one plain figure on a plain background, one of eight colours, and no other use.
"""


def train_and_score(out: Path, seconds: float, device: torch.device) -> tuple[Score, dict[str, Any]]:
    """Train an IP-Adapter, write it, and score the written files."""
    examples = Examples([sample_example(number) for number in range(conditioning.EXAMPLES)], conditioning.MODEL, device)
    begun = time.monotonic()
    adapter = IpAdapter(conditioning.MODEL, device)
    steps, loss = train(adapter, examples, conditioning.STEPS, conditioning.BATCH, conditioning.RATE, seconds, device)
    facts = conditioning.facts_of(steps, loss, time.monotonic() - begun, device)
    export(adapter, out)
    score = evaluate(conditioning.MODEL, out, conditioning.EVALUATED, conditioning.SAMPLING_STEPS, device)
    (out / "README.md").write_text(model_card(score, facts))
    return score, facts


if __name__ == "__main__":
    conditioning.run(__doc__, train_and_score)
