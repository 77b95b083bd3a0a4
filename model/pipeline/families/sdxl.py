"""Stable Diffusion XL: two text encoders, whose hidden states are concatenated, pooled text, sizes, and a refiner."""

from typing import TYPE_CHECKING

from model.engines import signatures
from model.engines.signatures import TEXT_EMBEDS, TIME_IDS
from model.pipeline.families.unet import IMAGE_COMPONENTS, unet_components, unet_denoiser
from model.pipeline.spec import (
    REFINER_TEXT_ENCODER_2,
    TEXT_ENCODER,
    TEXT_ENCODER_2,
    ComponentSpec,
    Denoiser,
    EncodeTexts,
    Family,
    Pair,
    TimeIds,
    table,
)
from model.store.manifest import ModelFacts, RefinerFacts

if TYPE_CHECKING:
    import torch

_AESTHETIC_SCORE, _NEGATIVE_AESTHETIC_SCORE = 6.0, 2.5  # diffusers' defaults for the refiner

_COMPONENTS = table(
    ComponentSpec(
        TEXT_ENCODER, "base", "text_encoder", "TextNetwork", signatures.text_signature, "prompt", "text", "first_text"
    ),
    ComponentSpec(
        TEXT_ENCODER_2, "base", "text_encoder_2", "PooledTextNetwork", signatures.pooled_text_signature, "prompt",
        "text",
    ),
    *IMAGE_COMPONENTS,
    ComponentSpec(
        REFINER_TEXT_ENCODER_2, "refiner", "text_encoder_2", "PooledTextNetwork", signatures.pooled_text_signature,
        "prompt", "text", same_as=TEXT_ENCODER_2,
    ),
    *unet_components("refiner", "refiner_"),
)  # fmt: skip


def _encode_prompt(denoiser: Denoiser, encode: EncodeTexts) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return the hidden states of all text encoders, concatenated along their width, and the last one's pooled text."""
    import torch  # what selects engines reads this module before torch is imported

    *others, last = denoiser.text_encoders
    # The last encoder is by far the largest, so it is queued first and runs while the others are queued.
    encoded = encode(*last)
    hidden = encoded["hidden_states"]
    states = [encode(*encoder)["hidden_states"].to(hidden.dtype) for encoder in others]
    return torch.cat([*states, hidden], dim=-1), encoded["pooled"]


def _time_ids(original: Pair, crop: Pair, target: Pair, facts: ModelFacts | RefinerFacts) -> TimeIds:
    """Return the sizes and the crop. Some refiners take an aesthetic score in place of the target size."""
    if isinstance(facts, RefinerFacts) and facts.requires_aesthetics_score:
        # diffusers' default: the negative prompt has the original size and no crop.
        return [*original, *crop, _AESTHETIC_SCORE], [*original, 0, 0, _NEGATIVE_AESTHETIC_SCORE]
    own: list[float] = [*original, *crop, *target]
    return own, own


def _time_inputs(pooled: "torch.Tensor", time_ids: "torch.Tensor") -> "dict[str, torch.Tensor]":
    return {TEXT_EMBEDS: pooled, TIME_IDS: time_ids}


FAMILY = Family(
    name="sdxl",
    title="Stable Diffusion XL",
    pipelines=r"(StableDiffusionXL|SDXL)\w*Pipeline",
    components=_COMPONENTS,
    denoisers=(
        unet_denoiser("base", "", (TEXT_ENCODER, "tokenizer"), (TEXT_ENCODER_2, "tokenizer_2")),
        unet_denoiser("refiner", "refiner_", (REFINER_TEXT_ENCODER_2, "tokenizer_2")),
    ),
    vae_scaling=0.13025,
    takes_sizes=True,
    encode_prompt=_encode_prompt,
    time_ids=_time_ids,
    time_inputs=_time_inputs,
)
