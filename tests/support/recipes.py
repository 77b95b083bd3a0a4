"""Small models with the sizes of diffusers' own pipeline tests: odd widths, one group of channels, a VAE of two levels.

Facts from huggingface/diffusers, tests/pipelines: stable_diffusion, stable_diffusion_2, stable_diffusion_xl and
controlnet.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.toy_sdxl import save_networks

_SCHEDULER = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
_SDXL_UNET = {
    "attention_head_dim": (2, 4), "use_linear_projection": True, "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8, "transformer_layers_per_block": (1, 2), "projection_class_embeddings_input_dim": 80,
    "cross_attention_dim": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """A model's pipeline class, and what differs from the common settings of its networks and its scheduler."""

    pipeline: str
    unet: Mapping[str, Any] = field(default_factory=dict)
    vae: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    scheduler: str = "EulerDiscreteScheduler"
    settings: Mapping[str, Any] = field(default_factory=dict)
    controlnet: Mapping[str, Any] | None = None


RECIPES: dict[str, Recipe] = {
    "sdxl": Recipe("StableDiffusionXLPipeline", {"block_out_channels": (2, 4), "norm_num_groups": 1}),
    "sdxl without attention in the middle": Recipe(
        "StableDiffusionXLPipeline",
        {
            "block_out_channels": (32, 64), "mid_block_type": "UNetMidBlock2D",
            "transformer_layers_per_block": (1, (2, 2)), "reverse_transformer_layers_per_block": ((1, 2, 1), 1),
        },
    ),
    "sdxl lcm": Recipe(
        "StableDiffusionXLPipeline", {"block_out_channels": (2, 4), "norm_num_groups": 1, "time_cond_proj_dim": 256},
        scheduler="LCMScheduler",
    ),
    "sdxl inpaint": Recipe("StableDiffusionXLInpaintPipeline", {"block_out_channels": (32, 64), "in_channels": 9}),
    "sdxl controlnet": Recipe("StableDiffusionXLPipeline", {"block_out_channels": (32, 64)}, controlnet={}),
    "sdxl controlnet without attention": Recipe(
        "StableDiffusionXLPipeline", {"block_out_channels": (32, 64)},
        controlnet={"mid_block_type": "UNetMidBlock2D", "down_block_types": ("DownBlock2D", "DownBlock2D")},
    ),
    "sd": Recipe(
        "StableDiffusionPipeline", {"block_out_channels": (4, 8), "norm_num_groups": 2}, {"norm_num_groups": 2},
        scheduler="DDIMScheduler", settings={"clip_sample": False, "set_alpha_to_one": False},
    ),
    "sd lcm": Recipe(
        "StableDiffusionPipeline", {"block_out_channels": (4, 8), "norm_num_groups": 1, "time_cond_proj_dim": 256},
        scheduler="LCMScheduler",
    ),
    "sd 2": Recipe(
        "StableDiffusionPipeline",
        {
            "block_out_channels": (4, 8), "norm_num_groups": 2, "attention_head_dim": (2, 4),
            "use_linear_projection": True,
        },
        text={"hidden_act": "gelu", "projection_dim": 512}, scheduler="DDIMScheduler",
        settings={"clip_sample": False, "set_alpha_to_one": False},
    ),
    "sd 2 v-prediction": Recipe(
        "StableDiffusionPipeline",
        {"block_out_channels": (32, 64), "attention_head_dim": (2, 4), "use_linear_projection": True},
        text={"hidden_act": "gelu", "projection_dim": 64}, scheduler="DDIMScheduler",
        settings={"clip_sample": False, "set_alpha_to_one": False, "prediction_type": "v_prediction"},
    ),
    "sd inpaint": Recipe("StableDiffusionInpaintPipeline", {"block_out_channels": (32, 64), "in_channels": 9}),
    "sd controlnet": Recipe(
        "StableDiffusionPipeline", {"block_out_channels": (4, 8), "norm_num_groups": 1},
        scheduler="DDIMScheduler", settings={"clip_sample": False, "set_alpha_to_one": False},
        controlnet={"norm_num_groups": 1},
    ),
}  # fmt: skip


def write(folder: Path, recipe: Recipe, tokenizer: Path, seed: int = 0) -> Path:
    """Write a model in diffusers' layout, and its ControlNet to `folder/controlnet`. Returns `folder`."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    is_sdxl = "XL" in recipe.pipeline
    blocks: dict[str, Any] = {
        "layers_per_block": 2, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": 32,
        **(_SDXL_UNET if is_sdxl else {}),
    }  # fmt: skip
    unet = blocks | {"sample_size": 32, "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), **recipe.unet}
    vae = {
        "block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2, "scaling_factor": 0.13025 if is_sdxl else 0.18215, **recipe.vae,
    }  # fmt: skip
    vocabulary = json.loads((tokenizer / "vocab.json").read_text())
    text = CLIPTextConfig(
        bos_token_id=0, eos_token_id=2, hidden_size=32, intermediate_size=37, num_attention_heads=4,
        num_hidden_layers=5, pad_token_id=1, vocab_size=max(1000, len(vocabulary)),
        **({"hidden_act": "gelu", "projection_dim": 32} | dict(recipe.text) if is_sdxl else recipe.text),
    )  # fmt: skip
    networks: dict[str, Any] = {
        "text_encoder": CLIPTextModel(text),
        **({"text_encoder_2": CLIPTextModelWithProjection(text)} if is_sdxl else {}),
        "unet": diffusers.UNet2DConditionModel(**unet),
        "vae": diffusers.AutoencoderKL(**vae),
    }
    if recipe.controlnet is not None:
        networks["controlnet"] = diffusers.ControlNetModel(
            **blocks | {"block_out_channels": recipe.unet["block_out_channels"],
                        "conditioning_embedding_out_channels": (16, 32), **recipe.controlnet},
        )  # fmt: skip
    save_networks(folder, networks, seed)
    scheduler: Any = getattr(diffusers, recipe.scheduler)
    scheduler(**_SCHEDULER, steps_offset=1, **recipe.settings).save_pretrained(folder / "scheduler")
    names = ["tokenizer", "tokenizer_2"] if is_sdxl else ["tokenizer"]
    for name in names:
        shutil.copytree(tokenizer, folder / name)
    index: dict[str, Any] = {name: ["diffusers", type(network).__name__] for name, network in networks.items()}
    index |= {name: ["transformers", type(networks[name]).__name__] for name in networks if name.startswith("text")}
    index |= {"scheduler": ["diffusers", recipe.scheduler], "_class_name": recipe.pipeline}
    index |= {name: ["transformers", "CLIPTokenizer"] for name in names}
    index.pop("controlnet", None)
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
