"""LoRA adapters with random factors, as files in the key formats of kohya's scripts, diffusers and PEFT."""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

from engine_builder.stores.store import WritableStore

Style = Literal["kohya", "kohya-sgm", "diffusers", "peft"]
STYLES: tuple[Style, ...] = ("kohya", "kohya-sgm", "diffusers", "peft")
Delta = tuple[torch.Tensor, torch.Tensor, float]
"""down [rank, in, ...], up [out, rank], and alpha."""

LINEARS = re.compile(
    r"unet\..*(attn[12]\.to_(q|k|v|out\.0)|ff\.net\.(0\.proj|2)|proj_(in|out))|text_encoder.*([qkv]_proj|out_proj|fc[12])"
)
PACKABLE = re.compile(r"unet\..*(attn[12]\.to_(q|k|v|out\.0)|ff\.net\.(0\.proj|2)|proj_(in|out))")
"""Linears that a UNet with low-rank inputs covers."""
CONVOLUTIONS = re.compile(r"unet\..*(resnets.*conv\w*|samplers\.0\.conv|time_emb_proj)|unet\.conv_(in|out)")


def module_shapes(folder: Path, vectors: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the weight shapes of all linears and convolutions of a diffusers folder, by component and module.

    vectors: also the shapes of biases and of norms' weights, by the name of the tensor.
    """
    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    classes = {
        "unet": UNet2DConditionModel,
        "text_encoder": CLIPTextModel,
        "text_encoder_2": CLIPTextModelWithProjection,
    }
    shapes = {}
    for component, kind in classes.items():
        if not (folder / component).is_dir():
            continue
        for name, module in kind.from_pretrained(folder / component).named_modules():
            prefix = "text_model." if name.startswith(("encoder.", "final_layer_norm")) else ""
            if isinstance(module, torch.nn.Embedding):
                continue
            for kind, parameter in module.named_parameters(recurse=False):
                if parameter.ndim > 1 or vectors:
                    end = "" if parameter.ndim > 1 else f".{kind}"
                    shapes[f"{component}.{prefix}{name}{end}"] = tuple(parameter.shape)
    return shapes


def random_deltas(
    shapes: Mapping[str, tuple[int, ...]], pattern: re.Pattern[str], rank: int, seed: int, spread: float = 0.1
) -> dict[str, Delta]:
    """Return random factors for the modules whose whole names match. alpha is half of the rank."""
    generator = torch.Generator().manual_seed(seed)
    deltas = {}
    for name, shape in shapes.items():
        if pattern.fullmatch(name):
            down = spread * torch.randn(rank, *shape[1:], generator=generator)
            deltas[name] = (down, spread * torch.randn(shape[0], rank, generator=generator), rank / 2)
    assert deltas
    return deltas


def write_adapter(path: Path, deltas: Mapping[str, Delta], style: Style) -> Path:
    """Write a file in the keys of a style. Those of diffusers and PEFT have no alpha, so `up` is scaled."""
    tensors = {}
    for name, (down, up, alpha) in deltas.items():
        up = up.reshape(*up.shape, *(1,) * (down.ndim - 2))
        if style.startswith("kohya"):
            stem = kohya_stem(sgm_name(name) if style == "kohya-sgm" else name)
            tensors |= {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}
            tensors[f"{stem}.alpha"] = torch.tensor(alpha)
        else:
            ends = (".lora_A.weight", ".lora_B.weight")
            if style == "diffusers":
                middle = ".lora" if name.startswith("unet.") else ".lora_linear_layer"
                ends = (f"{middle}.down.weight", f"{middle}.up.weight")
            tensors |= {name + ends[0]: down, name + ends[1]: up * (alpha / len(down))}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    return path


def kohya_stem(name: str) -> str:
    component, _, module = name.partition(".")
    prefixes = {"unet": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}
    return f"{prefixes[component]}_{module.replace('.', '_')}"


def sgm_name(name: str) -> str:
    """Rename a UNet's module to that of Stability AI's code, as the tiny model has it: one resnet in each
    block on the way down."""
    parts = {"conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "conv2": "out_layers.3",
             "conv_shortcut": "skip_connection"}  # fmt: skip
    if name in ("unet.conv_in", "unet.conv_out"):
        return {"unet.conv_in": "unet.input_blocks.0.0", "unet.conv_out": "unet.out.2"}[name]
    match = re.fullmatch(r"unet\.(down|mid|up)_block(?:s\.(\d))?\.(\w+)\.(\d)\.(.+)", name)
    if match is None:
        return name
    side, block, kind, index, rest = match[1], int(match[2] or 0), match[3], int(match[4]), match[5]
    if side == "mid":
        return f"unet.middle_block.{'1' if kind == 'attentions' else 2 * index}.{parts.get(rest, rest)}"
    if kind == "downsamplers":
        return f"unet.input_blocks.{2 * (block + 1)}.0.op"
    if kind == "upsamplers":
        return f"unet.output_blocks.{2 * block + 1}.2.conv"
    first = 1 + 2 * block if side == "down" else 2 * block
    where = "input_blocks" if side == "down" else "output_blocks"
    return f"unet.{where}.{first + index}.{'1' if kind == 'attentions' else '0'}.{parts.get(rest, rest)}"


def copy_store(store: WritableStore, folder: Path) -> Path:
    """Return a folder with links to a local store's blobs and releases, to which a test may add adapters."""
    source = Path(store.url.removeprefix("file://"))
    for kind in ("blobs", "releases"):
        shutil.copytree(source / kind, folder / kind, copy_function=os.symlink)
    return folder
