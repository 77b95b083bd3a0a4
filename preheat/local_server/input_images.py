"""Read image files for the fields `image`, `masks`, `controls` and `ip_adapters` of a request."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine_builder.error_text import cause_of
from engine_builder.files import read_file
from model.images.containers import detect_format
from model.images.inputs import MAX_FILE_BYTES
from preheat.local_server.client import CallFailed

_REMEDY = f"Name a PNG, JPEG or WebP file of at most {MAX_FILE_BYTES // 2**20} MiB."


def read_image_file(path: Path) -> str:
    """Return a PNG, JPEG or WebP file as base64. Raises CallFailed if it cannot be read, or is none."""
    try:
        data = read_file(path, max_bytes=MAX_FILE_BYTES)
    except OSError as error:
        raise CallFailed(f"{path} cannot be read: {error.strerror or error}.", remedy=_REMEDY) from error
    except ValueError as error:  # a NUL in the path
        raise CallFailed(f"{str(path)!r} is not the name of a file: {cause_of(error)}.", remedy=_REMEDY) from error
    if detect_format(data) is None:
        raise CallFailed(f"{path} is not a PNG, JPEG or WebP file.", remedy=_REMEDY)
    return base64.b64encode(data).decode()


def masks_of(paths: list[Path], feather: float, given: Mapping[str, Sequence[Any] | None]) -> list[dict[str, Any]]:
    """Return the field `masks` of a request. `given`: values of each further field, see `_spread`.

    Raises CallFailed for a blur without masks, another number of values, and for files that cannot be read.
    """
    if feather and not paths:
        raise CallFailed("--feather needs --mask.", remedy="Give --mask FILE.")
    masks: list[dict[str, Any]] = [{"image": read_image_file(path), "feather": feather} for path in paths]
    _spread(masks, "mask", given)
    return masks


def controls_of(texts: list[str], canny: bool, given: Mapping[str, Sequence[Any] | None]) -> list[dict[str, Any]]:
    """Return the field `controls` of a request, from "NAME=FILE". `given`: as for `masks_of`.

    `canny`: the files are pictures whose edges are used. Raises CallFailed for a text without a name or file, another
    number of values, and for files that cannot be read.
    """
    if canny and not texts:
        raise CallFailed("--canny needs --control.", remedy="Give --control NAME=FILE.")
    controls: list[dict[str, Any]] = []
    for text in texts:
        name, _, path = text.partition("=")
        if not name or not path:
            raise CallFailed(f"{text!r} is not NAME=FILE.", remedy="For example: --control edges=edges.png.")
        controls.append({"name": name, "image": read_image_file(Path(path))})
        if canny:
            controls[-1]["preprocess"] = "canny"
    _spread(controls, "control", given)
    return controls


def _spread(entries: list[dict[str, Any]], option: str, given: Mapping[str, Sequence[Any] | None]) -> None:
    """Set fields of the entries of --`option`. `given`: field -> a value for each entry in order, or no values."""
    for field, values in given.items():
        if values and len(values) != len(entries):
            own = f"--{option}-{field.replace('_', '-')}"
            raise CallFailed(
                f"{own} was given {len(values)} times for {len(entries)} of --{option}.",
                remedy=f"Give one {own} for each --{option}, in the same order, or none.",
            )
        for entry, value in zip(entries, values or (), strict=False):
            entry[field] = value


def ip_adapters_of(texts: list[str]) -> list[dict[str, Any]]:
    """Return the field `ip_adapters` of a request, from "NAME=FILE" or "NAME=FILE@SCALE" of each image.

    Texts with the same name are the images of one adapter. Raises CallFailed for a text without a name or file, two
    scales of one adapter, and for files that cannot be read.
    """
    adapters: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, _, path = text.partition("=")
        file, at, scale_text = path.rpartition("@")
        try:
            scale = float(scale_text) if at else None
        except ValueError:
            at = ""  # of the file's name
        if not at:
            file, scale = path, None
        if not name or not file:
            raise CallFailed(
                f"{text!r} is not NAME=FILE or NAME=FILE@SCALE.",
                remedy="For example: --ip-adapter style=photo.png@0.6.",
            )
        adapter = adapters.setdefault(name, {"name": name, "images": []})
        adapter["images"].append(read_image_file(Path(file)))
        if scale is not None and adapter.setdefault("scale", scale) != scale:
            raise CallFailed(
                f"Two scales were given for the IP-Adapter {name}.",
                remedy="Give one: all its images have the same scale.",
            )
    return list(adapters.values())
