"""The networks of Tiny SDXL: SDXL's own classes and settings with small numbers.

The base follows stabilityai/stable-diffusion-xl-base-1.0: two text encoders, text and time embedding, and three UNet
levels, the first without attention. The refiner's inputs are the second text encoder and an aesthetic score.
"""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from training.tokenizer import END_TOKEN, MAX_LENGTH, START_TOKEN, vocabulary

TEXT_WIDTH_1 = 96  # text_encoder
TEXT_WIDTH_2 = 128  # text_encoder_2 and its projection
TIME_ID_WIDTH = 32  # embedding of each number of time_ids
LATENT_CHANNELS = 4

# SDXL's own scheduler_config.json.
SCHEDULER: dict[str, Any] = {
    "_class_name": "EulerDiscreteScheduler",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "clip_sample": False,
    "interpolation_type": "linear",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
    "sample_max_value": 1.0,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "timestep_spacing": "leading",
    "trained_betas": None,
    "use_karras_sigmas": False,
}

DEFAULTS = {"denoising_frac": 0.9, "guidance_scale": 3.0}
"""The model's defaults.json: values for requests that do not set them."""


def _text_config(width: int, layers: int, heads: int, act: str, pad_token: str) -> CLIPTextConfig:
    vocab, _ = vocabulary()
    return CLIPTextConfig(
        vocab_size=len(vocab),
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=MAX_LENGTH,
        hidden_act=act,
        bos_token_id=vocab[START_TOKEN],
        eos_token_id=vocab[END_TOKEN],
        pad_token_id=vocab[pad_token],
    )


def text_encoder() -> CLIPTextModel:
    return CLIPTextModel(_text_config(TEXT_WIDTH_1, layers=3, heads=3, act="quick_gelu", pad_token=END_TOKEN))


def text_encoder_2() -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(_text_config(TEXT_WIDTH_2, layers=4, heads=4, act="gelu", pad_token="!"))


def vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 64, 64),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=256,
        scaling_factor=1.0,  # training replaces it with the measured factor
        force_upcast=False,
    )


def _unet(
    channels: tuple[int, ...], heads: tuple[int, ...], layers: tuple[int, ...], text_width: int, time_ids: int
) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=channels,
        layers_per_block=1,
        transformer_layers_per_block=layers,
        attention_head_dim=heads,  # diffusers' name for the number of heads
        cross_attention_dim=text_width,
        use_linear_projection=True,
        norm_num_groups=8,
        addition_embed_type="text_time",
        addition_time_embed_dim=TIME_ID_WIDTH,
        projection_class_embeddings_input_dim=time_ids * TIME_ID_WIDTH + TEXT_WIDTH_2,
    )


def unet() -> UNet2DConditionModel:
    """Build the base's UNet. time_ids: original height and width, crop top and left, target height and width."""
    return _unet((64, 96, 128), (2, 3, 4), (1, 1, 1), text_width=TEXT_WIDTH_1 + TEXT_WIDTH_2, time_ids=6)


def refiner_unet() -> UNet2DConditionModel:
    """Build the refiner's UNet. time_ids: original height and width, crop top and left, aesthetic score."""
    return _unet((64, 96, 8), (2, 3, 1), (1, 1, 1), text_width=TEXT_WIDTH_2, time_ids=5)
