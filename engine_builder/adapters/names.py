"""The names that trainers give to the tensors of a module.

A key is a prefix, the name of a module, and a suffix that says what the tensor is. Each of them is a table here. Some
trainers write underscores in place of dots, which cannot be reversed. So both a key and the names of all layers are
compared with underscores. The tables follow what these projects write: kohya-ss/sd-scripts, huggingface/diffusers
(`loaders/lora_conversion_utils.py`), huggingface/peft, Nerogar/OneTrainer (`convert_lora_util.py`),
comfyanonymous/ComfyUI (`comfy/lora.py`), KohakuBlueleaf/LyCORIS (`wrapper.py`).
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

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
    ".lora_mid.weight": "mid",
    ".dora_scale": "dora_scale",
    ".lora_magnitude_vector": "magnitude_vector",
    ".lora_magnitude_vector.weight": "magnitude_vector",
    ".lora_magnitude_vector.default.weight": "magnitude_vector",
    ".lora_B.bias": "up_bias",
    ".lora_B.default.bias": "up_bias",
    ".lora_up.bias": "up_bias",
    **{f".hada_{part}": f"hada_{part}" for part in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")},
    **{f".lokr_{part}": f"lokr_{part}" for part in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")},
    **{f".{role}": role for role in ("diff", "diff_b", "w_norm", "b_norm", "on_input", "alpha")},
    ".weight": "gain",  # of (IA)3; the last one, because others end with it too
}
"""The end of a key -> what its tensor is, see `engine_builder.adapters.algorithms`."""

UNSUPPORTED = {
    r"oft_": "OFT", r"boft": "BOFT", r"glora_": "GLoRA", r"\.(a1|a2|b1|b2)\.weight$": "GLoRA", r"ia3_l": "PEFT's IA3",
    r"lora_embedding": "an embedding's LoRA", r"emb_params": "a textual inversion",
    r"\.set_weight$": "weights in full", r"\.reshape_weight$": "weights of another shape",
}  # fmt: skip
"""A regular expression that a key contains -> the kind of adapter that it shows."""

PREFIXES = {
    "unet": UNET,  # diffusers; OneTrainer, also with Stability AI's names
    "lora_unet": UNET,  # kohya; OneTrainer, also with dots
    "diffusion_model": UNET,  # ComfyUI
    "model.diffusion_model": UNET,  # Stability AI's checkpoints
    "lycoris": UNET,  # LyCORIS, SimpleTuner
    "text_encoder": TEXT_ENCODER,  # diffusers
    "lora_te": TEXT_ENCODER,  # kohya, for one text encoder
    "lora_te1": TEXT_ENCODER,
    "clip_l": TEXT_ENCODER,  # OneTrainer
    "clip_l.transformer": TEXT_ENCODER,
    "text_encoders.clip_l": TEXT_ENCODER,
    "text_encoders.clip_l.transformer": TEXT_ENCODER,  # ComfyUI
    "text_encoders.clip_h.transformer": TEXT_ENCODER,  # ComfyUI, of Stable Diffusion 2
    "text_encoder_2": TEXT_ENCODER_2,
    "lora_te2": TEXT_ENCODER_2,
    "clip_g": TEXT_ENCODER_2,
    "clip_g.transformer": TEXT_ENCODER_2,
    "text_encoders.clip_g": TEXT_ENCODER_2,
    "text_encoders.clip_g.transformer": TEXT_ENCODER_2,
}
"""The start of a key -> its component."""

_WRAPPERS = re.compile(r"base_model\.model\.|(?<=\.)processor\.")  # PEFT's model; diffusers' old attention processors
_BARE = re.compile(
    r"(down_blocks|mid_block|up_blocks|input_blocks|middle_block|output_blocks|(conv_in|conv_out|conv_norm_out|out_[02])$"
    r"|time_embed|add_embedding|label_emb_)"
)  # of a UNet without prefix
_OTHER_MODELS = re.compile(r"(lora_)?(transformer|prior|text_encoder_3|te3)_")  # prefixes of SD 3, Flux and Cascade

_TEXT = (TEXT_ENCODER, TEXT_ENCODER_2)
_ALIASES: tuple[tuple[tuple[str, ...], re.Pattern[str], str], ...] = (
    ((UNET,), re.compile(r"\.to_out\.0$"), ".to_out"),  # diffusers' old attention processors
    (_TEXT, re.compile(r"\.self_attn\.(q|k|v|out)_proj$"), r".self_attn.to_\1"),
    (_TEXT, re.compile(r"^text_model\.(?=encoder\.)"), ""),  # transformers 5, a CLIP without projection
)
"""Components, what to replace in a module's name, and the replacement that trainers write."""

_STABILITY_RESNET = {
    "conv1": "in_layers.2", "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1", "conv_shortcut": "skip_connection",
    "norm1": "in_layers.0", "norm2": "out_layers.0",
}  # fmt: skip
_STABILITY = {
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0", "conv_out": "out.2", "conv_norm_out": "out.0",
}  # fmt: skip
_BLOCK_MODULE = re.compile(r"(down_blocks|up_blocks)\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)")
_EMBEDDING = re.compile(r"bundle_emb\.(.+?)\.(string_to_param\..*|[^.]*)")


