"""Compare the tokenizers of a model with transformers', and two steps of the whole pipeline with diffusers'."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from engine_builder.building.compare_schedulers import diffusers_scheduler
from engine_builder.building.counterparts import Counterparts
from engine_builder.building.eager_model import eager_engines, open_eager_model, resolve_for
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.checkpoints.scheduler_config import read_scheduler
from model.denoising.sampler_specs import sampler_spec
from model.images.pixels import Pixels
from model.pipeline import spec as names
from model.pipeline.components import FAMILIES
from model.pipeline.params import GenerationParams, Mask
from model.pipeline.text_to_image import generate
from model.prompts.tokenizer import ClipTokenizer
from model.prompts.weighted_prompt import plain_chunks
from model.request_fields import GenerationRequest
from model.validation import SMALLEST_SIDE

TEXTS = 200
STEPS = 2
_PROMPT = "a large red circle on a blue background"
_WORDS = (
    "a", "photo", "of", "Portrait", "LIGHTHOUSE", "don't", "it's", "'S", "\u2019s", "3.14", "1024x1024", "8k,", "...",
    "!!", "?", "(best:1.2)", "<lora:x>", "under_score", "a_1", "hyphen-ated", "&amp;", '"quoted"', "#tag", "@user",
    "http://example.com/a?b=c", "supercalifragilisticexpialidocious", "<|endoftext|>", "<|startoftext|>",
    # Accents (composed and combining), scripts, emoji (also of several code points), ligatures, full width, fractions.
    "caf\u00e9", "cafe\u0301", "na\u00efve", "Stra\u00dfe", "\u00c5NGSTR\u00d6M", "\u6f22\u5b57", "\u043a\u043e\u0442",
    "\U0001f600", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\ufb01ne", "\uff46\uff55\uff4c\uff4c", "\u00bd",
    # Spaces: none, several, without width, not breaking.
    "\t", "\n", "  ", "\u200b", "\u00a0",
)  # fmt: skip


def texts() -> list[str]:
    """Return 200 texts: words, symbols and scripts in any order, from none to more than a prompt holds."""
    generator = random.Random(0)
    lengths = [0, 1, 1, 200, *(generator.randint(1, 90) for _ in range(TEXTS - 4))]
    return [generator.choice((" ", " ", ", ", "")).join(generator.choices(_WORDS, k=length)) for length in lengths]


def different_tokens(folder: Path, ours: ClipTokenizer) -> str | None:
    """Return the first text that a folder's tokenizer encodes unlike transformers'. None: all texts are equal."""
    from transformers import CLIPTokenizer

    compared = texts()
    library = CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)
    of_library = library(compared, padding="max_length", max_length=library.model_max_length, truncation=True).input_ids
    for text, ids in zip(compared, of_library, strict=True):
        if plain_chunks(ours, text).ids != [list(ids)]:
            return text
    return None


def largest_difference(pair: Counterparts, tokenizers: Mapping[str, ClipTokenizer]) -> int:
    """Return the largest difference of an image's levels from diffusers', of 255, at the smallest size in two steps."""
    plan = pair.plan
    size = max(checkpoint.size_step() for checkpoint in (plan.base, plan.refiner) if checkpoint is not None)
    side = -(-SMALLEST_SIDE // size) * size
    sampler = sampler_spec(read_scheduler(plan.base).sampler)
    paints = plan.base.unet_widths().extra_channels > 0
    # diffusers documents no refiner for a UNet for inpainting. The refiner's networks are compared in any case.
    refines = plan.refiner is not None and sampler.refinable and not paints
    request = GenerationRequest.model_validate(
        {
            "prompt": _PROMPT, "width": side, "height": side, "num_inference_steps": STEPS, "seed": 0,
            "scheduler": sampler.name, "guidance_scale": 1.5 if sampler.distilled else 5.0, "denoising_frac": 0.5,
            "use_refiner": refines,
        }
    )  # fmt: skip
    engines = eager_engines({name: pair.ours(name) for name in pair.of_image})
    model = open_eager_model(engines, plan.base, plan.refiner, tokenizers, pair.device)
    params = resolve_for(model, request)
    if paints:
        photo = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
        levels = np.zeros((side, side), np.uint8)
        levels[side // 4 : side // 2, side // 4 :] = 255
        params = replace(params, image=photo, masks=(Mask(levels, params.prompt, None, 1.0),))
    [ours] = generate(model, [params])[0]
    library = _library_image(pair, params)
    return int(np.abs(ours.astype(int) - library.astype(int)).max())


def _library_image(pair: Counterparts, params: GenerationParams) -> Pixels:
    import diffusers

    plan, is_sdxl = pair.plan, pair.plan.base.family == "sdxl"
    paints = bool(params.masks)
    denoisers, prefix = FAMILIES[plan.base.family].denoisers, "StableDiffusionXL" if is_sdxl else "StableDiffusion"
    base = _pipeline(
        pair, getattr(diffusers, f"{prefix}{'Inpaint' if paints else ''}Pipeline"), plan.base, denoisers[0]
    )
    shared: dict[str, Any] = {
        "prompt": params.prompt, "num_inference_steps": params.num_inference_steps,
        "generator": torch.Generator("cpu").manual_seed(params.seed), "guidance_scale": params.guidance_scale,
    }  # fmt: skip
    size: dict[str, Any] = {"width": params.width, "height": params.height}
    if paints:
        assert params.image is not None
        image, mask = Image.fromarray(params.image), Image.fromarray(params.masks[0].levels)
        shared |= {"strength": params.masks[0].strength}
        size |= {"image": image, "mask_image": mask}
    if not params.use_refiner:
        return _levels(base(**shared, **size, output_type="np").images)
    assert plan.refiner is not None
    refiner = _pipeline(pair, diffusers.StableDiffusionXLImg2ImgPipeline, plan.refiner, denoisers[1])
    frac = params.denoising_frac
    latents = base(**shared, **size, denoising_end=frac, output_type="latent").images
    return _levels(refiner(**shared, image=latents, denoising_start=frac, output_type="np").images)


def _pipeline(pair: Counterparts, kind: Any, checkpoint: Checkpoint, denoiser: names.Denoiser) -> Any:
    """Return a pipeline of the library's networks, with the sampler of a release's default."""
    from transformers import CLIPTokenizer

    plan = pair.plan
    parts: dict[str, Any] = {"text_encoder": None, "text_encoder_2": None, "tokenizer": None, "tokenizer_2": None}
    if plan.base.family == "sd":
        parts = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    else:
        settings = ("force_zeros_for_empty_prompt", "requires_aesthetics_score")
        parts |= {name: checkpoint.index[name] for name in settings if name in checkpoint.index}
        parts |= {"add_watermarker": False}
        if "Img2Img" not in kind.__name__ and "Inpaint" not in kind.__name__:
            parts.pop("requires_aesthetics_score", None)
    for component, tokenizer in denoiser.text_encoders:
        parts[FAMILIES[plan.base.family].components[component].checkpoint_folder] = pair.library(component)
        parts[tokenizer] = CLIPTokenizer.from_pretrained(str(plan.base.root / tokenizer), local_files_only=True)
    read = read_scheduler(plan.base)
    made = kind(
        **parts,
        vae=pair.library(names.VAE_DECODER),
        unet=pair.library(denoiser.unet),
        scheduler=diffusers_scheduler(read.config, read.schedule, read.sampler),
    )
    made.set_progress_bar_config(disable=True)
    return made


def _levels(images: Sequence[Any]) -> Pixels:
    return np.asarray((images[0] * 255).round().astype(np.uint8))
