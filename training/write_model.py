"""Write the model in diffusers' layout: the base, and the refiner in its folder `refiner/`.

The refiner's `text_encoder_2` and `vae` are byte-identical copies of the base's.
"""

from __future__ import annotations

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

SHARED_FOLDERS = ("scheduler", "text_encoder_2", "tokenizer_2", "vae")  # copied from the base to the refiner
METADATA = {"format": "pt"}  # transformers refuses safetensors files without it


@dataclass
class Networks:
    text_encoder: CLIPTextModel
    text_encoder_2: CLIPTextModelWithProjection
    unet: UNet2DConditionModel
    vae: AutoencoderKL
    refiner_unet: UNet2DConditionModel


def random_networks(seed: int = 0) -> Networks:
    """Return untrained networks in fp32."""
    torch.manual_seed(seed)
    return Networks(
        architecture.text_encoder(),
        architecture.text_encoder_2(),
        architecture.unet(),
        architecture.vae(),
        architecture.refiner_unet(),
    )


def load_networks(folder: Path) -> Networks:
    """Load the networks of an exported model in fp32."""
    return Networks(
        CLIPTextModel.from_pretrained(folder / "text_encoder", dtype=torch.float32),
        CLIPTextModelWithProjection.from_pretrained(folder / "text_encoder_2", dtype=torch.float32),
        UNet2DConditionModel.from_pretrained(folder / "unet"),
        AutoencoderKL.from_pretrained(folder / "vae"),
        UNet2DConditionModel.from_pretrained(folder / "refiner" / "unet"),
    )


def export_model(networks: Networks, folder: Path) -> None:
    """Write fp16 weights, configs, tokenizers and schedulers. Replaces the files of an earlier export."""
    refiner_folder = folder / "refiner"
    refiner_folder.mkdir(parents=True, exist_ok=True)
    _write_text_encoder(networks.text_encoder, folder / "text_encoder")
    _write_text_encoder(networks.text_encoder_2, folder / "text_encoder_2")
    for network, network_folder in (
        (networks.unet, folder / "unet"),
        (networks.vae, folder / "vae"),
        (networks.refiner_unet, refiner_folder / "unet"),
    ):
        network.save_config(network_folder)
        _remove_source_path(network_folder / "config.json")
        weights = _to_fp16(network.state_dict())
        save_file(weights, network_folder / "diffusion_pytorch_model.safetensors", METADATA)
    tokenizer.write_tokenizer(folder / "tokenizer", pad_token=tokenizer.END_TOKEN)
    tokenizer.write_tokenizer(folder / "tokenizer_2", pad_token="!")
    (folder / "scheduler").mkdir(exist_ok=True)
    scheduler = architecture.SCHEDULER | {"_diffusers_version": diffusers.__version__}
    _write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    for name in SHARED_FOLDERS:
        shutil.copytree(folder / name, refiner_folder / name, dirs_exist_ok=True)
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
        refiner_folder / "model_index.json",
        {
            "_class_name": "StableDiffusionXLImg2ImgPipeline",
            **common,
            "text_encoder": [None, None],
            "tokenizer": [None, None],
            "force_zeros_for_empty_prompt": False,
            "requires_aesthetics_score": True,
        },
    )


def _remove_source_path(config_file: Path) -> None:
    """Remove the folder that a network was loaded from, which exists only on this machine."""
    config = json.loads(config_file.read_text())
    config.pop("_name_or_path", None)
    _write_json(config_file, config)


def _to_fp16(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", torch.float16).contiguous() for name, tensor in tensors.items()}


def _write_text_encoder(network: CLIPTextModel | CLIPTextModelWithProjection, folder: Path) -> None:
    """Write a text encoder with SDXL's tensor names.

    SDXL's files name every tensor of both encoders `text_model.…`. transformers 5 would leave the prefix out for the
    first encoder. transformers loads the dtype that the config states: float32, which diffusers' networks load by
    default.
    """
    network.config.dtype = "float32"
    network.config.architectures = [type(network).__name__]
    network.config.save_pretrained(folder)
    tensors = _to_fp16(network.state_dict())
    if isinstance(network, CLIPTextModel):
        tensors = {f"text_model.{name.removeprefix('text_model.')}": tensor for name, tensor in tensors.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("position_ids")}
    save_file(tensors, folder / "model.safetensors", METADATA)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
