"""Check that a folder holds a ControlNet of a model's UNet, by its config.json alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine_builder.checkpoints.folder import (
    Checkpoint,
    CheckpointConfig,
    CheckpointError,
    parse_named_path,
)
from model.pipeline.components import FAMILIES
from model.pipeline.spec import CONTROLNET
from model.validation import MAX_CONTROL_TYPES

CLASSES = ("ControlNetModel", "ControlNetUnionModel")
_CONTROLNET_REMEDY = "Name the folder of a ControlNet in diffusers' layout that was trained for this model."
# The settings that must be those of the UNet -> diffusers' defaults, for a missing key.
_OF_UNET: dict[str, Any] = {
    "cross_attention_dim": 1280,
    "block_out_channels": [320, 640, 1280, 1280],
    "layers_per_block": 2,
    "addition_embed_type": None,
    "addition_time_embed_dim": None,
    "projection_class_embeddings_input_dim": None,
}


def parse_controlnet(text: str) -> tuple[str, Path]:
    """Parse "NAME=PATH". Raises CheckpointError."""
    return parse_named_path(text, "folder", "canny=models/controlnet-canny")


def check_controlnets(base: Checkpoint) -> None:
    """Check the config.json of each of a model's ControlNets. Raises CheckpointError naming the file and the entry."""
    names = [name for name, _ in base.controlnets]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise CheckpointError(f"Two ControlNets have the name {repeated[0]}.", "Give each its own name.")
    for name in names:
        folder = base.folder(f"{CONTROLNET}.{name}")
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} has no config.json.", _CONTROLNET_REMEDY)
        _check_config(base, base.config(f"{CONTROLNET}.{name}"), folder / "config.json")


def _check_config(base: Checkpoint, config: CheckpointConfig, path: Path) -> None:
    unet, vae = base.config("unet"), base.vae_widths()
    class_name = config.get("_class_name")
    if class_name not in CLASSES:
        raise CheckpointError(f"{path}: _class_name is {class_name!r:.80}, expected {' or '.join(CLASSES)}.",
                              _CONTROLNET_REMEDY)  # fmt: skip
    for key, default in _OF_UNET.items():
        _check_equal(path, key, config.get(key, default), unet.get(key, default), f"the UNet of {base.root}")
    _check_equal(path, "in_channels", config.get("in_channels", 4), vae.latent_channels, "the VAE's latents")
    embedding = config.get("conditioning_embedding_out_channels", [16, 32, 96, 256])
    scale = 2 ** (len(embedding) - 1) if isinstance(embedding, list) else 0
    if scale != vae.scale:
        raise CheckpointError(
            f"{path}: conditioning_embedding_out_channels is {embedding!r:.80}. It divides a control image's sides by "
            f"{scale}, and the VAE divides an image's by {vae.scale}.",
            _CONTROLNET_REMEDY,
        )
    if class_name == "ControlNetUnionModel":
        _check_union(base, config, path)


def _check_union(base: Checkpoint, config: Mapping[str, Any], path: Path) -> None:
    if base.family != "sdxl":
        raise CheckpointError(
            f"{path} is a Union network, and {base.root} a {FAMILIES[base.family].title}. Only those for Stable "
            "Diffusion XL are supported.",
            _CONTROLNET_REMEDY,
        )
    types = config.get("num_control_type", 6)
    if type(types) is not int or not 0 < types <= MAX_CONTROL_TYPES:
        raise CheckpointError(
            f"{path}: num_control_type is {types!r:.80}.", f"Set a number from 1 to {MAX_CONTROL_TYPES}."
        )
    channels = config.get("num_trans_channel", 320), config.get("num_proj_channel", 320)
    first = config.get("block_out_channels", [320])[0]
    if channels != (first, first):
        raise CheckpointError(
            f"{path}: num_trans_channel and num_proj_channel are {channels[0]} and {channels[1]}, and the first of "
            f"block_out_channels is {first}. The three must be equal.",
            _CONTROLNET_REMEDY,
        )


def _check_equal(path: Path, key: str, value: Any, expected: Any, owner: str) -> None:
    if value != expected:
        raise CheckpointError(f"{path}: {key} is {value!r:.80}, and that of {owner} is {expected!r:.80}.",
                              _CONTROLNET_REMEDY)  # fmt: skip
