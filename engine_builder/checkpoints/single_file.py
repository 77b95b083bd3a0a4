"""Convert a single-file checkpoint, or the VAE of one, to a folder in diffusers' layout. A file is converted once.

The names are converted by diffusers' own functions. They first convert the header, whose tensors have no data, so a
file that does not fit its family is refused before anything is read or written. Then one network is in memory at a
time. The folder appears in the cache when it is complete, under the digest of the file and of its configs.
"""

import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from engine_builder.checkpoints.clip_tokenizer import tokenizer_files
from engine_builder.checkpoints.folder import Checkpoint, CheckpointError, read_small_file, weight_files
from engine_builder.checkpoints.single_file_families import VAE_PREFIX
from engine_builder.checkpoints.single_file_header import (
    Header,
    SingleFile,
    check_foreign,
    check_types,
    read_header,
    read_single_file,
)
from engine_builder.error_text import cause_of
from engine_builder.networks.quiet import quiet_libraries

CACHE = Path(__file__).resolve().parents[2] / ".preheat" / "checkpoints"
_INDEX_SUFFIX = ".safetensors.index.json"
_VERSION = b"1"  # of the conversion
_CLASSES = {
    "unet": "UNet2DConditionModel",
    "vae": "AutoencoderKL",
    "text_encoder": "CLIPTextModel",
    "text_encoder_2": "CLIPTextModelWithProjection",
}
_MISSING_REMEDY = {"vae": "Give one with --vae FILE, or the folder of a whole model with --config."}
_TEXT_REMEDY = "Name the folder of a model of this family with --config: the networks that the file lacks are its own."
_OTHER_CONFIG = (
    "Download the file again. If the model has another architecture, name a folder with its configs with --config."
)
_OTHER_VAE = "Download the file again, or give a VAE of this model's family."
_SMALLEST_TYPE = torch.float16
_MORE_TENSORS = 8  # than a config describes, so that a few unknown ones are named


class Report(Protocol):
    """Is called with a sentence about each step of a conversion, and about what seems wrong in the file."""

    def __call__(self, sentence: str, is_warning: bool = False) -> None: ...


Files = dict[str, bytes]
"""The files of a folder that hold no weights, by their paths."""


def ignore_progress(sentence: str, is_warning: bool = False) -> None:
    """Show nothing."""


@dataclass(frozen=True, eq=False)
class Conversion:
    """A checkpoint that was found convertible. copied: subfolder -> weights of the networks that the file lacks."""

    single: SingleFile
    files: Files
    copied: Mapping[str, list[Path]]


def plan_conversion(path: Path, config: Path | None = None, vae_given: bool = False) -> Conversion:
    """Check that each network in the header has the tensors that its config describes. Raises CheckpointError.

    The arguments: see `convert_checkpoint`.
    """
    single = read_single_file(path, Checkpoint(config).config("unet").get("cross_attention_dim") if config else None)
    what = f"{path} is a single-file checkpoint of {single.description}"
    files = _config_files(single, config)
    copied = {name: _weights_of(config, name, what) for name in single.missing if name != "vae" or not vae_given}
    for name, prefix in single.networks.items():
        check_types(single.header, prefix)
        _check_network(name, prefix, single.header, files, what)
    return Conversion(single, files, copied)


def convert_checkpoint(
    path: Path,
    config: Path | None = None,
    vae_given: bool = False,
    cache: Path = CACHE,
    report: Report = ignore_progress,
) -> Path:
    """Return the folder of a converted checkpoint. Raises CheckpointError.

    config: a model folder whose configs and tokenizers replace the family's. Networks that the file lacks are
    copied from it. vae_given: the file may lack the VAE. report: is called with a sentence about each step.
    """
    plan = plan_conversion(path, config, vae_given)
    networks = plan.single.networks

    def write(folder: Path) -> None:
        for name, data in plan.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        for number, (name, prefix) in enumerate(networks.items(), 1):
            report(f"{path.name}: converting {name} ({number} of {len(networks)})")
            _write_network(name, prefix, plan.single.header, plan.files, folder)
        for name, paths in plan.copied.items():
            for weights in paths:
                shutil.copyfile(weights, folder / name / weights.name)

    for warning in plan.single.warnings:
        report(warning, is_warning=True)
    report(f"{path.name}: {plan.single.description}")
    weights = [weights for paths in plan.copied.values() for weights in paths]
    return _converted_once(path, plan.files, weights, cache, report, write)