@dataclass(frozen=True)
class FoundName:
    """The module that a key names, with its component; None: the format is known, and the model has no such module.

    is_bare: the key has no prefix. own_name: the key's own name of the module, without PEFT's prefix.
    """

    module: str | None
    is_bare: bool
    own_name: str


class LayerNames:
    """Finds the modules of one model by the keys of all formats."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        modules: dict[str, dict[str, None]] = {component: {} for component in PREFIXES.values()}
        for layer in layers:
            component, _, module = layer.name.partition(".")
            modules[component][module if len(layer.shape) > 1 else module.rpartition(".")[0]] = None
        stability = _stability_names(modules[UNET])
        self._modules = {
            (component, spelling.replace(".", "_")): f"{component}.{module}"
            for component, names in modules.items()
            for module in names
            for name in (module, *(stability.get(module, ()) if component == UNET else ()))
            for spelling in _spellings(component, name)
        }
        self._prefixes = {prefix.replace(".", "_") + "_": component for prefix, component in PREFIXES.items()}
        self._longest_first = sorted(self._prefixes, key=len, reverse=True)

    def find(self, stem: str) -> FoundName | None:
        """Return what a key without its suffix names; None for an unknown key format."""
        module = _WRAPPERS.sub("", stem)
        name = module.replace(".", "_")
        prefix = next((prefix for prefix in self._longest_first if name.startswith(prefix)), "")
        component, rest = self._prefixes.get(prefix, UNET), name.removeprefix(prefix)
        found = self._modules.get((component, rest))
        if found is None and component == UNET and rest.startswith("text_model_"):
            return None  # it does not say which text encoder
        if found is None and not prefix and not _BARE.match(name) and not _OTHER_MODELS.match(name):
            return None
        return FoundName(found, not prefix, module)


def split_key(key: str) -> tuple[str, str] | None:
    """Return a key without its suffix, and what its tensor is; or None for an unknown suffix."""
    for suffix, role in SUFFIXES.items():
        if key.endswith(suffix):
            return key.removesuffix(suffix), role
    return None


def embedding_key(key: str) -> tuple[str, str] | None:
    """Return the token and the tensor of an embedding that OneTrainer or A1111's web UI bundled; None for others."""
    match = _EMBEDDING.fullmatch(key)
    return (match[1], match[2]) if match else None


def _spellings(component: str, name: str) -> list[str]:
    spellings = [name]
    for components, pattern, replacement in _ALIASES:
        if component in components:
            spellings += [new for old in spellings if (new := pattern.sub(replacement, old)) != old]
    return spellings


def _stability_names(modules: Collection[str]) -> dict[str, list[str]]:
    """Return a UNet's modules -> their names in Stability AI's code (sgm), where blocks are numbered through."""
    matches = {module: match for module in modules if (match := _BLOCK_MODULE.fullmatch(module))}
    resnets = [match for match in matches.values() if match[1] == "down_blocks" and match[3] == "resnets"]
    per_block = 1 + max((int(match[4]) for match in resnets if match[2] == "0"), default=0)
    with_attention = {match[2] for match in matches.values() if match[1] == "up_blocks" and match[3] == "attentions"}
    return {
        module: list(
            _block_names(matches[module], per_block, matches[module][2] in with_attention)
            if module in matches
            else _other_names(module)
        )
        for module in modules
    }


def _block_names(match: re.Match[str], per_block: int, has_attention: bool) -> Iterator[str]:
    block, index, kind, number, rest = match[1], int(match[2]), match[3], int(match[4]), match[5]
    first = index * (per_block + 1) + (1 if block == "down_blocks" else 0)
    blocks = "input_blocks" if block == "down_blocks" else "output_blocks"
    if kind == "downsamplers":
        yield f"{blocks}.{first + per_block}.0.op"
    elif kind == "upsamplers":
        yield f"{blocks}.{first + per_block}.2.conv"  # OneTrainer writes 2 for all blocks
        if not has_attention:
            yield f"{blocks}.{first + per_block}.1.conv"
    elif kind == "resnets":
        yield f"{blocks}.{first + number}.0.{_STABILITY_RESNET.get(rest, rest)}"
    else:
        yield f"{blocks}.{first + number}.1.{rest}"


def _other_names(module: str) -> Iterator[str]:
    if module in _STABILITY:
        yield _STABILITY[module]
    elif middle := re.fullmatch(r"mid_block\.(resnets|attentions)\.(\d+)\.(.+)", module):
        rest = middle[3]
        if middle[1] == "attentions":
            yield f"middle_block.1.{rest}"
        else:
            yield f"middle_block.{2 * int(middle[2])}.{_STABILITY_RESNET.get(rest, rest)}"
