"""Stable Diffusion 1 and 2: one text encoder, no pooled text and no sizes.

The text encoder is not SDXL's first one: the UNet reads another layer of it.
"""

from typing import TYPE_CHECKING

from model.engines import signatures
from model.pipeline.families.unet import IMAGE_COMPONENTS, unet_denoiser
from model.pipeline.spec import TEXT_ENCODER_FINAL, ComponentSpec, Denoiser, EncodeTexts, Family, table

if TYPE_CHECKING:
    import torch

_TEXT = ComponentSpec(
    TEXT_ENCODER_FINAL, "base", "text_encoder", "FinalTextNetwork", signatures.text_signature, "prompt", "text"
)


def _encode_prompt(denoiser: Denoiser, encode: EncodeTexts) -> "tuple[torch.Tensor, None]":
    [encoder] = denoiser.text_encoders
    return encode(*encoder)["hidden_states"], None


FAMILY = Family(
    name="sd",
    title="Stable Diffusion 1 or 2",
    pipelines=r"StableDiffusion(Img2Img|Inpaint)?Pipeline|LatentConsistencyModel(Img2Img)?Pipeline",
    components=table(_TEXT, *IMAGE_COMPONENTS),
    denoisers=(unet_denoiser("base", "", (TEXT_ENCODER_FINAL, "tokenizer")),),
    vae_scaling=0.18215,
    takes_sizes=False,
    encode_prompt=_encode_prompt,
    time_ids=lambda *_: ([], []),
    time_inputs=lambda *_: {},
)
