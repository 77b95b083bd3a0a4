"""Read the header of a single-file checkpoint: its family, its networks, and what its trainer noted.

Only names, shapes, types and metadata are read. Files of other kinds are refused by what they are.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from engine_builder.checkpoints.folder import DOWNLOAD_AGAIN, CheckpointError
from engine_builder.checkpoints.single_file_families import (
    FAMILIES,
    TEXT_PREFIXES,
    UNET_PREFIX,
    VAE_PREFIX,
    SingleFileFamily,
)
from engine_builder.checkpoints.single_file_kinds import FOREIGN, PARTS, Kind
from engine_builder.error_text import cause_of
from model.errors import PreheatError
from model.store.local import open_regular_file

PICKLES = (".ckpt", ".pt", ".pth", ".bin", ".pkl")
_PICKLE_REMEDY = "Use the .safetensors file of the same model, or a folder in diffusers' layout."
_HEADER_LIMIT = 32 * 2**20  # bytes; an SDXL with averaged weights has 1 MB, and trainers' metadata a few
_TENSOR_LIMIT = 20_000  # an SDXL with averaged weights has 5,000
_FIRST_CONVOLUTION = "input_blocks.0.0.weight"
_KEPT_TYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
# What files begin with in place of the size of a header -> what they are, and what to do.
_FORMATS: dict[bytes, tuple[str, str]] = {
    b"PK\x03\x04": ("a zip file or a pickle, which can run code; it was not opened", _PICKLE_REMEDY),
    **{
        bytes((0x80, protocol)): ("a pickle, which can run code; it was not opened", _PICKLE_REMEDY)
        for protocol in range(2, 6)
    },
    b"GGUF": ("a GGUF file with quantized weights", "Use the .safetensors file of the same model."),
    b"version https://git-lfs": ("a pointer of Git LFS", "Fetch the file itself with `git lfs pull`."),
    b"<": ("a web page", "The site asks for a login or a token: download the file in a browser, or with an API key."),
    b"{": ("a JSON text", "The site answered with an error: download the file again."),
}
# The names of very old checkpoints of Stable Diffusion 1 lack "text_model.".
_OLD_CLIP = re.compile(r"^cond_stage_model\.transformer\.(?=embeddings\.|encoder\.|final_layer_norm\.)")
# Tensors that no network reads: constants of the noise schedule, of training, averages, and positions.
UNREAD = re.compile(
    r"^(alphas_cumprod|betas|log_one_minus|posterior_|sqrt_|lvlb_weights|model_ema\.|denoiser\.|global_step|logvar"
    r"|embedding_manager\.|v_pred$|ztsnr$|edm_mean$|edm_std$|scale_factor$|(first_stage_model\.)?loss\.)"
    r"|\.position_ids$|logit_scale$|^cond_stage_model\.attn_mask|\.attn_mask$|num_batches_tracked$"
    r"|^conditioner\.embedders\.0\.transformer\.text_projection\.|^cond_stage_model\.transformer\.text_projection\."
)
# Tensors that mark how a model was trained. Programs write them with and without the UNet's prefix.
_MARKER = re.compile(r"^(?:(?:model|diffusion_model)\.)*(v_pred|ztsnr|edm_mean|edm_std|edm_vpred\..+)$")
# The parts of a UNet's names. Averaged weights have them without dots: "model_ema.diffusion_modelinput_blocks00weight".
_EMA_PREFIX = "model_ema.diffusion_model"
_EMA_PARTS = re.compile(
    r"(?:in|out)put_blocks|middle_block|transformer_blocks|(?:in|out|emb)_layers|time_embed|label_emb|skip_connection"
    r"|proj_in|proj_out|proj|attn[12]|to_(?:q|k|v|out)|norm[123]?|ff|net|op|conv|out|weight|bias"
    r"|(?<=put_blocks)\d+(?=\d\D)|\d"
)
_PREDICTIONS = {
    "epsilon": "epsilon", "eps": "epsilon", "v": "v_prediction", "v_prediction": "v_prediction",
    "v-prediction": "v_prediction", "v_pred": "v_prediction",
}  # fmt: skip
_PREDICTION_KEYS = ("modelspec.prediction_type", "modelspec.predict_key")  # of trainers, and of ComfyUI
# Entry of a file's metadata -> its values, in lower case, and the prediction types that they state. The first is used.
_PREDICTIONS_OF: dict[str, dict[str, str]] = {
    **dict.fromkeys(_PREDICTION_KEYS, _PREDICTIONS),
    "modelspec.architecture": {
        "stable-diffusion-v2-512": "epsilon", "stable-diffusion-v2-768-v": "v_prediction",
    },
    "ss_v_parameterization": {"true": "v_prediction"},
}  # fmt: skip


class TensorInfo(NamedTuple):
    """The type of a tensor as safetensors names it, and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Header:
    """The header of a safetensors file. names: a tensor's usual name in a checkpoint -> its name in this file.

    read: the names of the tensors that networks read.
    """

    path: Path
    tensors: Mapping[str, TensorInfo]
    names: Mapping[str, str]
    metadata: Mapping[str, str]

    @cached_property
    def read(self) -> list[str]:
        return [name for name in self.names if not UNREAD.search(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor by its usual name; empty if the file has no such tensor."""
        return self.tensors[self.names[name]].shape if name in self.names else ()

    def of(self, prefix: str) -> dict[str, TensorInfo]:
        """Return the tensors of one network that are read, by their usual names."""
        return {name: self.tensors[self.names[name]] for name in self.read if name.startswith(prefix)}


@dataclass(frozen=True, eq=False)
class SingleFile:
    """A single-file checkpoint of a served family.

    networks: subfolders of the networks that the file holds -> the prefix of their tensors' names. missing: the
    subfolders of the others. scheduler: entries of scheduler_config.json that the file states. warnings: sentences.
    """

    header: Header
    family: SingleFileFamily
    networks: Mapping[str, str]
    missing: tuple[str, ...]
    scheduler: Mapping[str, Any]
    warnings: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        """The family and what the file states about its noise, for messages."""
        entries = " and ".join(f'"{key}": {json.dumps(value)}' for key, value in self.scheduler.items())
        return f"{self.family.title}{f' with {entries}' if entries else ''}"


def read_single_file(path: Path, context: int | None = None) -> SingleFile:
    """Read the header of a single-file checkpoint. Raises CheckpointError for any other file.

    context: the width of the text that the UNet of --config reads. It identifies a file without text encoders whose
    width belongs to no family.
    """
    header = read_header(path)
    check_foreign(header)
    if UNET_PREFIX + _FIRST_CONVOLUTION not in header.names:
        _check_kinds(header, PARTS)
        stated = header.metadata.get("modelspec.architecture")
        raise CheckpointError(
            f"{path} is not a whole model: it has {_some(header.tensors)}"
            f"{f' (modelspec.architecture {stated!r:.80})' if stated else ''}.",
            "Name the file of a checkpoint, the folder of a model in diffusers' layout, or a Hub id.",
        )
    family = _family(header, context)
    networks = {"unet": UNET_PREFIX, "vae": VAE_PREFIX, **family.texts}
    present = {name: prefix for name, prefix in networks.items() if header.of(prefix)}
    scheduler, warnings = _scheduler(header, family)
    known = (*networks.values(), *TEXT_PREFIXES)
    if unknown := [name for name in header.read if not name.startswith(known)]:
        warnings += (f"{path} has {_some(unknown)}, which no network of {family.title} reads.",)
    return SingleFile(
        header, family, present, tuple(name for name in networks if name not in present), scheduler, warnings
    )


def check_foreign(header: Header) -> None:
    """Raise CheckpointError if the file is of another kind than a checkpoint or a part of one."""
    _check_kinds(header, FOREIGN)


def _check_kinds(header: Header, kinds: Sequence[Kind]) -> None:
    text = "\n".join(header.names)
    for kind in kinds:
        if kind.fits(header.names, text):
            raise CheckpointError(f"{header.path} is {kind.what}, and not a checkpoint.", kind.remedy)


def read_header(path: Path) -> Header:
    """Read a safetensors header. Raises CheckpointError for other formats, damaged files and unsupported types."""
    try:
        with open_regular_file(path) as file:
            start, size = file.read(64), path.stat().st_size
    except (OSError, PreheatError) as error:
        raise CheckpointError(f"{path} cannot be read: {cause_of(error)}.", "Check the file.") from error
    for magic, (what, remedy) in _FORMATS.items():
        if start.startswith(magic) and not start[8:9] == b"{":
            raise CheckpointError(f"{path} is {what}.", remedy)
    if path.suffix in PICKLES:
        raise CheckpointError(f"{path} may hold a pickle, which can run code. It was not opened.", _PICKLE_REMEDY)
    header_size = int.from_bytes(start[:8], "little")
    if len(start) < 8 or header_size > min(size, _HEADER_LIMIT):
        raise CheckpointError(
            f"{path} is not a complete safetensors file: it has no header of 1 to {_HEADER_LIMIT:,} bytes.",
            DOWNLOAD_AGAIN,
        )
    try:
        with safe_open(path, framework="pt") as opened:
            names = list(opened.keys())
            if len(names) > _TENSOR_LIMIT:
                raise CheckpointError(
                    f"{path} has {len(names):,} tensors, more than {_TENSOR_LIMIT:,}.", "Name a checkpoint."
                )
            slices = {name: opened.get_slice(name) for name in names}
            tensors = {name: TensorInfo(one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
            metadata = dict(opened.metadata() or {})
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a complete safetensors file ({cause_of(error)[:200]}).", DOWNLOAD_AGAIN
        ) from error
    return Header(path, tensors, _usual_names(tensors), metadata)


def check_types(header: Header, prefix: str) -> None:
    """Raise CheckpointError for a tensor of a network whose type holds no weights as they were trained."""
    for name, info in header.of(prefix).items():
        if info.dtype not in _KEPT_TYPES:
            raise CheckpointError(
                f"{header.path} has quantized weights: {name:.120} is {info.dtype}.",
                "Use the fp16, bf16 or fp32 file of the same model.",
            )


def _usual_names(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Return usual name -> name in the file, without a prefix of all names such as "state_dict.".

    A UNet alone, as ComfyUI saves it, has no prefix; it gets the usual one.
    """
    own_names = {name: name for name in tensors}
    if not any(name.endswith(UNET_PREFIX + _FIRST_CONVOLUTION) for name in tensors):
        own_names = {_with_dots(name): name for name in tensors}
    first = next((name for name in own_names if name.endswith(UNET_PREFIX + _FIRST_CONVOLUTION)), "")
    wrapper = first.removesuffix(UNET_PREFIX + _FIRST_CONVOLUTION)
    if not first:
        for prefix in ("diffusion_model.", ""):
            if prefix + _FIRST_CONVOLUTION in tensors:
                return _with_markers({UNET_PREFIX + name.removeprefix(prefix): name for name in tensors})
    usual = _with_markers({name.removeprefix(wrapper): own for name, own in own_names.items()})
    return {_OLD_CLIP.sub("cond_stage_model.transformer.text_model.", name): own for name, own in usual.items()}


def _with_markers(names: Mapping[str, str]) -> dict[str, str]:
    """Return usual name -> name in the file, with markers by their names without a prefix."""
    return {_MARKER.sub(r"\1", name): own for name, own in names.items()}


def _with_dots(name: str) -> str:
    """Return the usual name of an averaged weight, or another name as it is."""
    wrapper, _, flat = name.partition(_EMA_PREFIX)
    parts = _EMA_PARTS.findall(flat)
    return f"{wrapper}{UNET_PREFIX}{'.'.join(parts)}" if flat and "".join(parts) == flat else name


def _family(header: Header, context: int | None) -> SingleFileFamily:
    """Return the family of a file with a UNet. Raises CheckpointError."""
    first = header.shape(UNET_PREFIX + _FIRST_CONVOLUTION)
    channels = first[1] if len(first) == 4 else 0
    takes_sizes = any(name.startswith(f"{UNET_PREFIX}label_emb.") for name in header.names)
    widths = {
        info.shape[-1]
        for name, info in header.of(UNET_PREFIX).items()
        if name.endswith("attn2.to_k.weight") and info.shape
    }
    texts = {prefix for prefix in TEXT_PREFIXES if header.of(prefix)}
    fitting = [
        family
        for family in FAMILIES.values()
        if (channels, takes_sizes) == (family.channels, family.takes_sizes)
        and (family.marker is None or family.marker in header.names)
        and texts <= set(family.texts.values())
    ]
    for family in fitting:
        if texts or widths == {family.context}:
            return family
    if fitting and widths == {context}:
        return fitting[0]
    stated = header.metadata.get("modelspec.architecture", "unknown")
    encoders = f"text encoders {', '.join(sorted(texts))}" if texts else "no text encoders"
    raise CheckpointError(
        f"{header.path} is a single-file checkpoint of a model that is not supported: its UNet takes {channels} "
        f"channels, {'' if takes_sizes else 'no '}sizes and texts of width "
        f"{', '.join(map(str, sorted(widths))) or 'unknown'}, with {encoders} (modelspec.architecture {stated:.80}).",
        f"Supported: {', '.join(family.title for family in FAMILIES.values())}.",
    )


def _scheduler(header: Header, family: SingleFileFamily) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the entries of scheduler_config.json that the file states, and warnings.

    Trainers mark v-prediction and zero terminal SNR with tensors without values, `v_pred` and `ztsnr`.
    """
    if family.marker is not None:
        return {}, ()
    entries: dict[str, Any] = {}
    values = [(key, header.metadata[key]) for key in _PREDICTIONS_OF if header.metadata.get(key)]
    known = [
        (key, _PREDICTIONS_OF[key][value.lower()]) for key, value in values if value.lower() in _PREDICTIONS_OF[key]
    ]
    where, stated = known[0] if known else ("", None)
    warnings = tuple(
        f"{header.path} has {key} {value!r:.80}, which is unknown and was not used."
        for key, value in values
        if key in _PREDICTION_KEYS and value.lower() not in _PREDICTIONS
    )
    if stated is not None and (stated != "epsilon" or not family.states_prediction):
        entries["prediction_type"] = stated
    if "v_pred" in header.names:
        if stated == "epsilon":
            warnings += (
                f"{header.path} has the key v_pred, and its {where} states epsilon. The key is used, as in other "
                "programs.",
            )
        entries["prediction_type"] = "v_prediction"
    if "ztsnr" in header.names:
        entries["rescale_betas_zero_snr"] = True
    if not family.states_prediction and "prediction_type" not in entries:
        warnings += (
            f"{header.path} does not state what its UNet predicts. The velocity is assumed, as for 2.1 at 768 pixels. "
            "For a model of 512 pixels that predicts noise (2.1-base) build with --preset sd-2.1-base.",
        )
    return entries, warnings


def _some(names: Mapping[str, Any] | list[str]) -> str:
    """Return the first two names, cut off, and the number of the others."""
    listed = list(names)
    if not listed:
        return "no tensors"
    shown = ", ".join(f"{name:.80}" for name in listed[:2])
    return f"the tensors {shown}{f' and {len(listed) - 2:,} others' if len(listed) > 2 else ''}"
