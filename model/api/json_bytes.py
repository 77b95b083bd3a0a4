"""Write JSON that may hold megabytes of base64."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticSerializationError, to_json


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Return JSON in ASCII: half of a surrogate pair has no UTF-8, and a reader of lines may split at other characters.

    pydantic writes megabytes of base64 several times as fast as `json`, which still writes what holds other text. Both
    hold the interpreter lock, so another thread would not keep the event loop free.
    """
    return _ascii_json(value) or json.dumps(value).encode()


def _ascii_json(value: Mapping[str, Any]) -> bytes | None:
    """Return JSON by pydantic's writer, or None if a text is not ASCII."""
    try:
        content = to_json(value)
    except PydanticSerializationError:  # half of a surrogate pair
        return None
    return content if content.isascii() else None
