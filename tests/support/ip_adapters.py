"""IP-Adapters with random weights for tests, in the form of the public files, and a small CLIP image encoder."""

from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

Kind = Literal["plain", "plus", "full"]
SIDE, PATCH, WIDTH, PROJECTED = 32, 8, 16, 24  # of the encoder
PLUS_TOKENS, PLUS_WIDTH, PLUS_LAYERS = 6, 12, 4
_HEAD = 64  # diffusers' constant


def write_encoder(folder: Path, seed: int = 0) -> Path:
    """Write a CLIP vision model with a projection. Returns `folder`."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    torch.manual_seed(seed)
    config = CLIPVisionConfig(
        hidden_size=WIDTH, intermediate_size=WIDTH, projection_dim=PROJECTED, num_hidden_layers=3,
        num_attention_heads=2, image_size=SIDE, patch_size=PATCH,
    )  # fmt: skip
    network = CLIPVisionModelWithProjection(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    network.save_pretrained(folder)
    return folder


def write_adapter(path: Path, model: Path, kind: Kind = "plain", seed: int = 0) -> Path:
    """Write an adapter for the UNet of `model`. Its tokens change the image visibly. Returns `path`."""
    import diffusers

    torch.manual_seed(seed)
    unet = diffusers.UNet2DConditionModel.from_pretrained(model / "unet")
    context = unet.config.cross_attention_dim
    tensors = {f"image_proj.{name}": tensor for name, tensor in _projection(kind, context).items()}
    names = [name for name in unet.attn_processors if not name.endswith("attn1.processor")]
    for index, name in enumerate(names):
        attention = unet.get_submodule(name.removesuffix(".processor"))
        for part in ("to_k", "to_v"):
            shape = getattr(attention, part).weight.shape
            tensors[f"ip_adapter.{1 + 2 * index}.{part}_ip.weight"] = torch.randn(shape) * shape[1] ** -0.5
    save_file(tensors, path)
    return path


def _projection(kind: Kind, context: int) -> dict[str, torch.Tensor]:
    if kind == "plain":
        return _linear("proj", PROJECTED, 4 * context) | _norm("norm", context)
    if kind == "full":
        return _linear("proj.0", WIDTH, WIDTH) | _linear("proj.2", WIDTH, context) | _norm("proj.3", context)
    tensors = {"latents": torch.randn(1, PLUS_TOKENS, PLUS_WIDTH)}
    tensors |= _linear("proj_in", WIDTH, PLUS_WIDTH) | _linear("proj_out", PLUS_WIDTH, context)
    tensors |= _norm("norm_out", context)
    for layer in range(PLUS_LAYERS):
        name = f"layers.{layer}"
        tensors |= _norm(f"{name}.0.norm1", PLUS_WIDTH) | _norm(f"{name}.0.norm2", PLUS_WIDTH)
        tensors |= _linear(f"{name}.0.to_q", PLUS_WIDTH, _HEAD, bias=False)
        tensors |= _linear(f"{name}.0.to_kv", PLUS_WIDTH, 2 * _HEAD, bias=False)
        tensors |= _linear(f"{name}.0.to_out", _HEAD, PLUS_WIDTH, bias=False)
        tensors |= _norm(f"{name}.1.0", PLUS_WIDTH) | _linear(f"{name}.1.1", PLUS_WIDTH, 4 * PLUS_WIDTH, bias=False)
        tensors |= _linear(f"{name}.1.3", 4 * PLUS_WIDTH, PLUS_WIDTH, bias=False)
    return tensors


def _linear(name: str, inputs: int, outputs: int, bias: bool = True) -> dict[str, torch.Tensor]:
    tensors = {f"{name}.weight": torch.randn(outputs, inputs) * inputs**-0.5}
    return tensors | ({f"{name}.bias": 0.1 * torch.randn(outputs)} if bias else {})


def _norm(name: str, width: int) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": 1 + 0.1 * torch.randn(width), f"{name}.bias": 0.1 * torch.randn(width)}
