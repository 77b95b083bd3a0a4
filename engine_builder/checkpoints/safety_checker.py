"""Find and check the folder of a safety checker, by its JSON files alone."""

from pathlib import Path
from typing import Any

from engine_builder.checkpoints.folder import Checkpoint, CheckpointError, read_json
from model.images.clip_input import DEVIATION, MEAN
from model.pipeline.spec import SAFETY_CHECKER

_CLASS = "StableDiffusionSafetyChecker"
_REMEDY = "Name a model folder with safety_checker/ (Stable Diffusion 1.5 has one), or such a folder itself."
_BICUBIC = 3  # in Pillow


def find_safety_checker(path: str) -> Path:
    """Return the folder of a safety checker: `path`, or safety_checker/ in it. Raises CheckpointError."""
    for folder in (Path(path), Path(path) / SAFETY_CHECKER):
        if (folder / "config.json").is_file():
            return folder
    raise CheckpointError(f"{path} has no config.json and no {SAFETY_CHECKER}/config.json.", _REMEDY)


def check_safety_checker(base: Checkpoint) -> None:
    """Check that the folder holds diffusers' safety checker, which sees images as CLIP does. Raises CheckpointError."""
    folder = base.folder(SAFETY_CHECKER)
    architectures = base.config(SAFETY_CHECKER).get("architectures")
    if architectures != [_CLASS]:
        raise CheckpointError(
            f"{folder}/config.json: architectures is {architectures!r:.80}, expected {[_CLASS]}.", _REMEDY
        )
    side = checked_side(base)
    path = folder.parent / "feature_extractor" / "preprocessor_config.json"
    try:
        found = read_json(path)
    except FileNotFoundError:
        return
    entries: dict[str, Any] = found if isinstance(found, dict) else {}
    expected = {
        "size": (side, {"shortest_edge": side}),
        "crop_size": (side, {"height": side, "width": side}),
        "resample": (_BICUBIC,),
        "image_mean": (list(MEAN),),
        "image_std": (list(DEVIATION),),
    }
    for key, accepted in expected.items():
        if key in entries and entries[key] not in accepted:
            raise CheckpointError(
                f"{path}: {key} is {entries[key]!r:.80}, and only CLIP's preparation of images is supported: "
                f"{accepted[0]!r}.",
                _REMEDY,
            )


def checked_side(base: Checkpoint) -> int:
    """Return the side in pixels of the images that the safety checker takes. Raises CheckpointError."""
    vision = base.config(SAFETY_CHECKER)["vision_config"]
    side = vision.get("image_size", 224) if isinstance(vision, dict) else None
    if type(side) is not int or not 0 < side <= 1024:
        raise CheckpointError(
            f"{base.folder(SAFETY_CHECKER)}/config.json: image_size of vision_config is {side!r:.80}.",
            "Set a whole number from 1 to 1024.",
        )
    return side
