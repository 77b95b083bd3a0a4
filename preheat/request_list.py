"""Files with a list of requests."""

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine_builder.error_text import cause_of
from engine_builder.files import read_file
from model.errors import PreheatError

_MAX_BYTES = 64 * 2**20


class BadRequestFile(PreheatError):
    """A file of requests cannot be read, or has an entry that cannot be used."""

    remedy = 'Give a JSON list of requests, for example [{"prompt": "a lighthouse at dusk", "seed": 1}].'


def read_request_list(path: Path, most: int) -> list[dict[str, Any]]:
    """Return 1 to `most` requests, whose fields are not checked. Raises BadRequestFile."""
    try:
        entries = json.loads(read_file(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise BadRequestFile(f"{path} cannot be read as JSON ({cause_of(error)}).") from error
    if not isinstance(entries, list) or not 1 <= len(entries) <= most:
        raise BadRequestFile(f"{path} is not a list of 1 to {most:,} requests.")
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict):
            raise BadRequestFile(f"{path}, request {number} is not a JSON object.")
    return entries


def bad_request(where: str, error: ValidationError) -> BadRequestFile:
    """Return the error of a request whose fields are invalid. `where`: the file and the request's number."""
    first = error.errors(include_url=False)[0]
    return BadRequestFile(f"{where}, {'.'.join(map(str, first['loc']))}: {first['msg']}.")
