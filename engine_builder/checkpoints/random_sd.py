"""Write Stable Diffusion 1.5's real architecture with seeded random weights, for benchmarks without the public weights.

`python -m engine_builder.checkpoints.random_sd OUT`

The settings are those of stable-diffusion-v1-5/stable-diffusion-v1-5 on the Hugging Face Hub. The tokenizer is copied
from a small model, because a prompt's tokens do not change the time of an image. Images are noise.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from engine_builder.checkpoints import random_sdxl
from engine_builder.checkpoints.random_sdxl import Configs, save_networks

UNET: dict[str, Any] = {
    "sample_size": 64,
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    "block_out_channels": (320, 640, 1280, 1280),
    "attention_head_dim": 8,  # the number of heads
    "cross_attention_dim": 768,
}
CONFIGS: Configs = {
    "unet": UNET,
    "vae": random_sdxl.VAE | {"sample_size": 512, "scaling_factor": 0.18215},
    "text_encoder": random_sdxl.TEXT_ENCODER,
}
SCHEDULER: dict[str, Any] = {
    "_class_name": "PNDMScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "num_train_timesteps": 1000,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "trained_betas": None,
}
INDEX: dict[str, Any] = {
    "_class_name": "StableDiffusionPipeline",
    "feature_extractor": [None, None],
    "safety_checker": [None, None],
    "requires_safety_checker": False,
    "scheduler": ["diffusers", "PNDMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def write(folder: Path, tokenizer: Path, seed: int = 0, configs: Configs = CONFIGS) -> None:
    """Write the model in fp16. `tokenizer`: a folder to copy."""
    save_networks({name: folder / name for name in configs}, configs, seed)
    shutil.copytree(tokenizer, folder / "tokenizer", dirs_exist_ok=True)
    (folder / "scheduler").mkdir(exist_ok=True)
    for name, entries in (("scheduler/scheduler_config.json", SCHEDULER), ("model_index.json", INDEX)):
        (folder / name).write_text(json.dumps(entries, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("data/tiny-sdxl/tokenizer"), help="a tokenizer's folder to copy"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.out, arguments.tokenizer, arguments.seed)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
