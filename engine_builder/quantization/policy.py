"""Which layers of a network are quantized, and how their inputs are clipped. A policy is a TOML file of name patterns.

keep_fp16 = ["*.proj_out", "mid_block.*"]    # of layers that stay in fp16, as the shell matches names
convolutions = ["*.resnets.*"]               # of the UNets' convolutions that are quantized too, in FP8
vae_convolutions = ["decoder.up_blocks.*"]   # of the VAE decoder's convolutions that are quantized, in FP8
clip = "squared_error"                       # absolute_maximum, percentile or squared_error
percentile = 0.9999                          # of clip = "percentile"
smoothing = 0.8                              # of INT8
fp16_steps = { first = 2, last = 1 }         # of each image, on each UNet
"""

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field

from engine_builder.quantization.ranges import ScaleRule
from engine_builder.quantization.toml_file import TomlSettings
from model.errors import PreheatError
from model.store.manifest import Fp16Steps
from model.store.precision import FP8, INT8, Precision

_NEWER_ENTRIES = ("smoothing", "convolutions", "vae_convolutions")  # that earlier policies lack


class BadPolicy(PreheatError):
    """A policy file cannot be read, has an unknown entry, or a pattern that matches no layer."""

    remedy = "See docs/quantization.md for the entries of a policy."


class Policy(TomlSettings):
    """The entries of a policy file."""

    keep_fp16: list[str] = []
    """Patterns of layers that stay in fp16."""
    convolutions: list[str] = []
    """Of FP8: patterns of the UNets' convolutions that are quantized, except those of `keep_fp16`."""
    vae_convolutions: list[str] = []
    """Of FP8: the same for the VAE decoder. Empty: the decoder is not quantized. Its linears never are."""
    clip: ScaleRule = "absolute_maximum"
    """How the clip of an input follows from its range."""
    percentile: Annotated[float, Field(gt=0.5, le=1.0)] = 0.9999
    """The share of values that are not clipped."""
    smoothing: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of INT8: how much of the inputs' outliers moves to the weights (`networks.int8_linear`). None: not INT8."""
    fp16_steps: Fp16Steps = Fp16Steps()
    """The first and last steps of an image that run on the UNet in fp16. A deployment may set others."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a policy file. Raises BadPolicy."""
        return cls.read_as(path, "is not a policy", BadPolicy)

    def select(self, layers: Iterable[str]) -> list[str]:
        """Return the linears that are quantized."""
        return [name for name in layers if not _matches(name, self.keep_fp16)]

    def select_convolutions(self, layers: Iterable[str], *, of_vae: bool = False) -> list[str]:
        """Return the convolutions that are quantized, of a UNet or of the VAE decoder."""
        patterns = self.vae_convolutions if of_vae else self.convolutions
        return self.select(name for name in layers if _matches(name, patterns))

    def check_precision(self, precision: Precision) -> None:
        """Raise BadPolicy for entries that are of another precision than FP8 or INT8."""
        if precision == INT8 and (self.smoothing is None or self.clip != "absolute_maximum"):
            raise BadPolicy(
                f'A policy of int8 needs smoothing, and clip = "absolute_maximum"; this one has smoothing = '
                f'{self.smoothing} and clip = "{self.clip}".'
            )
        for entry, patterns in (("convolutions", self.convolutions), ("vae_convolutions", self.vae_convolutions)):
            if precision == INT8 and patterns:
                raise BadPolicy(f"A policy of int8 has no {entry}, but this one has {patterns}.")
        if precision == FP8 and self.smoothing is not None:
            raise BadPolicy(f"A policy of fp8 has no smoothing; this one has smoothing = {self.smoothing}.")

    @property
    def entries(self) -> dict[str, object]:
        """The entries as JSON. Those that are newer only if they are set: other digests stay what they were."""
        newer: dict[str, object] = {name: getattr(self, name) for name in _NEWER_ENTRIES}
        return self.model_dump(mode="json", exclude={name for name, value in newer.items() if value in (None, [])})

    def check_patterns(self, of_unets: Collection[str], of_vae: Collection[str]) -> None:
        """Raise BadPolicy for a pattern that matches no layer of its networks.

        of_unets: the layers of all UNets. of_vae: those of the VAE decoder, empty if it is not quantized.
        """
        for entry, patterns, layers in (
            ("keep_fp16", self.keep_fp16, [*of_unets, *of_vae]),
            ("convolutions", self.convolutions, of_unets),
            ("vae_convolutions", self.vae_convolutions, of_vae),
        ):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in layers):
                    raise BadPolicy(f"The pattern {pattern!r} of {entry} matches no layer.")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# The two small linears around each transformer cost most of the error (docs/log/builds.md). NVIDIA keeps them, too.
_DEFAULT_KEPT = ["*.proj_in", "*.proj_out"]
DEFAULTS = {
    FP8: Policy(keep_fp16=_DEFAULT_KEPT, clip="squared_error"),
    INT8: Policy(keep_fp16=_DEFAULT_KEPT, smoothing=0.8),
}
