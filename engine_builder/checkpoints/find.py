"""Find a checkpoint: a folder, a single file, which is converted to one, or a repository of the Hugging Face Hub."""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from engine_builder.checkpoints.presets import PRESETS, Preset
from engine_builder.checkpoints.single_file import CACHE, Report, convert_checkpoint, convert_vae, ignore_progress
from engine_builder.checkpoints.single_file_header import PICKLES, read_header
from model.pipeline.components import COMPONENTS

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_PATH = rf"(?:\w[\w. ()+,@-]*/)*\w[\w. ()+,@-]*\.(?:safetensors|{'|'.join(suffix[1:] for suffix in PICKLES)})"
_HUB_FILE = re.compile(rf"({_HUB_ID.pattern})/({_FILE_PATH})")
_SETTINGS_PATTERNS = ["*.json", "*.txt"]
_VAE_PATTERNS = ["diffusion_pytorch_model*.safetensors"]  # of a repository that is a VAE; models have none at the top
Convert = Callable[[Path], Path]


def find_checkpoint_folder(name: str, convert: Convert = convert_checkpoint) -> Path:
    """Return the folder of a model or of a VAE. `name`: a folder, a single file, a Hub id, or a Hub id and a file.

    A single file is converted by `convert`. A repository of the Hub is downloaded to the Hub's cache: of each network's
    weights only the fp16 files, or all files if the network has no fp16 files. A repeated call continues an interrupted
    download. Raises CheckpointError for other names and files, or if the download fails.
    """
    if os.path.isdir(name):  # Path.is_dir raises for a name that is too long, and without permission
        return Path(name)
    if os.path.isfile(name):
        return _convert_file(Path(name), convert)
    if _HUB_ID.fullmatch(name):
        return _download(name)
    if (match := _HUB_FILE.fullmatch(name)) and Path(name).suffix in PICKLES:
        raise CheckpointError(
            f"{name} may hold a pickle, which can run code. It was not downloaded.",
            "Name a .safetensors file of this repository, or the repository.",
        )
    if match:
        return convert(_download_file(match[1], match[2]))
    raise CheckpointError(
        f"{name} is neither a folder nor a file nor a Hub id (owner/model, or owner/model/file.safetensors)."
    )


def find_checkpoints(
    model: str, refiner: str | None, vae: str | None = None, preset: str | None = None, config: str | None = None,
    cache: Path = CACHE, report: Report = ignore_progress,
) -> tuple[Checkpoint, Checkpoint | None]:  # fmt: skip
    """Return the base checkpoint and the refiner's. `model`, `refiner`, `vae`: as for `find_checkpoint_folder`.

    `vae`: a VAE, or a model whose VAE replaces the base's. `preset`: a name in `presets`. `config`: a folder with the
    configs of the base's single file, and of the refiner's in its subfolder `refiner/`. `cache`: the folder of
    converted files. `report`: is called with a sentence about each step of a conversion.
    If `refiner` is None or empty, the refiner is the subfolder `refiner/` of the base, or None if the subfolder has no
    model_index.json. Raises CheckpointError if a folder has no model_index.json, and like `find_checkpoint_folder`.
    """
    configs = Path(config) if config is not None else None
    if configs is not None and (os.path.isdir(model) or _HUB_ID.fullmatch(model)):
        raise CheckpointError(f"{model} has configs of its own.", "Leave out --config, which is for single files.")
    if config is not None and not os.path.isdir(config):
        raise CheckpointError(f"{config} is not a folder.", "Name a folder with the configs of a model with --config.")
    convert = partial(convert_checkpoint, cache=cache, report=report)
    base_folder = find_checkpoint_folder(model, partial(convert, config=configs, vae_given=bool(vae)))
    _check_has_index(base_folder, model)
    vae_folder = None
    if vae:
        vae_folder = find_checkpoint_folder(vae, partial(convert_vae, model=base_folder, cache=cache, report=report))
        vae_folder = vae_folder / "vae" if _has_index(vae_folder) else vae_folder
    base = Checkpoint(base_folder, vae_folder, _find_preset(preset) if preset is not None else None)
    if refiner:
        refiner_configs = configs / "refiner" if configs is not None and _has_index(configs / "refiner") else None
        refiner_folder = find_checkpoint_folder(refiner, partial(convert, config=refiner_configs))
        _check_has_index(refiner_folder, refiner)
        return base, Checkpoint(refiner_folder)
    if _has_index(base_folder / "refiner"):
        return base, Checkpoint(base_folder / "refiner")
    return base, None


