"""Write the tables of docs/requests.md from the public schema. The rest of the page is written by hand.

python -m preheat.docs_pages.request_reference

A table stands between the lines `<!-- table: NAME -->` and `<!-- end -->`.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from model.api.describe import Description
from model.api.request import EngineInfo, GenerationResponse, ImageResult
from model.denoising.sampler_specs import SAMPLERS, SPECS
from model.request_fields import GenerationRequest, value_type

PAGE = Path(__file__).resolve().parents[2] / "docs" / "requests.md"
_TABLE = re.compile(r"(?<=<!-- table: )(\w+)( -->\n\n)(.*?)(?=\n<!-- end -->)", re.DOTALL)
_RECORDS = {"response": GenerationResponse, "image": ImageResult, "engine": EngineInfo, "description": Description}
_JSON_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "list[str]": "list of strings",
    "list[int]": "list of integers",
    "bool": "boolean",
    "list[ImageResult]": "list of objects",
    "list[DescribedAdapter]": "list of objects",
    'Literal["success"]': "string",
    "ImageFormat": "string",
    "NotRequired[bool]": "boolean",
}


def page(text: str) -> str:
    """Return the text of docs/requests.md with current tables. `text`: the page as it is."""
    return _TABLE.sub(lambda found: f"{found[1]}{found[2]}{_table(found[1])}", text)


def _table(name: str) -> str:
    schema = GenerationRequest.model_json_schema()
    if name == "samplers":
        rows = [f"| {sampler} | {_class(*SPECS[sampler].diffusers)} |\n" for sampler in SAMPLERS]
        return "".join(["| name | diffusers class |\n|---|---|\n", *rows])
    if name in _RECORDS:
        return _record(_RECORDS[name])
    if name in schema["properties"]:  # a list of objects
        (entry,) = get_args(value_type(GenerationRequest.model_fields[name].annotation))
        schema = entry.model_json_schema()
    return "".join(_fields(schema))


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table of a model's fields."""
    yield "| field | type | default | meaning |\n|---|---|---|---|\n"
    for name, field in schema["properties"].items():
        default = "required" if name in schema["required"] else _default(field)
        meaning, _, stated = str(field["description"]).partition(" Default: ")
        yield f"| `{name}` | {_type(field)} | {stated.rstrip('.') or default} | {meaning} |\n"


def _type(field: Mapping[str, Any]) -> str:
    """Return a field's type and range in words. Null is left out, because every optional field accepts it."""
    choices = [choice for choice in field.get("anyOf", [field]) if choice.get("type") != "null"]
    return " or ".join(map(_type_of, choices))


def _type_of(choice: Mapping[str, Any]) -> str:
    """Return one of the types of a field in words."""
    if "enum" in choice:
        return " or ".join(f"`{value}`" for value in choice["enum"])
    if "maxLength" in choice:
        return f"string, {choice.get('minLength', 0)} to {choice['maxLength']:,} characters"
    if choice["type"] == "array":
        least, most, items = choice.get("minItems", 0), choice["maxItems"], choice["items"]
        kind = "objects" if "$ref" in items else f"{items['type']}s{_bounds(items)}"
        return f"list of {least if least == most else f'{least} to {most}'} {kind}"
    return f"{choice['type']}{_bounds(choice)}"


def _bounds(field: Mapping[str, Any]) -> str:
    if "maximum" in field:
        return f", {field['minimum']} to {field['maximum']}"
    return f", at least {field['minimum']}" if "minimum" in field else ""


def _default(field: Mapping[str, Any]) -> str:
    value = field["default"]
    return f"`{str(value).lower()}`" if isinstance(value, bool) else "null" if value is None else f"`{value}`"


def _class(name: str, settings: Mapping[str, Any]) -> str:
    """Return a diffusers class with options, in Markdown."""
    options = ", ".join(
        f"`{key}` {f'`{value}`' if isinstance(value, str) else value}" for key, value in settings.items()
    )
    return f"`{name}` with {options}" if options else f"`{name}`"


def _record(record: type) -> str:
    """Return a table of a TypedDict's keys, from its source: name, type and comment."""
    keys = re.findall(r"^    (\w+): ([^#\n]+?)(?:  # (.+))?$", inspect.getsource(record), re.MULTILINE)
    lines = [f"| `{name}` | {_JSON_TYPES.get(kind, 'object')} | {comment} |\n" for name, kind, comment in keys]
    return "".join(["| key | type | meaning |\n|---|---|---|\n", *lines])


def main() -> None:
    PAGE.write_text(page(PAGE.read_text()))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
