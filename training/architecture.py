"""Tiny SDXL's networks: SDXL's own classes and settings with small numbers.

The base follows stabilityai/stable-diffusion-xl-base-1.0 (two text encoders, text and time embedding, three UNet
levels, the first without attention); the refiner sees only the second text encoder and an aesthetic score.
"""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from training.tokenizer import END, LENGTH, START, vocabulary

WIDTH_1 = 96  # of text_encoder
WIDTH_2 = 128  # of text_encoder_2, and of its projection
TIME_WIDTH = 32  # of each embedded number of time_ids
LATENT_CHANNELS = 4
VAE_FACTOR = 8

# What SDXL's own scheduler_config.json says.
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
"""What a request that does not say gets of this model: its defaults.json."""


def _text_config(width: int, layers: int, heads: int, act: str, pad: str) -> CLIPTextConfig:
    vocab, _ = vocabulary()
    return CLIPTextConfig(
        vocab_size=len(vocab),
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=LENGTH,
        hidden_act=act,
        bos_token_id=vocab[START],
        eos_token_id=vocab[END],
        pad_token_id=vocab[pad],
    )


def text_encoder() -> CLIPTextModel:
    return CLIPTextModel(_text_config(WIDTH_1, layers=3, heads=3, act="quick_gelu", pad=END))


def text_encoder_2() -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(_text_config(WIDTH_2, layers=4, heads=4, act="gelu", pad="!"))


def vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 64, 64),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=256,
        scaling_factor=1.0,  # replaced by the measured one after training
        force_upcast=False,
    )


def _unet(channels: tuple[int, ...], heads: tuple[int, ...], layers: tuple[int, ...], text: int, ids: int) -> Any:
    return UNet2DConditionModel(
        sample_size=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=channels,
        layers_per_block=1,
        transformer_layers_per_block=layers,
        attention_head_dim=heads,  # diffusers' name for the number of heads
        cross_attention_dim=text,
        use_linear_projection=True,
        norm_num_groups=8,
        addition_embed_type="text_time",
        addition_time_embed_dim=TIME_WIDTH,
        projection_class_embeddings_input_dim=ids * TIME_WIDTH + WIDTH_2,
    )


def unet() -> UNet2DConditionModel:
    """time_ids: original height and width, crop top and left, target height and width."""
    return _unet((64, 96, 128), heads=(2, 3, 4), layers=(1, 1, 1), text=WIDTH_1 + WIDTH_2, ids=6)


def refiner_unet() -> UNet2DConditionModel:
    """time_ids: original height and width, crop top and left, aesthetic score."""
    return _unet((64, 96, 8), heads=(2, 3, 1), layers=(1, 1, 1), text=WIDTH_2, ids=5)