def convert_vae(path: Path, model: Path, cache: Path = CACHE, report: Report = ignore_progress) -> Path:
    """Return the folder of a converted VAE: a file of a VAE alone, or the VAE of a checkpoint. Raises CheckpointError.

    model: the folder of the model whose VAE it replaces. Its config describes the new one.
    """
    header = read_header(path)
    check_foreign(header)
    prefix = next((one for one in (VAE_PREFIX, "vae.") if header.of(one)), "")
    names = {
        VAE_PREFIX + name.removeprefix(prefix): own
        for name, own in header.names.items()
        if name.startswith(prefix) and name.removeprefix(prefix).startswith(("encoder.", "decoder.", "quant_", "post_"))
    }
    header = Header(path, header.tensors, names, header.metadata)
    files = {"vae/config.json": json.dumps(Checkpoint(model).config("vae"), indent=2).encode()}
    what = f"{path} is the file of a VAE"
    if not names:
        raise CheckpointError(f"{path} has no VAE.", "Give --vae a file of a VAE, a folder or a Hub id.")
    check_types(header, VAE_PREFIX)
    _check_network("vae", VAE_PREFIX, header, files, what, _OTHER_VAE)

    def write(folder: Path) -> None:
        report(f"{path.name}: converting the VAE")
        _write_network("vae", VAE_PREFIX, header, files, folder)

    return _converted_once(path, files, [], cache, report, write) / "vae"


def _config_files(single: SingleFile, config: Path | None) -> Files:
    """Return the configs and tokenizers of a folder, with what the file states about its noise."""
    family = single.family
    if config is None:
        files = {name: json.dumps(entries, indent=2).encode() for name, entries in family.files().items()}
    else:
        folders = ("", "scheduler", *_CLASSES, "tokenizer", "tokenizer_2")
        found = [path for name in folders for path in sorted((config / name).glob("*")) if path.is_file()]
        files = {
            str(path.relative_to(config)): read_small_file(path)
            for path in found
            if path.suffix in (".json", ".txt")
            # Of weights in several files, which the checkpoint's replace.
            and not (path.name.endswith(_INDEX_SUFFIX) and path.parent.name in single.networks)
        }
        for name in ("model_index.json", "scheduler/scheduler_config.json"):
            Checkpoint(config).config(*os.path.split(name))  # raises if it is missing
    for name, pad in family.pads.items():
        if not any(file.startswith(f"{name}/") for file in files):
            files |= {f"{name}/{file}": data for file, data in tokenizer_files(pad).items()}
    changed = {"scheduler/scheduler_config.json": dict(single.scheduler)}
    if config is None and single.scheduler.get("prediction_type") == "epsilon":
        changed["unet/config.json"] = {"sample_size": 64}  # 2.1-base, which is the model of 512 pixels
    for name, entries in changed.items():
        files[name] = json.dumps(json.loads(files[name]) | entries, indent=2).encode()
    return files


def _weights_of(config: Path | None, name: str, what: str) -> list[Path]:
    """Return the weights of a network that the file lacks, from the folder of --config. Raises CheckpointError."""
    if config is None or not (config / name).is_dir():
        raise CheckpointError(f"{what}, and it has no {name}.", _MISSING_REMEDY.get(name, _TEXT_REMEDY))
    return weight_files(Checkpoint(config), name)


def _make_network(name: str, files: Files) -> Any:
    """Return a network without data. Raises CheckpointError."""
    import diffusers
    import transformers

    path = f"{name}/config.json"
    if path not in files:
        raise CheckpointError(f"The folder of --config has no {path}.", "Name the folder of a whole model.")
    try:
        entries = json.loads(files[path])
        with quiet_libraries(), torch.device("meta"):
            if name in ("unet", "vae"):
                return getattr(diffusers, _CLASSES[name]).from_config(entries)
            return getattr(transformers, _CLASSES[name])(transformers.CLIPTextConfig(**entries))
    except Exception as error:  # the libraries raise many types for an entry that they do not expect
        raise CheckpointError(
            f"{path} of --config describes no network ({cause_of(error)[:200]}).", "Use the config as it was published."
        ) from error


def _convert(name: str, prefix: str, tensors: dict[str, Tensor], network: Any) -> dict[str, Tensor]:
    """Return a network's tensors by diffusers' names. tensors: the network's, by their usual names."""
    from diffusers.loaders import single_file_utils

    library: Any = single_file_utils
    converted: dict[str, Tensor]
    plain = {key.removeprefix(prefix): one for key, one in tensors.items()}
    if plain.keys() == network.state_dict().keys():
        return plain
    if name == "unet":
        converted = library.convert_ldm_unet_checkpoint(tensors, config=dict(network.config))
    elif name == "vae":
        converted = library.convert_ldm_vae_checkpoint(tensors, config=dict(network.config))
    elif prefix.endswith("transformer."):
        converted = library.convert_ldm_clip_checkpoint(tensors)
    else:
        converted = library.convert_open_clip_checkpoint(network, tensors, prefix=prefix)
    if name == "text_encoder" and not hasattr(network, "text_model"):  # transformers 5 has no such level
        converted = {key.removeprefix("text_model."): one for key, one in converted.items()}
    return converted


