"""Writes the model in diffusers' layout: the base, and in its folder `refiner/` the refiner.

The refiner's `text_encoder_2` and `vae` are byte-identical copies of the base's.
`python -m training.export --random DIR` writes an untrained model of the same architecture.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import diffusers
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import save_file
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from training import architecture, tokenizer

SHARED = ("scheduler", "text_encoder_2", "tokenizer_2", "vae")
FORMAT = {"format": "pt"}  # transformers refuses files without it


@dataclass
class Networks:
    text_encoder: CLIPTextModel
    text_encoder_2: CLIPTextModelWithProjection
    unet: UNet2DConditionModel
    vae: AutoencoderKL
    refiner_unet: UNet2DConditionModel


def random_networks(seed: int = 0) -> Networks:
    torch.manual_seed(seed)
    return Networks(
        architecture.text_encoder(),
        architecture.text_encoder_2(),
        architecture.unet(),
        architecture.vae(),
        architecture.refiner_unet(),
    )


def load(folder: Path) -> Networks:
    """The networks of an exported model, in fp32."""
    return Networks(
        CLIPTextModel.from_pretrained(folder / "text_encoder", dtype=torch.float32),
        CLIPTextModelWithProjection.from_pretrained(folder / "text_encoder_2", dtype=torch.float32),
        UNet2DConditionModel.from_pretrained(folder / "unet"),
        AutoencoderKL.from_pretrained(folder / "vae"),
        UNet2DConditionModel.from_pretrained(folder / "refiner" / "unet"),
    )


def export(networks: Networks, folder: Path) -> None:
    """fp16 weights, configs, tokenizers and schedulers; replaces the files of an earlier export."""
    refiner = folder / "refiner"
    refiner.mkdir(parents=True, exist_ok=True)
    _write_text_encoder(networks.text_encoder, folder / "text_encoder")
    _write_text_encoder(networks.text_encoder_2, folder / "text_encoder_2")
    for network, place in (
        (networks.unet, folder / "unet"),
        (networks.vae, folder / "vae"),
        (networks.refiner_unet, refiner / "unet"),
    ):
        network.save_config(place)
        _forget_origin(place / "config.json")
        save_file(_halves(network.state_dict()), place / "diffusion_pytorch_model.safetensors", FORMAT)
    tokenizer.write(folder / "tokenizer", pad=tokenizer.END)
    tokenizer.write(folder / "tokenizer_2", pad="!")
    (folder / "scheduler").mkdir(exist_ok=True)
    scheduler = architecture.SCHEDULER | {"_diffusers_version": diffusers.__version__}
    _write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    for name in SHARED:
        shutil.copytree(folder / name, refiner / name, dirs_exist_ok=True)
    common = {
        "_diffusers_version": diffusers.__version__,
        "scheduler": ["diffusers", "EulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    _write_json(
        folder / "model_index.json",
        {"_class_name": "StableDiffusionXLPipeline", **common, "force_zeros_for_empty_prompt": True},
    )
    _write_json(folder / "defaults.json", architecture.DEFAULTS)
    _write_json(
        refiner / "model_index.json",
        {
            "_class_name": "StableDiffusionXLImg2ImgPipeline",
            **common,
            "text_encoder": [None, None],
            "tokenizer": [None, None],
            "force_zeros_for_empty_prompt": False,
            "requires_aesthetics_score": True,
        },
    )


def _forget_origin(path: Path) -> None:
    """Takes out the folder that a network was loaded from, which means nothing elsewhere."""
    config = json.loads(path.read_text())
    config.pop("_name_or_path", None)
    _write_json(path, config)


def _halves(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", torch.float16).contiguous() for name, tensor in tensors.items()}


def _write_text_encoder(network: CLIPTextModel | CLIPTextModelWithProjection, folder: Path) -> None:
    """SDXL's files name every tensor of both encoders `text_model.…`; transformers 5 alone would leave that out
    for the first. The config says float32 so that a load without a dtype fits the other networks."""
    network.config.dtype = "float32"
    network.config.architectures = [type(network).__name__]
    network.config.save_pretrained(folder)
    tensors = _halves(network.state_dict())
    if isinstance(network, CLIPTextModel):
        tensors = {f"text_model.{name.removeprefix('text_model.')}": tensor for name, tensor in tensors.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("position_ids")}
    save_file(tensors, folder / "model.safetensors", FORMAT)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--random", action="store_true", help="untrained weights, from a fixed seed")
    arguments = parser.parse_args()
    if not arguments.random:
        parser.error("only untrained models are written from here; training.train exports what it trained")
    export(random_networks(), arguments.folder)


if __name__ == "__main__":
    main()
