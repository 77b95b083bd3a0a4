"""ControlNets with random weights for tests, in the architecture of a model's UNet."""

import json
from pathlib import Path
from typing import Any, Literal

import torch

Kind = Literal["full", "small", "mid", "union"]
CONTROL_TYPES = 3  # of a Union network


def write(folder: Path, model: Path, kind: Kind = "full", seed: int = 0, **changes: Any) -> Path:
    """Write a ControlNet for the UNet of `model` in diffusers' layout. Returns `folder`.

    "small" has no attention, "mid" has transformers without layers except in its last level. No output is zero, and the
    outputs change the image visibly. `changes`: other entries of the config.
    """
    import diffusers

    torch.manual_seed(seed)
    unet = diffusers.UNet2DConditionModel.from_pretrained(model / "unet")
    vae = diffusers.AutoencoderKL.load_config(model / "vae")
    channels = tuple(8 * 2**level for level in range(len(vae["block_out_channels"])))
    if kind in ("full", "union"):
        network_class: Any = diffusers.ControlNetModel if kind == "full" else diffusers.ControlNetUnionModel
        network = network_class.from_unet(unet, conditioning_embedding_out_channels=channels)
        if kind == "union":
            width = unet.config.block_out_channels[0]
            config = _config(network) | {
                "num_control_type": CONTROL_TYPES,
                "num_trans_channel": width,
                "num_trans_head": 2,
                "num_trans_layer": 2,
                "num_proj_channel": width,
            }
            network = network_class.from_config(config)
    else:
        config = _config(diffusers.ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=channels))
        levels = len(config["down_block_types"])
        if kind == "small":
            config |= {"down_block_types": ["DownBlock2D"] * levels, "mid_block_type": "UNetMidBlock2D"}
        else:
            config["transformer_layers_per_block"] = [0] * (levels - 1) + [1]
        network = diffusers.ControlNetModel.from_config(config)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if kind != "full" or not parameter.abs().sum() or "controlnet" in name or "cond_embedding" in name:
                mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
                spread = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.1
                parameter.copy_(mean + spread * torch.randn(parameter.shape))
    network.save_pretrained(folder)
    if changes:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def _config(network: Any) -> dict[str, Any]:
    """Return a network's config, in which diffusers would replace entries that have their defaults."""
    return {key: value for key, value in network.config.items() if key != "_use_default_values"}
