"""Check the files of a model folder before any weights are read: their kinds, sizes, contents and classes.

`engine_builder.networks.network_check` also compares them with the networks that the configurations describe.
"""

import json
import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine_builder.checkpoints.folder import (
    DOWNLOAD_AGAIN,
    Checkpoint,
    CheckpointError,
    read_json,
    read_small_file,
    read_tensor_shapes,
    weight_files,
)
from engine_builder.checkpoints.tokenizers import export_tokenizer
from model.errors import MissingComponent
from model.prompts.tokenizer import ClipTokenizer

_WEIGHTS_LIMIT = 32 * 2**30  # bytes of one file; SDXL's UNet has 10 GB in fp32
_TEXT_SUFFIXES = (".txt", ".jinja")  # of a tokenizer's files
_CLIP = ("CLIPTextModel", "CLIPTextModelWithProjection")
_TOKENIZERS = ("CLIPTokenizer", "CLIPTokenizerFast")
# The classes that model_index.json may name for a subfolder. diffusers reads the networks by these.
_CLASSES = {
    "unet": ("UNet2DConditionModel",),
    "vae": ("AutoencoderKL",),
    "text_encoder": ("CLIPTextModel",),
    "text_encoder_2": ("CLIPTextModelWithProjection",),
    "tokenizer": _TOKENIZERS,
    "tokenizer_2": _TOKENIZERS,
}
# Entries of model_index.json that change no image, because they name what is not run or what checks images.
_UNUSED_ENTRIES = (
    "_class_name", "_diffusers_version", "_name_or_path", "_module", "requires_safety_checker", "safety_checker",
    "feature_extractor", "image_encoder", "controlnet", "add_watermarker", "watermark", "scheduler", "torch_dtype",
)  # fmt: skip
_FLAGS = ("force_zeros_for_empty_prompt", "requires_aesthetics_score")

Shapes = dict[str, tuple[int, ...]]
"""The shapes of a network's stored tensors by name."""


def check_files(checkpoint: Checkpoint, subfolders: Collection[str]) -> None:
    """Check the files of these subfolders, and model_index.json. Raises CheckpointError naming the file."""
    index = checkpoint.index
    path = checkpoint.root / "model_index.json"
    _ = checkpoint.family  # raises for a pipeline of another kind
    for key in _FLAGS:
        if type(index.get(key, True)) is not bool:
            raise CheckpointError(f"{path}: {key} is {index[key]!r:.80}.", "Set true or false.")
    for key, value in index.items():
        if key not in (*_CLASSES, *_FLAGS, *_UNUSED_ENTRIES) and value not in (None, [None, None]):
            raise CheckpointError(
                f"{path}: {key:.80} is {value!r:.80}, and nothing here reads this entry.",
                f"Remove {key:.80}, if the pipeline generates the same images without it.",
            )
    for subfolder in subfolders:
        entry = index.get(subfolder)
        if not isinstance(entry, list) or [type(part) for part in entry] != [str, str]:
            raise CheckpointError(
                f"{path}: {subfolder} is {entry!r:.80}, expected the names of a library and a class.",
                f'Set "{subfolder}": {_example_entry(subfolder)}.',
            )
        _check_class(path, f"class of {subfolder}", entry[1], _CLASSES.get(subfolder))
        check_folder(checkpoint.folder(subfolder))
    for subfolder in ("unet", "vae"):
        _check_class(*_config_class(checkpoint, subfolder, "_class_name"), _CLASSES[subfolder])
    for subfolder in {"text_encoder", "text_encoder_2"} & set(subfolders):
        path, key, value = _config_class(checkpoint, subfolder, "architectures")
        _check_class(path, key, value[0] if isinstance(value, list) and len(value) == 1 else value, _CLIP)


def _example_entry(subfolder: str) -> str:
    """Return the usual entry of a subfolder in model_index.json."""
    library = "transformers" if subfolder.startswith("te") or subfolder.startswith("to") else "diffusers"
    return json.dumps([library, _CLASSES.get(subfolder, ("EulerDiscreteScheduler",))[0]])


def check_tokenizer(checkpoint: Checkpoint, tokenizer: str, encoders: Collection[tuple[Checkpoint, str]]) -> None:
    """Parse a tokenizer as a server does, and check that its text encoders take its ids. Raises CheckpointError.

    `encoders`: the text encoders, as checkpoint and subfolder.
    """
    folder = checkpoint.root / tokenizer
    try:
        data, settings = export_tokenizer(folder)
    except MissingComponent as error:
        raise CheckpointError(error.args[0], error.remedy) from error
    try:
        ClipTokenizer(data, settings)
    except MissingComponent as error:
        raise CheckpointError(f"{folder} is not a CLIP tokenizer: {error.args[0]}", DOWNLOAD_AGAIN) from error
    largest = max(Tokenizer.from_buffer(data).get_vocab(with_added_tokens=True).values())
    for encoder_checkpoint, subfolder in encoders:
        config, path = encoder_checkpoint.config(subfolder), encoder_checkpoint.folder(subfolder) / "config.json"
        if (positions := config.size("max_position_embeddings")) != settings.max_length:
            raise CheckpointError(
                f"{folder} encodes a prompt as {settings.max_length} tokens, but {path} takes {positions}.",
                "Set model_max_length in its tokenizer_config.json to max_position_embeddings, 77 for CLIP.",
            )
        if largest >= (size := config.size("vocab_size")):
            raise CheckpointError(
                f"{folder} has a token {largest}, but the vocabulary in {path} has {size} tokens.",
                "Use the tokenizer and the text encoder of one model.",
            )


def read_shapes(checkpoint: Checkpoint, subfolder: str) -> Shapes:
    """Read the headers of a subfolder's weights. Raises CheckpointError for a file that is damaged or incomplete."""
    shapes: Shapes = {}
    for path in weight_files(checkpoint, subfolder):
        size = path.stat().st_size
        if size > _WEIGHTS_LIMIT:
            raise CheckpointError(f"{path} has {size:,} bytes, more than {_WEIGHTS_LIMIT:,}.", DOWNLOAD_AGAIN)
        shapes |= read_tensor_shapes(path)
    return shapes


def check_folder(folder: Path) -> None:
    """Read every JSON and text file of a folder, and refuse weights that are no regular files.

    The libraries would wait for a pipe or a device.
    """
    try:
        paths = sorted(Path(entry.path) for entry in os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return  # the later reader of the folder names the missing file
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}.", DOWNLOAD_AGAIN) from error
    for path in paths:
        if path.suffix == ".json":
            read_json(path)
        elif path.suffix in _TEXT_SUFFIXES:
            read_small_file(path)
        elif path.suffix == ".safetensors":
            _check_regular(path)


def _check_regular(path: Path) -> None:
    try:
        if stat.S_ISREG(path.stat().st_mode):
            return
        reason = "it is not a regular file"
    except OSError as error:
        reason = error.strerror or str(error)
    raise CheckpointError(f"{path} cannot be read: {reason}.", DOWNLOAD_AGAIN)


def _config_class(checkpoint: Checkpoint, subfolder: str, key: str) -> tuple[Path, str, Any]:
    return checkpoint.folder(subfolder) / "config.json", key, checkpoint.config(subfolder).get(key)


def _check_class(path: Path, key: str, name: Any, accepted: tuple[str, ...] | None) -> None:
    """Check a class name in a file. A missing name is accepted, because old configurations lack it."""
    if accepted is not None and name is not None and name not in accepted:
        raise CheckpointError(f"{path}: {key} is {name!r:.80}, expected {' or '.join(accepted)}.")
