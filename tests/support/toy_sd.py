"""Stable Diffusion 1.5 and 2.1 with few channels and random weights, in the form of the folders on the Hub.

Both have the four levels of the real UNets and VAEs. What differs between 1.5 and 2.1 is as in the real ones:
projections and heads of the UNet, the text encoder's activation, the padding of prompts, the prediction and the
scheduler. Configurations have no entries that are newer than the real folders.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

from tests.support.toy_sdxl import TOKENS, save_networks

Version = Literal["1.5", "2.1"]
SIDE = 256  # pixels, of the native size
_BOTH: dict[str, Any] = {
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "clip_sample": False,
    "num_train_timesteps": 1000,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "trained_betas": None,
}
SCHEDULERS: dict[Version, dict[str, Any]] = {
    "1.5": {"_class_name": "PNDMScheduler", "_diffusers_version": "0.6.0"} | _BOTH,
    "2.1": {"_class_name": "DDIMScheduler", "_diffusers_version": "0.8.0", "prediction_type": "v_prediction"} | _BOTH,
}
_NEWER_VAE_ENTRIES = ("scaling_factor", "force_upcast", "latents_mean", "latents_std", "shift_factor")


def write(folder: Path, tokenizer: Path, version: Version, seed: int = 0, channels: int = 4) -> Path:
    """Write the toy of a version in diffusers' layout, with a copy of `tokenizer`. Returns `folder`.

    `channels`: the UNet's input channels, 9 for inpainting.
    """
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    vocabulary = json.loads((tokenizer / "vocab.json").read_text())
    is_first = version == "1.5"
    width = 32 if is_first else 48
    text = CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=width,
        hidden_act="quick_gelu" if is_first else "gelu",
        max_position_embeddings=TOKENS,
        bos_token_id=vocabulary["<|startoftext|>"],
        eos_token_id=vocabulary["<|endoftext|>"],
    )
    networks = {
        "text_encoder": CLIPTextModel(text),
        "unet": UNet2DConditionModel(
            sample_size=SIDE // 8,
            in_channels=channels,
            block_out_channels=(16, 32, 32, 32),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
            up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
            attention_head_dim=8 if is_first else (2, 4, 4, 4),  # the number of heads
            cross_attention_dim=width,
            norm_num_groups=4,
            use_linear_projection=not is_first,
        ),
        "vae": AutoencoderKL(
            block_out_channels=(8, 8, 8, 8),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            norm_num_groups=4,
        ),
    }
    save_networks(folder, networks, seed)
    vae = folder / "vae" / "config.json"
    entries = {key: value for key, value in json.loads(vae.read_text()).items() if key not in _NEWER_VAE_ENTRIES}
    vae.write_text(json.dumps(entries))
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULERS[version]))
    shutil.copytree(tokenizer, folder / "tokenizer")
    index = {
        "_class_name": "StableDiffusionPipeline",
        "feature_extractor": [None, None],
        "safety_checker": [None, None],
        "requires_safety_checker": False,
        "scheduler": ["diffusers", SCHEDULERS[version]["_class_name"]],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
