"""The name of a model -> a folder in diffusers' layout: a folder on disk, or a download from the Hub."""

import re
from pathlib import Path

from engine_builder.networks.network import (
    ModelFolder,
    ModelFolderError,
)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SETTINGS = ["*.json", "*.txt"]
_PARTS = [f"{root}{part}" for root in ("", "refiner/") for part in ("text_encoder", "text_encoder_2", "unet", "vae")]


def find_model(name: str) -> Path:
    """The folder `name`, or the Hub's repository of that id: of each part the fp16 weights where it has them, else all.

    Raises ModelFolderError: no such folder and no Hub id, or a download that failed. The next one goes on from there.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    if not _HUB_ID.fullmatch(name):
        raise ModelFolderError(f"There is no folder {name}, and it is no Hub id (owner/model) either.")
    from huggingface_hub import errors, snapshot_download

    broken_off = errors.HTTPError  # type: ignore[attr-defined]  # of the HTTP client that its version has
    try:
        halves = [f"{part}/*.fp16*.safetensors" for part in _PARTS]
        path = Path(snapshot_download(name, allow_patterns=_SETTINGS + halves))
        # Also those of which something is here: a fetch that broke off leaves some of a part's files.
        parts = [part for part in _PARTS if (path / part).is_dir()]
        plain = [part for part in parts if not any((path / part).glob("*.fp16*.safetensors"))]
        if plain:
            patterns = [f"{part}/*.safetensors" for part in plain]
            snapshot_download(name, revision=path.name, allow_patterns=patterns)
    except (broken_off, errors.HFValidationError, OSError) as error:
        raise ModelFolderError(f"There is no folder {name}, and the Hub did not give it: {error}") from error
    return path


def find_folders(model: str, refiner: str | None) -> tuple[ModelFolder, ModelFolder | None]:
    """The base's folder and the refiner's: the one named, or the base's own `refiner/` where it has one."""
    base = find_model(model)
    own = base / "refiner"
    chosen = find_model(refiner) if refiner else own if (own / "model_index.json").is_file() else None
    for folder in (base, chosen):
        if folder is not None and not (folder / "model_index.json").is_file():
            raise ModelFolderError(f"{folder} has no model_index.json: give a folder in diffusers' layout.")
    return ModelFolder(base), ModelFolder(chosen) if chosen else None
