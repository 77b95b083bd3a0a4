"""Read a TOML file into a model of its entries. A mistake in it is one sentence that names the entry."""

import tomllib
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from engine_builder.files import read_file
from model.errors import PreheatError
from model.validation import StrictModel, explain

_Entries = TypeVar("_Entries", bound=StrictModel)


def read_toml(path: Path, entries: type[_Entries], error: type[PreheatError], noun: str) -> _Entries:
    """Return the entries of a file. `noun`: what the file should be, for `error`, which is raised if it is not."""
    try:
        return entries.model_validate(tomllib.loads(read_file(path).decode()))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as cause:
        raise error(f"{path} is not {noun} ({cause}).") from cause
    except ValidationError as cause:
        problem = explain(cause, entries)[0]
        raise error(f"{path}: {': '.join(filter(None, (problem.field, problem.message)))}.") from cause
