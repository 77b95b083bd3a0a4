"""Which layers of a network are quantized, and how their inputs are clipped. A policy is a TOML file of name patterns.

keep_fp16 = ["*.proj_out", "mid_block.*"]    # of layers that stay in fp16, as the shell matches names
clip = "squared_error"                       # absolute_maximum, percentile or squared_error
percentile = 0.9999                          # of clip = "percentile"
fp16_steps = { first = 2, last = 1 }         # of each image, on each UNet
"""

import tomllib
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError

from engine_builder.files import read_file
from engine_builder.quantization.ranges import ScaleRule
from model.errors import PreheatError
from model.store.manifest import Fp16Steps
from model.validation import StrictModel, explain


class BadPolicy(PreheatError):
    """A policy file cannot be read, has an unknown entry, or a pattern that matches no layer."""

    remedy = "See docs/build-and-publish.md for the entries of a policy."


class Policy(StrictModel):
    """The entries of a policy file."""

    keep_fp16: list[str] = []
    """Patterns of layers that stay in fp16."""
    clip: ScaleRule = "absolute_maximum"
    """How the clip of an input follows from its range."""
    percentile: Annotated[float, Field(gt=0.5, le=1.0)] = 0.9999
    """The share of values that are not clipped."""
    fp16_steps: Fp16Steps = Fp16Steps()
    """The first and last steps of an image that run on the UNet in fp16. A deployment may set others."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a policy file. Raises BadPolicy."""
        try:
            return cls.model_validate(tomllib.loads(read_file(path).decode()))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise BadPolicy(f"{path} is not a policy ({error}).") from error
        except ValidationError as error:
            problem = explain(error, cls)[0]
            raise BadPolicy(f"{path}: {': '.join(filter(None, (problem.field, problem.message)))}.") from error

    def select(self, layers: Iterable[str]) -> list[str]:
        """Return the layers that are quantized."""
        return [name for name in layers if not any(fnmatchcase(name, pattern) for pattern in self.keep_fp16)]

    def check_patterns(self, layers: Collection[str]) -> None:
        """Raise BadPolicy for a pattern that matches none of `layers`, those of all UNets."""
        for pattern in self.keep_fp16:
            if not any(fnmatchcase(name, pattern) for name in layers):
                raise BadPolicy(f"The pattern {pattern!r} of keep_fp16 matches no layer.")


# The two small linears around each transformer cost most of the error (docs/log/builds.md). NVIDIA keeps them, too.
DEFAULT = Policy(keep_fp16=["*.proj_in", "*.proj_out"], clip="squared_error")
