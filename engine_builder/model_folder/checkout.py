"""The name of a model -> a folder in diffusers' layout: a folder on disk, or a download from the Hub."""

import re
from pathlib import Path

from engine_builder.networks import ModelFolder, ModelFolderError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SETTINGS = ["*.json", "*.txt"]


def find_model(name: str) -> Path:
    """The folder `name`, or the Hub's repository of that id (fp16 weights where it has them).

    Raises ModelFolderError: no such folder and no Hub id, or a download that failed.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    if not _HUB_ID.fullmatch(name):
        raise ModelFolderError(f"There is no folder {name}, and it is no Hub id (owner/model) either.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        path = Path(snapshot_download(name, allow_patterns=[*_SETTINGS, "*.fp16.safetensors"]))
        if not list(path.glob("unet/*.safetensors")):
            path = Path(snapshot_download(name, allow_patterns=[*_SETTINGS, "*/*.safetensors"]))
    except (HfHubHTTPError, OSError) as error:
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
