"""Write SDXL's real architecture with seeded random weights, for benchmarks without the public weights.

`python -m engine_builder.checkpoints.random_sdxl OUT [--refiner]`

The settings are those of stabilityai/stable-diffusion-xl-base-1.0 and -refiner-1.0 on the Hugging Face Hub. Tokenizers
are copied from a small model, because a prompt's tokens do not change the time of an image. Images are noise. The VAE
has no force_upcast, like those made for fp16 (madebyollin/sdxl-vae-fp16-fix), so an fp16 build has it in fp16.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

UNET: dict[str, Any] = {
    "sample_size": 128,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (320, 640, 1280),
    "attention_head_dim": (5, 10, 20),
    "transformer_layers_per_block": (1, 2, 10),
    "cross_attention_dim": 2048,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "use_linear_projection": True,
}
REFINER_UNET: dict[str, Any] = UNET | {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (384, 768, 1536, 1536),
    "attention_head_dim": (6, 12, 24, 24),
    "transformer_layers_per_block": 4,
    "cross_attention_dim": 1280,
    "projection_class_embeddings_input_dim": 2560,
}
VAE: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 4,
    "norm_num_groups": 32,
    "sample_size": 1024,
    "scaling_factor": 0.13025,
    "force_upcast": False,
}
TEXT_ENCODER: dict[str, Any] = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "quick_gelu",
    "projection_dim": 768,
}
TEXT_ENCODER_2: dict[str, Any] = TEXT_ENCODER | {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "hidden_act": "gelu",
    "projection_dim": 1280,
}


Configs = Mapping[str, dict[str, Any]]
CONFIGS: Configs = {
    "unet": UNET,
    "refiner_unet": REFINER_UNET,
    "vae": VAE,
    "text_encoder": TEXT_ENCODER,
    "text_encoder_2": TEXT_ENCODER_2,
}
"""Network -> its config: UNets, AutoencoderKL, CLIP ViT-L's text encoder, OpenCLIP bigG's."""


def make_network(name: str, configs: Configs = CONFIGS) -> Any:
    """Make a network of `configs` on the current default device and dtype."""
    import diffusers
    import transformers

    network_class: Any
    match name:
        case "text_encoder":
            network_class = transformers.CLIPTextModel
        case "text_encoder_2":
            network_class = transformers.CLIPTextModelWithProjection
        case "vae":
            network_class = diffusers.AutoencoderKL
        case _:
            network_class = diffusers.UNet2DConditionModel
    config = configs[name]
    if name.startswith("text_encoder"):
        return network_class(transformers.CLIPTextConfig(**config))
    return network_class(**config)


def write(folder: Path, tokenizers: Path, refiner: bool = False, seed: int = 0, configs: Configs = CONFIGS) -> None:
    """Write the base in fp16, and with `refiner` also the refiner, to `folder/refiner`.

    `tokenizers`: a model folder to copy tokenizers from.
    """
    networks = {name: folder / name for name in ("unet", "vae", "text_encoder", "text_encoder_2")}
    if refiner:
        networks["refiner_unet"] = folder / "refiner" / "unet"
    save_networks(networks, configs, seed)
    for name in ("scheduler", "tokenizer", "tokenizer_2", "model_index.json"):
        _copy(tokenizers / name, folder / name)
    if refiner:
        for name in ("scheduler", "tokenizer_2", "model_index.json"):
            _copy(tokenizers / "refiner" / name, folder / "refiner" / name)
        for name in ("vae", "text_encoder_2"):
            (folder / "refiner" / name).unlink(missing_ok=True)
            (folder / "refiner" / name).symlink_to(folder.resolve() / name, target_is_directory=True)


def save_networks(folders: Mapping[str, Path], configs: Configs, seed: int) -> None:
    """Write networks of `configs` in fp16, by name, each to its folder."""
    torch.manual_seed(seed)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            for name, folder in folders.items():
                make_network(name, configs).eval().save_pretrained(folder, max_shard_size="20GB")
    finally:
        torch.set_default_dtype(default_dtype)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(json.loads(source.read_text()), indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--refiner", action="store_true", help="also write the refiner, to OUT/refiner")
    parser.add_argument(
        "--tokenizers", type=Path, default=Path("data/tiny-sdxl"), help="a model folder to copy tokenizers from"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.out, arguments.tokenizers, arguments.refiner, arguments.seed)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
