"""The smallest SDXL that diffusers runs: two UNet blocks of a few channels, random weights, a 2x VAE.

It generates noise, has all files that a build reads, and compiles in seconds.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOKENS = 77
VOCABULARY = 960  # of the copied tokenizer


def write(
    folder: Path, tokenizer: Path, seed: int = 0, timestep_cond: int | None = None, unet_channels: int = 4
) -> Path:
    """Write the toy in diffusers' layout, with two copies of `tokenizer` (a CLIP tokenizer folder). Returns `folder`.

    `unet_channels`: 4, or 9 for inpainting. `timestep_cond`: width of the embedded guidance scale of a distilled UNet.
    None: the UNet embeds no guidance scale.
    """
    from diffusers import AutoencoderKL, EulerDiscreteScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    vocabulary = json.loads((tokenizer / "vocab.json").read_text())
    text = CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        projection_dim=16,
        max_position_embeddings=TOKENS,
        bos_token_id=vocabulary["<|startoftext|>"],
        eos_token_id=vocabulary["<|endoftext|>"],
        pad_token_id=0,
    )
    networks = {
        "text_encoder": CLIPTextModel(text),
        "text_encoder_2": CLIPTextModelWithProjection(text),
        "unet": UNet2DConditionModel(
            sample_size=32,
            in_channels=unet_channels,
            block_out_channels=(8, 16),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=2,
            cross_attention_dim=32,
            norm_num_groups=4,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=16 + 6 * 8,
            time_cond_proj_dim=timestep_cond,
        ),
        "vae": AutoencoderKL(
            block_out_channels=(8, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=4,
            scaling_factor=0.5,
            force_upcast=False,
        ),
    }
    save_networks(folder, networks, seed)
    EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", timestep_spacing="leading", steps_offset=1
    ).save_pretrained(folder / "scheduler")
    _add_sampler_specific_keys(folder / "scheduler" / "scheduler_config.json")
    for name in ("tokenizer", "tokenizer_2"):
        shutil.copytree(tokenizer, folder / name)
    index = {
        "_class_name": "StableDiffusionXLPipeline",
        "force_zeros_for_empty_prompt": True,
        "scheduler": ["diffusers", "EulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def save_networks(folder: Path, networks: Mapping[str, Any], seed: int) -> None:
    """Write networks, subfolder -> network, with random weights."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, network in networks.items():
        with torch.no_grad():
            for key, parameter in network.named_parameters():
                # Also for parameters that start as zeros or ones: no tensor of a toy may equal a constant of an engine.
                mean = 1.0 if "norm" in key and key.endswith("weight") else 0.0
                # Large, so that guidance changes the image visibly.
                spread = 2.0 if "cond_proj" in key else 0.1
                parameter.copy_(mean + spread * torch.randn(parameter.shape, generator=generator))
        network.save_pretrained(folder / name)


def _add_sampler_specific_keys(config: Path) -> None:
    """Add keys of other samplers, which SDXL's own scheduler_config.json has too."""
    entries = json.loads(config.read_text()) | {"clip_sample": False, "set_alpha_to_one": False}
    config.write_text(json.dumps(entries))
