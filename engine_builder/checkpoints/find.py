"""Find a checkpoint by its folder on disk, or download it from the Hugging Face Hub."""

import os
import re
from pathlib import Path

from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from engine_builder.checkpoints.presets import PRESETS, Preset
from engine_builder.checkpoints.single_file import refuse_file
from model.pipeline.components import COMPONENTS

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SINGLE_FILES = (".safetensors", ".ckpt")
_SETTINGS_PATTERNS = ["*.json", "*.txt"]
_VAE_PATTERNS = ["diffusion_pytorch_model*.safetensors"]  # of a repository that is a VAE; models have none at the top


def find_checkpoint_folder(folder_or_hub_id: str, vae_of: Path | None = None) -> Path:
    """Return an existing folder, or download the Hub repository with this id and return its folder in the Hub's cache.

    `vae_of`: the folder of the model if its VAE is looked for. Of each network's weights only the fp16 files are
    downloaded, or all files if the network has no fp16 files. A repeated call continues an interrupted download. Raises
    CheckpointError if the argument is neither a folder nor a Hub id, or if the download fails.
    """
    if os.path.isdir(folder_or_hub_id):  # Path.is_dir raises for a name that is too long, and without permission
        return Path(folder_or_hub_id)
    if os.path.isfile(folder_or_hub_id):
        raise refuse_file(Path(folder_or_hub_id), vae_of)
    if not _HUB_ID.fullmatch(folder_or_hub_id):
        raise CheckpointError(f"{folder_or_hub_id} is neither a folder nor a Hub id (owner/model).")
    return _download(folder_or_hub_id)


def find_checkpoints(
    model: str, refiner: str | None, vae: str | None = None, preset: str | None = None
) -> tuple[Checkpoint, Checkpoint | None]:
    """Return the base checkpoint and the refiner's. `model`, `refiner` and `vae` are a folder or a Hub id.

    `vae`: the folder of a VAE, or of a model whose VAE replaces the base's. `preset`: a name in `presets`.
    If `refiner` is None or empty, the refiner is the subfolder `refiner/` of the base, or None if the subfolder has no
    model_index.json. Raises CheckpointError if a folder has no model_index.json, and like `find_checkpoint_folder`.
    """
    base_folder = find_checkpoint_folder(model)
    _check_has_index(base_folder, model)
    vae_folder = find_checkpoint_folder(vae, base_folder) if vae else None
    if vae_folder is not None and _has_index(vae_folder):
        vae_folder = vae_folder / "vae"
    base = Checkpoint(base_folder, vae_folder, _find_preset(preset) if preset is not None else None)
    if refiner:
        refiner_folder = find_checkpoint_folder(refiner)
        _check_has_index(refiner_folder, refiner)
        return base, Checkpoint(refiner_folder)
    if _has_index(base_folder / "refiner"):
        return base, Checkpoint(base_folder / "refiner")
    return base, None


def _find_preset(name: str) -> Preset:
    if name not in PRESETS:
        raise CheckpointError(f"There is no preset {name!r:.80}.", f"Choose one of {', '.join(PRESETS)}.")
    return PRESETS[name]


def _download(hub_id: str) -> Path:
    """Download a Hub repository and return its folder in the Hub's cache. Raises CheckpointError."""
    from huggingface_hub import errors, snapshot_download

    http_error = errors.HTTPError  # type: ignore[attr-defined]  # the base class of the Hub client's HTTP errors
    folders = dict.fromkeys(spec.checkpoint_folder for spec in COMPONENTS.values())
    subfolders = [f"{root}{folder}" for root in ("", "refiner/") for folder in folders]
    try:
        fp16_patterns = [f"{subfolder}/*.fp16*.safetensors" for subfolder in subfolders]
        patterns = [*_SETTINGS_PATTERNS, *fp16_patterns, *_VAE_PATTERNS]
        snapshot = Path(snapshot_download(hub_id, allow_patterns=patterns))
        # Search every subfolder, also one with files: an interrupted download leaves some of the files.
        downloaded = [subfolder for subfolder in subfolders if (snapshot / subfolder).is_dir()]
        without_fp16 = [name for name in downloaded if not any((snapshot / name).glob("*.fp16*.safetensors"))]
        if without_fp16:
            patterns = [f"{subfolder}/*.safetensors" for subfolder in without_fp16]
            snapshot_download(hub_id, revision=snapshot.name, allow_patterns=patterns)
    except (http_error, errors.HFValidationError, OSError) as error:
        raise CheckpointError(
            f"{hub_id} is not a folder, and could not be downloaded from the Hub: {str(error).rstrip('.')}.",
            "Check the name, the connection and the free disk space, and run the command again.",
        ) from error
    return snapshot


def _check_has_index(folder: Path, requested: str) -> None:
    """Raise CheckpointError unless the folder has a model_index.json. `requested`: the user's folder or Hub id."""
    if not _has_index(folder):
        files = sorted(path for path in folder.glob("*") if path.suffix in _SINGLE_FILES and path.is_file())
        if files and not (folder / "config.json").is_file():
            error = refuse_file(files[0])
            raise CheckpointError(f"{requested} has no model_index.json. {error.args[0]}", error.remedy)
        raise CheckpointError(f"{requested} has no model_index.json.")


def _has_index(folder: Path) -> bool:
    """Return True if a file model_index.json exists, also as a pipe or a broken link.

    Reading such a file fails with an error that names the cause.
    """
    return os.path.lexists(folder / "model_index.json")
