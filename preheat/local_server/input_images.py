"""Read image files for the fields `image`, `masks`, `controls` and `ip_adapters` of a request."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine_builder.error_text import cause_of
from engine_builder.files import read_file
from model.images.containers import detect_format
from model.images.inputs import MAX_FILE_BYTES
from preheat.console import print_warning
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
    """Return the field `masks` of a request. `given`: further field -> a value for each mask in order.

    Raises CallFailed for a blur without masks, another number of values, and for files that cannot be read.
    """
    if feather and not paths:
        raise CallFailed("--feather needs --mask.", remedy="Give --mask FILE.")
    masks: list[dict[str, Any]] = [{"image": read_image_file(path), "feather": feather} for path in paths]
    for field, values in given.items():
        if values and len(values) != len(masks):
            own = f"--mask-{field.replace('_', '-')}"
            raise CallFailed(
                f"{own} was given {len(values)} times for {len(masks)} of --mask.",
                remedy=f"Give one {own} for each --mask, in the same order, or none.",
            )
        for mask, value in zip(masks, values or (), strict=False):
            mask[field] = value
    return masks


def controls_of(texts: list[str], canny: bool, numbers: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Return the field `controls` of a request, from "NAME=FILE" of each. `numbers`: field -> texts of `_set_numbers`.

    `canny`: the files are pictures whose edges are used. Raises CallFailed for a text without a name or file, a name
    that occurs twice, and for files that cannot be read.
    """
    if canny and not texts:
        raise CallFailed("--canny needs --control.", remedy="Give --control NAME=FILE.")
    controls: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, file = _split(text, "--control", "NAME=FILE", "edges=edges.png")
        if name in controls:
            raise CallFailed(f"--control names {name} twice.", remedy="Give one image for each ControlNet.")
        controls[name] = {"name": name, "image": read_image_file(Path(file))}
        if canny:
            controls[name]["preprocess"] = "canny"
    for field, given in numbers.items():
        _set_numbers(controls, "--control", field, given)
    return list(controls.values())


def ip_adapters_of(texts: list[str], scales: Sequence[str]) -> list[dict[str, Any]]:
    """Return the field `ip_adapters` of a request, from "NAME=FILE" of each image. `scales`: texts of `_set_numbers`.

    Texts with the same name are the images of one adapter. Raises CallFailed for a text without a name or file, and for
    files that cannot be read.
    """
    adapters: dict[str, dict[str, Any]] = {}
    scales = list(scales)
    for text in texts:
        name, file = _split(text, "--ip-adapter", "NAME=FILE", "style=photo.png")
        before, _, scale = file.rpartition("@")
        if before and not Path(file).exists() and _number(scale, float) is not None:
            print_warning(
                f"--ip-adapter NAME=FILE@SCALE is now --ip-adapter NAME=FILE --ip-adapter-scale {name}={scale}"
            )
            file = before
            scales.append(f"{name}={scale}")
        adapter = adapters.setdefault(name, {"name": name, "images": []})
        adapter["images"].append(read_image_file(Path(file)))
    _set_numbers(adapters, "--ip-adapter", "scale", scales)
    return list(adapters.values())


def _set_numbers(entries: Mapping[str, dict[str, Any]], option: str, field: str, texts: Sequence[str]) -> None:
    """Set a field of named entries, from "NAME=NUMBER" of each.

    Numbers without names, an older spelling, are of all entries in their order. Raises CallFailed for a name that is
    unknown or has two numbers, and for another number of values.
    """
    own = f"{option}-{field}"
    if texts and not any("=" in text for text in texts):
        if len(texts) != len(entries):
            raise CallFailed(
                f"{own} was given {len(texts)} times for {len(entries)} of {option}.",
                remedy=f"Give {own} NAME=NUMBER, with a name of {option}.",
            )
        texts = [f"{name}={text}" for name, text in zip(entries, texts, strict=True)]
        print_warning(f"{own} NUMBER is now {own} NAME=NUMBER: {' '.join(f'{own} {text}' for text in texts)}")
    for text in texts:
        name, value = _split(text, own, "NAME=NUMBER", "edges=1")
        number = _number(value, int if field == "mode" else float)
        if number is None:
            raise CallFailed(f"{own}: {value!r} is not a number.", remedy=f"For example: {own} {name}=1.")
        if name not in entries:
            raise CallFailed(f"{own}: {name} has no image.", remedy=f"Give {option} {name}=FILE, too.")
        if entries[name].setdefault(field, number) != number:
            raise CallFailed(f"{own}: {name} has two numbers.", remedy="Give one.")


def _split(text: str, option: str, form: str, example: str) -> tuple[str, str]:
    """Split "NAME=VALUE". Raises CallFailed if one of them is missing."""
    name, _, value = text.partition("=")
    if not name or not value:
        raise CallFailed(f"{option}: {text!r} is not {form}.", remedy=f"For example: {option} {example}.")
    return name, value


def _number(text: str, kind: type[int] | type[float]) -> float | None:
    try:
        return kind(text)
    except ValueError:
        return None
