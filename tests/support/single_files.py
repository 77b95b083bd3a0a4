"""Single-file checkpoints in the names of the original repositories, made from models in diffusers' layout.

The names are those of CompVis/stable-diffusion, Stability-AI/stablediffusion and Stability-AI/generative-models: `ldm`
UNets and VAEs, CLIP of transformers, and OpenCLIP. This is the inverse of diffusers' conversion, written separately.
"""

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
_RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "norm2": "out_layers.0", "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1", "conv_shortcut": "skip_connection",
}  # fmt: skip
_UNET = {
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2",
    "mid_block.resnets.0": "middle_block.0", "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
}  # fmt: skip
_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
_OPEN_CLIP = {
    "layer_norm1": "ln_1", "layer_norm2": "ln_2", "self_attn.out_proj": "attn.out_proj", "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}  # fmt: skip
TEXTS = {
    "sdxl": {
        "text_encoder": "conditioner.embedders.0.transformer.",
        "text_encoder_2": "conditioner.embedders.1.model.",
    },
    "sdxl-refiner": {"text_encoder_2": "conditioner.embedders.0.model."},
    "sd-1.5": {"text_encoder": "cond_stage_model.transformer."},
    "sd-2.1": {"text_encoder": "cond_stage_model.model."},
}  # fmt: skip


def write(folder: Path, family: str, path: Path, extra: Mapping[str, Tensor] | None = None, **options: Any) -> Path:
    """Write a model folder as a single file of a family. Returns `path`.

    extra: more tensors, such as `v_pred`. options: `without`, subfolders to leave out; `dtype`; `wrapper`, a prefix of
    all names; `metadata`.
    """
    networks = {
        name: read_weights(folder / name)
        for name in ("unet", "vae", *TEXTS[family])
        if name not in options.get("without", ())
    }
    configs = {name: json.loads((folder / name / "config.json").read_text()) for name in networks}
    tensors = checkpoint(networks, configs, family) | dict(extra or {})
    if dtype := options.get("dtype"):
        tensors = {name: one.to(dtype) if one.is_floating_point() else one for name, one in tensors.items()}
    wrapper = options.get("wrapper", "")
    save_file({wrapper + name: one.contiguous() for name, one in tensors.items()}, path, options.get("metadata"))
    return path


def read_weights(folder: Path) -> Tensors:
    """Return a network's tensors from its folder."""
    return {name: one for path in sorted(folder.glob("*.safetensors")) for name, one in load_file(path).items()}


def checkpoint(networks: Mapping[str, Tensors], configs: Mapping[str, Any], family: str) -> Tensors:
    """Return the tensors of a checkpoint, with constants that programs write and no network reads."""
    tensors: Tensors = {"alphas_cumprod": torch.zeros(1000), "denoiser.sigmas": torch.zeros(1000)}
    for name, weights in networks.items():
        if name == "unet":
            tensors |= {f"model.diffusion_model.{key}": one for key, one in unet_names(weights, configs[name])}
        elif name == "vae":
            tensors |= {f"first_stage_model.{key}": one for key, one in vae_names(weights, configs[name])}
        else:
            prefix = TEXTS[family][name]
            convert = open_clip_names if prefix.endswith(".model.") else clip_names
            tensors |= {prefix + key: one for key, one in convert(weights)}
    return tensors


def unet_names(weights: Tensors, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a UNet by their names in `ldm`."""
    per_block = int(config["layers_per_block"]) + 1
    with_attention = {key.split(".")[1] for key in weights if re.match(r"up_blocks\.\d+\.attentions", key)}
    for key, one in weights.items():
        name = next((key.replace(ours, theirs, 1) for ours, theirs in _UNET.items() if key.startswith(ours + ".")), key)
        if match := re.match(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.", key):
            direction, block, part, layer = match[1], int(match[2]), match[3], int(match[4])
            rest = key[match.end() :]
            if part == "downsamplers":
                name = f"input_blocks.{(block + 1) * per_block}.0.op.{rest.removeprefix('conv.')}"
            elif part == "upsamplers":
                place = 2 if match[2] in with_attention else 1
                name = f"output_blocks.{(block + 1) * per_block - 1}.{place}.{rest}"
            else:
                number = block * per_block + layer + (direction == "down")
                blocks = "input_blocks" if direction == "down" else "output_blocks"
                name = f"{blocks}.{number}.{0 if part == 'resnets' else 1}.{rest}"
        if ".resnets." in key:
            name = _replaced(name, _RESNET)
        yield name, one


def vae_names(weights: Tensors, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a VAE by their names in `ldm`. The projections of its attention are convolutions there."""
    levels = len(config["block_out_channels"])
    for key, one in weights.items():
        name = re.sub(r"down_blocks\.(\d+)\.resnets\.(\d+)", r"down.\1.block.\2", key)
        name = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", name)
        name = re.sub(r"up_blocks\.(\d+)", lambda found: f"up.{levels - 1 - int(found[1])}", name)
        name = name.replace("resnets.", "block.").replace("upsamplers.0", "upsample")
        name = re.sub(r"mid_block\.block\.(\d)", lambda found: f"mid.block_{int(found[1]) + 1}", name)
        name = name.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")
        if "mid_block.attentions.0" in name:
            name = _replaced(name.replace("mid_block.attentions.0", "mid.attn_1"), _VAE_ATTENTION)
            one = one[:, :, None, None] if one.ndim == 2 else one
        yield name, one


def clip_names(weights: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a CLIP text encoder by their names in transformers, with the positions of old versions."""
    for key, one in weights.items():
        yield f"text_model.{key.removeprefix('text_model.')}", one
    yield "text_model.embeddings.position_ids", torch.arange(77)[None]


def open_clip_names(weights: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a text encoder by their names in OpenCLIP, which has one tensor for q, k and v."""
    plain = {key.removeprefix("text_model."): one for key, one in weights.items()}
    for key, one in plain.items():
        if match := re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)", key):
            name = f"transformer.resblocks.{match[1]}."
            if match[2] == "self_attn.q_proj":
                parts = [plain[key.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
                yield f"{name}attn.in_proj_{match[3]}", torch.cat(parts)
            elif match[2] in _OPEN_CLIP:
                yield f"{name}{_OPEN_CLIP[match[2]]}.{match[3]}", one
        elif key == "text_projection.weight":
            yield "text_projection", one.T
        else:
            known = {"final_layer_norm": "ln_final", "embeddings.token_embedding": "token_embedding"}
            name = _replaced(key, known)
            yield name.replace("embeddings.position_embedding.weight", "positional_embedding"), one
    yield "logit_scale", torch.tensor(1.0)


def _replaced(name: str, names: Mapping[str, str]) -> str:
    """Replace one part of a name, between dots."""
    for ours, theirs in names.items():
        if re.search(rf"(^|\.){re.escape(ours)}\.", name):
            return re.sub(rf"(^|\.){re.escape(ours)}\.", rf"\g<1>{theirs}.", name)
    return name


def write_header(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], **metadata: str) -> Path:
    """Write a file with a safetensors header and no data: a hole of the size that its tensors have. Returns `path`."""
    sizes = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8, "U8": 1}
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + sizes[dtype] * torch.Size(shape).numel()
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + offset)
    return path


def full_size(networks: Mapping[str, Callable[[], Any]], family: str, dtype: str = "F16") -> dict[str, Any]:
    """Return the tensors of a checkpoint of networks without data, for `write_header`. networks: maker by subfolder."""
    with torch.device("meta"):
        made = {name: make() for name, make in networks.items()}
    weights = {name: dict(network.state_dict()) for name, network in made.items()}
    configs = {name: network.config for name, network in made.items()}
    return {
        name: ("I64" if not one.is_floating_point() else dtype, tuple(one.shape))
        for name, one in checkpoint(weights, configs, family).items()
    }
