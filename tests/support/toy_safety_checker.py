"""diffusers' safety checker with few channels and random weights, in the folders of Stable Diffusion 1.5."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker, cosine_distance
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessor

from model.images.pixels import Pixels
from tests.support.toy_sdxl import save_networks

NEVER = 2.0  # a threshold above every cosine
_SIDE = 224


def write(folder: Path, images: Sequence[Pixels], seed: int = 0) -> Path:
    """Write safety_checker/ and feature_extractor/ to `folder`. The checker flags half of the images. Returns `folder`.

    Only one concept flags images. Its threshold is between the cosines of the images.
    """
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": _SIDE, "patch_size": 32, "projection_dim": 16,
    }  # fmt: skip
    text = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    checker = StableDiffusionSafetyChecker(CLIPConfig(projection_dim=16, vision_config=vision, text_config=text))
    save_networks(folder, {"safety_checker": checker}, seed)
    CLIPImageProcessor().save_pretrained(folder / "feature_extractor")
    checker.special_care_embeds_weights.fill_(NEVER)
    checker.concept_embeds_weights.fill_(NEVER)
    cosines = scores(checker, images)[1] + NEVER
    ordered = np.sort(cosines, axis=0)
    gaps = ordered[len(images) // 2] - ordered[len(images) // 2 - 1]
    concept = int(gaps.argmax())
    assert gaps[concept] > 0.004, "the images differ too little for this checker"
    checker.concept_embeds_weights[concept] = float(ordered[len(images) // 2, concept] - gaps[concept] / 2)
    checker.save_pretrained(folder / "safety_checker")
    return folder


def read(folder: Path) -> StableDiffusionSafetyChecker:
    checker: StableDiffusionSafetyChecker = StableDiffusionSafetyChecker.from_pretrained(folder / "safety_checker")
    return checker.eval()


def clip_pixels(images: Sequence[Pixels]) -> torch.Tensor:
    """Return the images as transformers' processor prepares them: float32 [images, 3, 224, 224]."""
    prepared: torch.Tensor = CLIPImageProcessor()(list(map(Image.fromarray, images)), return_tensors="pt").pixel_values
    return prepared


@torch.no_grad()
def scores(checker: StableDiffusionSafetyChecker, images: Sequence[Pixels]) -> list[np.ndarray[Any, Any]]:
    """Return cosines less thresholds as diffusers computes them: of special concepts, and of the others."""
    embeds = checker.visual_projection(checker.vision_model(clip_pixels(images))[1])
    pairs = (
        (checker.special_care_embeds, checker.special_care_embeds_weights),
        (checker.concept_embeds, checker.concept_embeds_weights),
    )
    return [(cosine_distance(embeds, concepts) - thresholds).numpy() for concepts, thresholds in pairs]


def flagged(checker: StableDiffusionSafetyChecker, images: Sequence[Pixels]) -> list[bool]:
    """Return diffusers' decision for each image."""
    pictures = [image.astype(np.float32) for image in images]  # diffusers replaces flagged ones
    decisions: list[bool] = checker(clip_input=clip_pixels(images), images=pictures)[1]
    return decisions
