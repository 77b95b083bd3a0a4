"""Parse untrusted text: manifests, maps of constants, and names of releases.

Releases outlive programs, so parsing is strict: unknown and repeated keys are refused, types are JSON's own, and a
manifest of a newer schema is refused with an error of its own.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from model.errors import ManifestError
from model.store.manifest import MANIFEST_LIMIT, SCHEMA_VERSION, Constant, Manifest

_MAX_SHOWN_CHARACTERS = 120  # of untrusted text that a message repeats
_CONSTANTS = TypeAdapter(dict[str, Constant])


def parse_constants(data: bytes) -> dict[str, Constant]:
    """Read an engine's map of constants: constant of the compiled code -> tensor. Raises ManifestError."""
    try:
        return _CONSTANTS.validate_json(data, strict=True)
    except ValidationError as error:
        raise ManifestError(f"The engine's map of constants is damaged at {problem(error)}.") from error


MAX_RELEASE_NAME = 257  # characters


def split_name(name: str) -> tuple[str, str]:
    """Return the parts of "model/version". Raises ManifestError for other names, which could leave the store."""
    parts = name.split("/")
    if len(parts) != 2 or not all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", part) for part in parts):
        raise ManifestError(
            f"{printable(name)!r} is not a release name.",
            "Write model/version, for example tiny-sdxl/1 (letters, digits, '.', '_', '-').",
        )
    return parts[0], parts[1]


def parse_manifest(data: bytes, name: str) -> Manifest:
    """Read the manifest of release `name`.

    Raises ManifestError: not JSON, too large, a newer schema, another release's manifest, or an entry that is missing,
    unknown, repeated or unsafe.
    """
    remedy = (
        f"Put the intact file back, or delete it (releases/{printable(name)}.json in the store) and publish the "
        "release again (`preheat publish`)."
    )
    if len(data) > MANIFEST_LIMIT:
        raise ManifestError(f"The manifest of {name} has more than {MANIFEST_LIMIT} bytes.", "Publish fewer sizes.")
    try:
        raw = json.loads(
            data, object_pairs_hook=refuse_repeated_keys, parse_constant=_refuse_constant, parse_float=_finite_float
        )
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"The manifest of {name} is not JSON ({printable(str(error))}).", remedy) from error
    if not isinstance(raw, Mapping):
        raise ManifestError(f"The manifest of {name} is not a JSON object.", remedy)
    version = raw.get("schema_version")
    if type(version) is not int:
        raise ManifestError(f"The manifest of {name} states no schema_version.", remedy)
    if version > SCHEMA_VERSION:
        raise ManifestError(
            f"The manifest of {name} has schema {printable(str(version))}; this server reads up to {SCHEMA_VERSION}.",
            "Upgrade Preheat, or build the release with this version (`preheat build`).",
        )
    try:
        # From the bytes, because strict validation of Python objects would refuse a list for a tuple.
        manifest = Manifest.model_validate_json(data, strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        raise ManifestError(f"The manifest of {name} is damaged at {problem(error)}.", remedy) from error
    if manifest.name != name:
        raise ManifestError(
            f"The manifest of {name} is that of {manifest.name}.",
            "Publish each release under its own name (`preheat publish`).",
        )
    return manifest


def refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object (`object_pairs_hook` of json.loads). Raises ValueError for a repeated key.

    Parsers disagree on which of the values counts, so a check may see another value than the one in use.
    """
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a key is repeated")
    return entries


def _refuse_constant(literal: str) -> NoReturn:
    raise ValueError(f"{literal} is not a JSON number")


def _finite_float(literal: str) -> float:
    """Refuse a number beyond a float's range, because JSON has no constant to write it."""
    value = float(literal)
    if math.isinf(value):
        raise ValueError(f"{literal[:20]} exceeds the range of a number")
    return value


def problem(error: ValidationError) -> str:
    """Return "path: cause" of the first problem."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"]) or "the top"
    return printable(path) + ": " + printable(first["msg"].removeprefix("Value error, "))


def printable(text: str) -> str:
    """Return untrusted text in a form that fits one line of a log."""
    printable = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
    return printable if len(printable) <= _MAX_SHOWN_CHARACTERS else printable[:_MAX_SHOWN_CHARACTERS] + "..."