def _check_network(
    name: str, prefix: str, header: Header, files: Files, what: str, remedy: str = _OTHER_CONFIG
) -> None:
    """Raise CheckpointError unless the header has the network's tensors, and each is used."""
    from diffusers.loaders.single_file_utils import SD_2_TEXT_ENCODER_KEYS_TO_IGNORE as UNREAD_LAYERS

    network = _make_network(name, files)
    shapes = {key: info.shape for key, info in header.of(prefix).items() if key not in UNREAD_LAYERS}
    most = len(network.state_dict())
    if len(shapes) > most + _MORE_TENSORS:  # the time of a conversion grows with the square of their number
        raise CheckpointError(
            f"{what}, but its {name} has {len(shapes):,} tensors, and its config describes {most:,}.", remedy
        )
    try:
        with quiet_libraries():
            tensors = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
            converted = {key: one for key, one in _convert(name, prefix, tensors, network).items() if one is not None}
    except Exception as error:  # a missing tensor raises KeyError, AttributeError or TypeError
        raise CheckpointError(f"{what}, and its {name} lacks {cause_of(error)[:200]}.", remedy) from error
    expected = {key: tuple(one.shape) for key, one in network.state_dict().items()}
    found = {key: tuple(one.shape) for key, one in converted.items()}
    problems = [
        ("lacks", [key for key in expected if key not in found]),
        ("also has", [key for key in found if key not in expected]),
        ("has other shapes in", [key for key, shape in expected.items() if found.get(key, shape) != shape]),
    ]
    for problem, keys in problems:
        if keys:
            others = f" and {len(keys) - 3:,} others" if len(keys) > 3 else ""
            raise CheckpointError(
                f"{what}, but its {name} {problem} {', '.join(f'{key:.100}' for key in keys[:3])}{others}.",
                remedy,
            )
    # A conversion only splits, turns and renames, so fewer numbers mean that a tensor was left out.
    used = sum(math.prod(shape) for shape in found.values())
    given = sum(map(math.prod, shapes.values()))
    if used != given:
        kept = {id(one if one._base is None else one._base) for one in converted.values()}
        unused = [key for key, one in tensors.items() if id(one) not in kept and "in_proj" not in key]
        raise CheckpointError(
            f"{what}, but its {name} also has {', '.join(f'{key:.100}' for key in unused[:3])}, which nothing reads.",
            remedy,
        )


def _write_network(name: str, prefix: str, header: Header, files: Files, folder: Path) -> None:
    """Convert the tensors of a network, and write them to its subfolder in the widest of their types."""
    network = _make_network(name, files)
    with safe_open(header.path, framework="pt") as file, quiet_libraries():
        tensors = {key: file.get_tensor(header.names[key]) for key in header.of(prefix)}
        dtype = reduce(torch.promote_types, {_kept_type(one.dtype) for one in tensors.values()})
        tensors = {key: one.to(dtype) for key, one in tensors.items()}
        converted = {key: one.contiguous() for key, one in _convert(name, prefix, tensors, network).items()}
        network.load_state_dict(converted, assign=True)
        network.save_pretrained(folder / name)


def _kept_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type that weights are written in: FP8 as fp16, which has all of its values, and fp64 as fp32."""
    if dtype.itemsize == 1:
        return _SMALLEST_TYPE
    return torch.float32 if dtype == torch.float64 else dtype


def _converted_once(
    path: Path,
    files: Files,
    weights: list[Path],
    cache: Path,
    report: Report,
    write: Callable[[Path], None],
) -> Path:
    """Return the folder for these inputs in the cache. If it is missing, write it. Raises CheckpointError."""
    report(f"{path.name}: computing its SHA-256")
    try:
        before = path.stat()
        settings = hashlib.sha256(_VERSION)
        for name, data in sorted(files.items()):
            settings.update(f"{name}\0{len(data)}\0".encode() + data)
        for file in weights:
            settings.update(_digest(file))
        folder = cache / f"{_digest(path).hex()}-{settings.hexdigest()[:16]}"
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{folder.name}.lock"):
            if folder.is_dir():
                report(f"{path.name}: was converted before, to {folder}")
                return folder
            temporary = cache / f"{folder.name}.tmp"
            shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
            try:
                temporary.mkdir()
                write(temporary)
                if (path.stat().st_mtime_ns, path.stat().st_size) != (before.st_mtime_ns, before.st_size):
                    raise CheckpointError(f"{path} changed while it was read.", "Run the command again.")
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be converted to {cache}: {cause_of(error)}.",
            "Free space on that disk.",
        ) from error
    report(f"{path.name}: converted to {folder}")
    return folder


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, so that two builds of one checkpoint convert it once."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
