"""Find a checkpoint by name: a folder on disk, or a download from the Hugging Face Hub."""

import os
import re
from pathlib import Path

from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from model.pipeline.spec import SDXL

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SETTINGS_PATTERNS = ["*.json", "*.txt"]
_FOLDERS = dict.fromkeys(spec.checkpoint_folder for spec in SDXL.values())
_SUBFOLDERS = [f"{root}{name}" for root in ("", "refiner/") for name in _FOLDERS]


def find_model(name: str) -> Path:
    """Return the folder `name`, or download the Hub's repository of that id.

    For each network the fp16 weights are downloaded, or the plain ones if it has no fp16 weights. An interrupted
    download is continued. Raises CheckpointError if the name is neither a folder nor a Hub id, or if the download
    failed.
    """
    folder = Path(name)
    if os.path.isdir(folder):  # Path.is_dir raises for a name that is too long, and without permission
        return folder
    if not _HUB_ID.fullmatch(name):
        raise CheckpointError(f"{name} is neither a folder nor a Hub id (owner/model).")
    from huggingface_hub import errors, snapshot_download

    http_error = errors.HTTPError  # type: ignore[attr-defined]  # the base class of its HTTP client's errors
    try:
        fp16_patterns = [f"{subfolder}/*.fp16*.safetensors" for subfolder in _SUBFOLDERS]
        path = Path(snapshot_download(name, allow_patterns=_SETTINGS_PATTERNS + fp16_patterns))
        # Check all subfolders, also those with files: an interrupted download leaves some of them.
        existing = [subfolder for subfolder in _SUBFOLDERS if (path / subfolder).is_dir()]
        plain = [subfolder for subfolder in existing if not any((path / subfolder).glob("*.fp16*.safetensors"))]
        if plain:
            patterns = [f"{subfolder}/*.safetensors" for subfolder in plain]
            snapshot_download(name, revision=path.name, allow_patterns=patterns)
    except (http_error, errors.HFValidationError, OSError) as error:
        raise CheckpointError(
            f"{name} is not a folder, and could not be downloaded from the Hub: {str(error).rstrip('.')}.",
            "Check the name, the connection and the free disk space, and run the command again.",
        ) from error
    return path


def find_checkpoints(model: str, refiner: str | None) -> tuple[Checkpoint, Checkpoint | None]:
    """Return the base and the refiner: the named one, or the base's own subfolder `refiner/` if it exists.

    Raises CheckpointError.
    """
    base = find_model(model)
    refiner_folder: Path | None = None
    if refiner:
        refiner_folder = find_model(refiner)
    elif _has_index(base / "refiner"):
        refiner_folder = base / "refiner"
    for folder in (base, refiner_folder):
        if folder is not None and not _has_index(folder):
            raise CheckpointError(f"{folder} has no model_index.json.")
    return Checkpoint(base), Checkpoint(refiner_folder) if refiner_folder else None


def _has_index(folder: Path) -> bool:
    """True also for a pipe or a broken link: the error of reading it names the cause."""
    return os.path.lexists(folder / "model_index.json")