def _convert_file(path: Path, convert: Convert) -> Path:
    """Convert a single file. Raises CheckpointError, also for a file of a folder in diffusers' layout."""
    if (path.parent / "config.json").is_file():
        read_header(path)  # raises for other formats
        raise CheckpointError(f"{path} is a file of a folder in diffusers' layout.", f"Name the folder {path.parent}.")
    return convert(path)


def _find_preset(name: str) -> Preset:
    if name not in PRESETS:
        raise CheckpointError(f"There is no preset {name!r:.80}.", f"Choose one of {', '.join(PRESETS)}.")
    return PRESETS[name]


def _download(hub_id: str) -> Path:
    """Download a Hub repository and return its folder in the Hub's cache. Raises CheckpointError."""
    folders = dict.fromkeys(spec.checkpoint_folder for spec in COMPONENTS.values())
    subfolders = [f"{root}{folder}" for root in ("", "refiner/") for folder in folders]
    fp16_patterns = [f"{subfolder}/*.fp16*.safetensors" for subfolder in subfolders]
    what = f"{hub_id} is not a folder, and"
    snapshot = _fetch(hub_id, [*_SETTINGS_PATTERNS, *fp16_patterns, *_VAE_PATTERNS], what)
    # Search every subfolder, also one with files: an interrupted download leaves some of the files.
    downloaded = [subfolder for subfolder in subfolders if (snapshot / subfolder).is_dir()]
    if without_fp16 := [name for name in downloaded if not any((snapshot / name).glob("*.fp16*.safetensors"))]:
        _fetch(hub_id, [f"{subfolder}/*.safetensors" for subfolder in without_fp16], what, revision=snapshot.name)
    return snapshot


def _download_file(hub_id: str, file: str) -> Path:
    """Download one file of a Hub repository and return its path in the Hub's cache. Raises CheckpointError."""
    path = _fetch(hub_id, [file], f"{file} of {hub_id}") / file
    if not path.is_file():
        raise CheckpointError(f"{hub_id} has no {file}.", "Check the name of the file on the repository's page.")
    return path


def _fetch(hub_id: str, patterns: list[str], what: str, revision: str | None = None) -> Path:
    """Download files of a Hub repository and return its folder in the Hub's cache. Raises CheckpointError.

    what: the beginning of the error's sentence.
    """
    from huggingface_hub import errors, snapshot_download

    http_error = errors.HTTPError  # type: ignore[attr-defined]  # the base class of the Hub client's HTTP errors
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except (http_error, errors.HFValidationError, OSError) as error:
        raise CheckpointError(
            f"{what} could not be downloaded from the Hub: {str(error).rstrip('.')}.",
            "Check the name, the connection and the free disk space, and run the command again.",
        ) from error


def _check_has_index(folder: Path, requested: str) -> None:
    """Raise CheckpointError unless the folder has a model_index.json. `requested`: the user's folder or Hub id."""
    if not _has_index(folder):
        files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
        if files and not (folder / "config.json").is_file():
            raise CheckpointError(
                f"{requested} has no model_index.json, but single files: {', '.join(x.name for x in files)[:200]}.",
                f"Name the file of the checkpoint, for example {files[0]}.",
            )
        raise CheckpointError(f"{requested} has no model_index.json.")


def _has_index(folder: Path) -> bool:
    """Return True if a file model_index.json exists, also as a pipe or a broken link.

    Reading such a file fails with an error that names the cause.
    """
    return os.path.lexists(folder / "model_index.json")
