"""TOML files of settings: policies and thresholds."""

import tomllib
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from engine_builder.error_text import cause_of
from engine_builder.files import read_file
from model.errors import PreheatError
from model.validation import StrictModel, explain


class TomlSettings(StrictModel):
    """Settings that are read from a TOML file."""

    @classmethod
    def read_as(cls, path: Path, fault: str, refusal: type[PreheatError]) -> Self:
        """Read a file. Raises `refusal`, whose message begins with the path and `fault`."""
        try:
            return cls.model_validate(tomllib.loads(read_file(path).decode()))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise refusal(f"{path} {fault} ({cause_of(error)}).") from error
        except ValidationError as error:
            problem = explain(error, cls)[0]
            raise refusal(f"{path}: {': '.join(filter(None, (problem.field, problem.message)))}.") from error
