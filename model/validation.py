"""Limits of values, and readable messages for values outside them.

Requests, release defaults and deployment settings share both. Imports pydantic only.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

MAX_TRAIN_TIMESTEPS = 100_000  # of a noise schedule
MAX_STEPS = 100  # of one request, fewer for some samplers; a noise schedule has more timesteps
MAX_GUIDANCE = 30
MAX_PROMPT_CHARACTERS = 4000
MAX_PROMPT_WEIGHT = 10
MAX_CLIP_SKIP = 31  # the layers of the largest text encoder, without one
MAX_SIZE_CONDITION = 16384  # pixels
MAX_SIGMA = 10_000
MAX_IMAGES = 8  # of one request
MAX_MASKS = 8  # of one request
MAX_CONTROLS = 4  # of one request
MAX_CONTROL_SCALE = 2
MAX_IP_ADAPTERS = 4  # of one request
MAX_IP_IMAGES = 16  # of one IP-Adapter in a request; a release may take fewer
MAX_IP_SCALE = 2
MAX_EMBEDDING_ROWS = 4096  # of a text encoder, for textual inversion
MAX_CONTROL_TYPES = 64  # of a Union network; the largest public one has 8
COMPONENT_NAME = "[a-z0-9][a-z0-9_-]{0,31}"  # of a ControlNet or IP-Adapter; a regular expression
MAX_FEATHER = 256  # pixels
MAX_UPSCALE = 2
MAX_LORAS = 8  # of one request
MAX_LORA_SCALE = 10  # either sign
BAND_COUNTS = (2, 4, 8)  # bands that an image can be divided into, each for a GPU of its own
SMALLEST_SIDE, LARGEST_SIDE = 64, 4096  # pixels
SEED_COUNT = 2**32
RANDOM_SEED = -1  # of a request; other user interfaces send it too
MAX_OBJECT_FIELDS = 200  # of one JSON object; more than any model has, and few enough to check each
_UNKNOWN = "is not a known field"
_MAX_PROBLEMS = 20  # of one input; a body of a hundred unknown fields does not get a hundred lines
_MAX_SHOWN_CHARACTERS = 60  # of a refused value that a message repeats
_REFUSED = "refused"  # pydantic error type of `refusal`

Schema = Mapping[str, Any]

ImageFormat = Literal["png", "jpeg", "webp"]
PromptSyntax = Literal["plain", "weighted"]
Resize = Literal["refuse", "stretch", "crop", "pad"]
Safety = Literal["off", "flag", "blank"]
Forecast = Literal["off", "quality", "fast"]


class StrictModel(BaseModel):
    """JSON types only: no "30" for 30, no 1 for true, no NaN; 7 is accepted for 7.0. Unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _limit_fields(cls, data: Any) -> Any:
        """Refuse an object of very many fields. pydantic would make an error of each one: 7 s for a million of them."""
        if isinstance(data, dict) and len(data) > MAX_OBJECT_FIELDS:
            raise refusal(
                f"got an object of {len(data)} fields, expected a JSON object with the fields "
                f"{', '.join(cls.model_fields)}"
            )
        return data


@dataclass(frozen=True)
class Problem:
    """One refused value. `field` is its dotted path, None for the whole input; `message` has no full stop."""

    field: str | None
    message: str
    value: Any


def refusal(message: str) -> PydanticCustomError:
    """Return the error that a custom validator raises. `message` is reported unchanged."""
    return PydanticCustomError(_REFUSED, "{message}", {"message": message})


