"""The names that trainers give to a layer's factors: those of kohya's scripts, of diffusers and of PEFT.

A key is a prefix, the name of a module, and a suffix that says which factor it is. kohya writes the module with
underscores in place of dots, under diffusers' names or under those of Stability AI's own code. So its keys are found by
a table of all layers of the model.
"""

import re
from collections.abc import Iterable

from model.adapters.layers import Layer
from model.pipeline.spec import TEXT_ENCODER, TEXT_ENCODER_2, UNET

SUFFIXES = {
    ".lora_down.weight": "down",
    ".lora_up.weight": "up",
    ".lora_A.weight": "down",
    ".lora_B.weight": "up",
    ".lora_A.default.weight": "down",
    ".lora_B.default.weight": "up",
    ".lora.down.weight": "down",
    ".lora.up.weight": "up",
    ".lora_linear_layer.down.weight": "down",
    ".lora_linear_layer.up.weight": "up",
    "_lora.down.weight": "down",
    "_lora.up.weight": "up",
    ".alpha": "alpha",
}
"""The end of a key -> what its tensor is."""

UNSUPPORTED = {
    "dora_scale": "DoRA", "lora_magnitude_vector": "DoRA", "hada_": "LoHa", "lokr_": "LoKr", "oft_": "OFT",
    "lora_mid": "LoCon with a Tucker decomposition", "glora_": "GLoRA", ".a1.": "GLoRA", "ia3": "IA3",
    "on_input": "IA3", "boft": "BOFT", ".diff": "full weight differences", "lora_embedding": "an embedding's LoRA",
    "emb_params": "a textual inversion", "lora_B.bias": "a LoRA with biases", "w_norm": "norms",
}  # fmt: skip
"""A part of a key -> the kind of adapter that it shows."""

_KOHYA_PREFIXES = {"lora_unet_": UNET, "lora_te1_": TEXT_ENCODER, "lora_te_": TEXT_ENCODER, "lora_te2_": TEXT_ENCODER_2}
_STABILITY_RESNET = {
    "conv1": "in_layers.2", "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1", "conv_shortcut": "skip_connection",
}  # fmt: skip
_STABILITY = {
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0", "conv_out": "out.2",
}  # fmt: skip
_OLD_PROCESSOR = {"to_q": "to_q", "to_k": "to_k", "to_v": "to_v", "to_out": "to_out.0"}


def split_key(key: str) -> tuple[str, str] | None:
    """Return a key without its suffix, and what its tensor is; or None for an unknown suffix."""
    for suffix, role in SUFFIXES.items():
        if key.endswith(suffix):
            return key.removesuffix(suffix), role
    return None


def kohya_names(layers: Iterable[Layer]) -> dict[str, str]:
    """Return the name in kohya's files, also under the names of Stability AI's code -> the layer's name."""
    layers = list(layers)
    names: dict[str, str] = {}
    for layer in layers:
        component, _, module = layer.name.partition(".")
        modules = [module]
        if component == UNET and (other := _stability_name(module, layers)):
            modules.append(other)
        for prefix, prefixed in _KOHYA_PREFIXES.items():
            if prefixed == component:
                names |= {prefix + written.replace(".", "_"): layer.name for written in modules}
    return names


def dotted_name(stem: str) -> str:
    """Return the name of the layer that a key of diffusers or PEFT means, without its suffix."""
    name = stem.removeprefix("base_model.model.")
    if name.partition(".")[0] not in (UNET, TEXT_ENCODER, TEXT_ENCODER_2):
        name = f"{UNET}.{name}"
    if old := re.fullmatch(r"(.+)\.processor\.(to_(?:q|k|v|out))", name):
        return f"{old[1]}.{_OLD_PROCESSOR[old[2]]}"
    if old := re.fullmatch(r"(text_encoder.*\.self_attn)\.to_(q|k|v|out)", name):
        name = f"{old[1]}.{old[2]}_proj"
    component, _, module = name.partition(".")
    # transformers 5 writes a CLIP without projection without this prefix.
    return f"{component}.text_model.{module}" if module.startswith("encoder.layers.") else name


def _stability_name(module: str, layers: list[Layer]) -> str | None:
    """Return the name of a UNet's module in Stability AI's code (sgm), where blocks are numbered through."""
    if module in _STABILITY:
        return _STABILITY[module]
    per_block = 1 + max(
        (int(m[1]) for layer in layers if (m := re.match(r"unet\.down_blocks\.0\.resnets\.(\d+)\.", layer.name))),
        default=0,
    )
    match = re.fullmatch(
        r"(down_blocks|up_blocks)\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)", module
    )
    if match is not None:
        block, index, kind, number, rest = match[1], int(match[2]), match[3], int(match[4]), match[5]
        if block == "down_blocks":
            first = 1 + index * (per_block + 1)
            if kind == "downsamplers":
                return f"input_blocks.{first + per_block}.0.op"
            return f"input_blocks.{first + number}.{_stability_part(kind, rest)}"
        first = index * (per_block + 1)
        if kind == "upsamplers":
            has_attention = any(layer.name.startswith(f"unet.up_blocks.{index}.attentions.") for layer in layers)
            return f"output_blocks.{first + per_block}.{2 if has_attention else 1}.conv"
        return f"output_blocks.{first + number}.{_stability_part(kind, rest)}"
    middle = re.fullmatch(r"mid_block\.(resnets|attentions)\.(\d+)\.(.+)", module)
    if middle is None:
        return None
    if middle[1] == "attentions":
        return f"middle_block.1.{middle[3]}"
    return f"middle_block.{2 * int(middle[2])}.{_STABILITY_RESNET.get(middle[3], middle[3])}"


def _stability_part(kind: str, rest: str) -> str:
    return f"0.{_STABILITY_RESNET.get(rest, rest)}" if kind == "resnets" else f"1.{rest}"
