"""JSON that a stranger may have written -> a manifest, a map of constants, a release's name; or one sentence.

Releases live longer than programs, so reading is strict both ways: unknown and repeated keys are refused, types are as
JSON has them, and a manifest of a newer schema is refused with its own sentence.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from model.errors import ManifestError
from model.store.manifest import MANIFEST_LIMIT, SCHEMA_VERSION, Constant, Manifest

_SHOWN = 120  # characters of a damaged manifest's own words that a message repeats
_CONSTANTS = TypeAdapter(dict[str, Constant])


def parse_constants(data: bytes) -> dict[str, Constant]:
    """Read an engine's map of constants: constant of the compiled code -> tensor. Raises ManifestError."""
    try:
        return _CONSTANTS.validate_json(data, strict=True)
    except ValidationError as error:
        raise ManifestError(f"The engine's map of constants is damaged at {_problem(error)}.") from error


def split_name(name: str) -> tuple[str, str]:
    """ "model/version" -> its two halves. Names are data: anything that could leave the store's folder is refused."""
    parts = name.split("/")
    if len(parts) != 2 or not all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", part) for part in parts):
        raise ManifestError(
            f"{_shown(name)!r} is no release name: write model/version, for example tiny-sdxl/1 "
            "(letters, digits, '.', '_', '-')."
        )
    return parts[0], parts[1]


def parse_manifest(data: bytes, name: str) -> Manifest:
    """Read a manifest and check it against the name it was asked for.

    Raises ManifestError: not JSON, too large, a newer schema, a missing, unknown, repeated or unsafe entry, another's
    name.
    """
    if len(data) > MANIFEST_LIMIT:
        raise ManifestError(
            f"The manifest of {name} has more than {MANIFEST_LIMIT} bytes, which no release needs: "
            "publish the release again (`preheat publish`)."
        )
    try:
        raw = json.loads(data, object_pairs_hook=_no_key_twice, parse_constant=_no_constant, parse_float=_no_infinity)
    except (ValueError, RecursionError) as error:
        raise ManifestError(
            f"The manifest of {name} is not JSON ({_shown(str(error))}): publish the release again (`preheat publish`)."
        ) from error
    if not isinstance(raw, Mapping):
        raise ManifestError(
            f"The manifest of {name} is not a JSON object: publish the release again (`preheat publish`)."
        )
    version = raw.get("schema_version")
    if type(version) is not int:
        raise ManifestError(
            f"The manifest of {name} does not say its schema_version: publish the release again (`preheat publish`)."
        )
    if version > SCHEMA_VERSION:
        raise ManifestError(
            f"The manifest of {name} has schema {_shown(str(version))}; this server reads up to {SCHEMA_VERSION}: "
            "upgrade Preheat, or build the release with this version (`preheat build`)."
        )
    try:
        # From the bytes, because only then does strict mean JSON's types: a list for a tuple, but no "3" for 3.
        manifest = Manifest.model_validate_json(data, strict=True)
    except ValidationError as error:
        raise ManifestError(
            f"The manifest of {name} is damaged at {_problem(error)}. Publish the release again (`preheat publish`)."
        ) from error
    if manifest.name != name:
        raise ManifestError(
            f"The manifest under the name {name} is that of {manifest.name}: publish it under its own name "
            "(`preheat publish`)."
        )
    return manifest


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Readers disagree on which of two equal keys counts, so a file that has them says different things to each."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _no_constant(literal: str) -> NoReturn:
    raise ValueError(f"{literal} is no number of JSON's")


def _no_infinity(literal: str) -> float:
    """What no float holds would be written as a constant that is no JSON."""
    value = float(literal)
    if math.isinf(value):
        raise ValueError(f"{literal[:20]} is past what a number holds")
    return value


def _problem(error: ValidationError) -> str:
    """ "where: what", of the first thing that is wrong."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the top"
    return _shown(where) + ": " + _shown(first["msg"].removeprefix("Value error, "))


def _shown(text: str) -> str:
    """A stranger's words, fit for one line of a log."""
    printable = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
    return printable if len(printable) <= _SHOWN else printable[:_SHOWN] + "..."