def explain(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Describe each problem of `error`: the refused value, and what `model` accepts instead.

    The known fields are listed once for each object with unknown ones.
    """
    schema: Schema = model.model_json_schema()
    problems = []
    listed: set[tuple[int | str, ...]] = set()  # the objects whose known fields are listed
    for details in error.errors(include_url=False)[:_MAX_PROBLEMS]:
        parent = child = schema
        for key in details["loc"]:
            parent = _present(child, schema)
            child = _child(parent, key, schema)
        field = ".".join(_printable(_shorten(str(key))) for key in details["loc"]) if details["loc"] else None
        message = _message(details, parent, child, schema)
        if details["type"] == "extra_forbidden":
            if details["loc"][:-1] in listed:
                message = _UNKNOWN
            listed.add(details["loc"][:-1])
        problems.append(Problem(field, message, details["input"]))
    return problems


def _child(schema: Schema, key: object, root: Schema) -> Schema:
    """Return the schema of a field or list item, empty if `schema` does not describe it."""
    child: Schema = schema.get("items", {}) if isinstance(key, int) else schema.get("properties", {}).get(key, {})
    return _resolve(child, root)


def _present(schema: Schema, root: Schema) -> Schema:
    """Return the schema of a value that is not null, of a field that may be null."""
    choices = [choice for choice in schema.get("anyOf", ()) if choice.get("type") != "null"]
    return _resolve(choices[0], root) if len(choices) == 1 else schema


def _resolve(schema: Schema, root: Schema) -> Schema:
    reference = schema.get("$ref", "").removeprefix("#/$defs/")
    return root["$defs"][reference] if reference else schema


def _message(problem: ErrorDetails, parent: Schema, schema: Schema, root: Schema) -> str:
    kind, value = problem["type"], problem["input"]
    if kind == _REFUSED:
        return problem["msg"]
    if kind == "extra_forbidden":
        return f"{_UNKNOWN}; the fields are {', '.join(parent.get('properties', {}))}"
    if kind == "string_unicode" and not problem["loc"]:
        return "the name of a field is not Unicode text (it holds half of a surrogate pair)"
    if not schema:
        return "the name of a field is not text"
    if kind == "string_unicode":
        index = next(i for i, character in enumerate(value) if "\ud800" <= character <= "\udfff")
        return f"character {index + 1} is half of a surrogate pair, which is not Unicode text: send both halves"
    if kind == "missing":
        return f"is required: {_accepted(schema, root)}"
    return f"got {format_value(value)}, expected {_accepted(schema, root)}"


def _accepted(schema: Schema, root: Schema) -> str:
    """Describe a field's JSON schema in words, so that messages and the published schema agree."""
    if "anyOf" in schema:
        return ", or ".join(_accepted(choice, root) for choice in schema["anyOf"])
    if "$ref" in schema:
        return _accepted(_resolve(schema, root), root)
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(choice) for choice in schema["enum"])
    match schema.get("type"):
        case "string" if "maxLength" in schema:
            return f"a string of {schema.get('minLength', 0)} to {schema['maxLength']} characters"
        case "string":
            return "a string"
        case "integer" | "number" as kind:
            return f"{'an integer' if kind == 'integer' else 'a number'}{_bounds(schema)}"
        case "boolean":
            return "true or false"
        case "array" if "maxItems" in schema:
            return f"a list of {schema.get('minItems', 0)} to {schema['maxItems']} entries"
        case "array":
            return "a list"
        case "object":
            return f"a JSON object with the fields {', '.join(schema.get('properties', {}))}"
        case kind:
            return str(kind)


def _bounds(schema: Schema) -> str:
    minimum, maximum, above = schema.get("minimum"), schema.get("maximum"), schema.get("exclusiveMinimum")
    if minimum is not None and maximum is not None:
        return f" from {minimum} to {maximum}"
    if above is not None:
        return f" above {above}"
    return "" if minimum is None else f" of at least {minimum}"


def format_value(value: object) -> str:
    """Return a refused value as JSON, cut short. Lists and objects are named by their type only."""
    if isinstance(value, str):
        return _printable(json.dumps(_shorten(value), ensure_ascii=False))
    if value is None or isinstance(value, bool | int | float):
        return _shorten(json.dumps(value))
    if isinstance(value, list):
        return "a list"
    return "an object" if isinstance(value, Mapping) else f"a value of type {type(value).__name__}"


def _printable(text: str) -> str:
    """Write line breaks, direction marks and other control characters as JSON escapes."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}… ({len(text)} characters)"
