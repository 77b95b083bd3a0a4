"""Read how an image was made from the text in its file, as a request to a server of Preheat.

Texts of three programs are read: AUTOMATIC1111's web UI and programs that write the same (the PNG chunk `parameters`,
or EXIF's UserComment), ComfyUI (the PNG chunk `prompt`, the graph as JSON) and Preheat itself. What has no field in a
request, or no value that is served, is named in a note.
"""

import io
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError
from pydantic import ValidationError

from engine_builder.error_text import cause_of
from engine_builder.files import read_file
from model.errors import PreheatError
from model.images.metadata import DIGEST, KEYWORD, read_text, user_comment
from model.request_fields import GenerationRequest
from preheat.image_texts import a1111, comfyui

_MAX_BYTES = 64 * 2**20
_FORMATS = ("PNG", "JPEG", "WEBP")
Fields = dict[str, Any]


class BadImageText(PreheatError):
    """The file is not an image, or does not state how it was made."""

    remedy = "Give the file as the program wrote it: most sites and messengers remove its text."


def read_request(path: Path) -> tuple[Fields, list[str]]:
    """Return the request of an image's file, and notes about what it leaves out. Raises BadImageText."""
    texts = _texts(path)
    try:
        if KEYWORD in texts:
            own = json.loads(texts[KEYWORD])
            if not isinstance(own["request"], dict) or not isinstance(own["request"].get("prompt"), str):
                raise ValueError("it has no request with a prompt")
            notes = [
                f"The release is {own['release']}. On a server of several releases add it to the request as `model`."
            ]
            if digests := sorted(_digests(own["request"])):
                notes.append(f"Put the files in the place of their digests: {', '.join(digests)}.")
            return own["request"], notes
        if "parameters" in texts:
            found = a1111.translate(texts["parameters"])
        elif "prompt" in texts:
            found = comfyui.translate(json.loads(texts["prompt"]))
        else:
            raise BadImageText(f"{path} has no text of A1111, ComfyUI or Preheat.")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadImageText(f"{path} has a text that cannot be read ({cause_of(error)[:200]}).") from error
    return _valid(found.fields, found.notes, path), found.notes


def _digests(value: Any, name: str = "") -> Iterator[str]:
    """Yield the names of the files in a request of Preheat's own text, which has their digests."""
    if isinstance(value, str) and value.startswith(DIGEST):
        yield name
    elif isinstance(value, dict | list):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _digests(entry, f"{name}.{key}" if name else str(key))


def _texts(path: Path) -> dict[str, str]:
    """Return the texts of a file by the keywords of PNG. Raises BadImageText."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of many pixels, which are not decoded
            with Image.open(io.BytesIO(read_file(path, _MAX_BYTES)), formats=_FORMATS) as image:
                texts = {str(key): value for key, value in image.info.items() if isinstance(value, str)}
                comment = user_comment(image)
                own = read_text(image)
    except UnidentifiedImageError as error:
        raise BadImageText(f"{path} is not a PNG, JPEG or WebP file.") from error
    except FileNotFoundError as error:
        raise BadImageText(f"{path} does not exist.", "Check the path.") from error
    except Exception as error:  # Pillow raises many types for a damaged file
        raise BadImageText(f"{path} cannot be read as an image ({cause_of(error)[:200]}).") from error
    if comment.startswith(b"UNICODE\0"):
        both = [comment[8:].decode(codec, errors="replace") for codec in ("utf-16-be", "utf-16-le")]
        texts.setdefault("parameters", next((text for text in both if "Steps: " in text), both[0]))
    return texts | ({KEYWORD: own} if own.startswith("{") else {})


def _valid(fields: Fields, notes: list[str], path: Path) -> Fields:
    """Return the fields that a request accepts; a note names each of the others. Raises BadImageText."""
    try:
        GenerationRequest.model_validate(fields)
    except ValidationError as error:
        bad = {str(problem["loc"][0]).partition(".")[0] if problem["loc"] else "" for problem in error.errors()}
        if "prompt" in bad or not bad <= fields.keys():
            reason = next((one["msg"] for one in error.errors() if one["loc"] == ("prompt",)), "")
            raise BadImageText(f"{path} states no valid prompt{reason and f' ({reason})'}.") from error
        notes += [f"{name} {json.dumps(fields[name])[:80]} is not valid in a request." for name in sorted(bad)]
        return _valid({name: value for name, value in fields.items() if name not in bad}, notes, path)
    return fields
