"""The manifest: everything that serves one model, by SHA-256. Written once, read by every server that comes later.

Releases live longer than programs, so this module is strict both ways: unknown keys are refused, and a manifest of a
newer schema is refused with its own sentence. It knows nothing about where blobs are kept.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from model.errors import ManifestError

SCHEMA_VERSION = 1
BLOB_LIMIT = 256 * 2**20  # bytes; weights are cut at this size so that hashing, fetching and copying run in parallel
MANIFEST_LIMIT = 16 * 2**20  # bytes; anything larger is not a manifest

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Dimension = int | Annotated[str, StringConstraints(pattern=r"^(rows|height|width|(height|width)/[0-9]{1,3})$")]
Precision = Literal["fp32", "fp16", "bf16", "fp8", "int8"]
Dtype = Literal["float32", "float16", "bfloat16", "int64", "int32", "uint8"]
Runtime = Literal["aot_inductor", "tensorrt"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class Blob(_Record):
    """Immutable bytes, named by their SHA-256."""

    sha256: Digest
    bytes: Annotated[int, Field(ge=0, le=16 * 2**30)]


class TensorSpec(_Record):
    """One tensor at a component's border. `shape` counts rows, or pixels ("height/8" for a latent side)."""

    name: Name
    dtype: Dtype
    shape: tuple[Dimension, ...]


class Signature(_Record):
    """What a component takes and gives, in the order of the compiled call."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class Span(_Record):
    """From `min` to `max`, both included, in steps of `multiple`. A static dimension has min == max."""

    min: Annotated[int, Field(ge=1)]
    max: Annotated[int, Field(ge=1)]
    multiple: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _ordered(self) -> "Span":
        if self.min > self.max or self.min % self.multiple or self.max % self.multiple:
            raise ValueError(f"{self.min} to {self.max} in steps of {self.multiple} is not a span")
        return self

    def holds(self, value: int) -> bool:
        """True where `value` is one of the span's."""
        return self.min <= value <= self.max and value % self.multiple == 0


class Bucket(_Record):
    """Rows, height and width (pixels) that an engine serves; text encoders have no size."""

    rows: Span
    height: Span | None = None
    width: Span | None = None

    def holds(self, rows: int, height: int, width: int) -> bool:
        """True where an engine of this bucket runs `rows` rows at `height` x `width` pixels."""
        return (
            self.rows.holds(rows)
            and (self.height is None or self.height.holds(height))
            and (self.width is None or self.width.holds(width))
        )


class Accuracy(_Record):
    """Engine against eager PyTorch on the same inputs: largest and mean absolute error, relative error by norm."""

    worst: float
    mean: float
    relative: float
    cases: Annotated[int, Field(ge=1)]


class EngineRecord(_Record):
    """Compiled code of one component for one target, bucket and precision. It holds no weights.

    `key` names what was compiled (architecture, target, bucket, precision, layout, toolchain) and leaves the weights
    out. `constants` is a JSON blob: constant of the compiled code -> {tensor, dtype, shape} of the weights.
    """

    component: Name
    key: Digest
    target: Name
    runtime: Runtime
    runtime_version: str
    bucket: Bucket
    precision: Precision
    layout: Name
    signature: Signature
    blob: Blob
    constants: Blob
    accuracy: Accuracy
    build_seconds: float


class WeightsRecord(_Record):
    """One component's weights in one precision and layout: ordered safetensors blobs of at most 256 MiB each."""

    component: Name
    precision: Precision
    layout: Name
    blobs: Annotated[tuple[Blob, ...], Field(min_length=1)]

    @property
    def identity(self) -> tuple[str, ...]:
        """Equal for two components that have the same weights, which are then held once."""
        return tuple(blob.sha256 for blob in self.blobs)


class TokenizerRecord(_Record):
    """A tokenizer.json of the `tokenizers` library and what CLIP needs beside it."""

    blob: Blob
    max_length: int
    pad_token_id: int
    bos_token_id: int
    eos_token_id: int


class RefinerSettings(_Record):
    """What the pipeline must know of a refiner beside its weights."""

    force_zeros_for_empty_prompt: bool
    requires_aesthetics_score: bool


class Settings(_Record):
    """What the pipeline must know of a model beside its weights. Heights and widths in pixels."""

    native_height: int
    native_width: int
    vae_scale_factor: int
    vae_scaling_factor: float
    latent_channels: int
    force_zeros_for_empty_prompt: bool
    refiner: RefinerSettings | None = None


class Manifest(_Record):
    """One release. See DESIGN's words: Component, Target, Bucket, Engine, Weights, Release."""

    schema_version: Literal[1] = 1
    model: Name
    version: Name
    family: Literal["sdxl"]
    created: str
    builder: dict[str, str]
    settings: Settings
    defaults: dict[str, Any] = {}
    schedulers: dict[Literal["base", "refiner"], dict[str, Any]]
    tokenizers: dict[Literal["tokenizer", "tokenizer_2"], TokenizerRecord]
    architectures: dict[Name, Digest]
    engines: tuple[EngineRecord, ...]
    weights: tuple[WeightsRecord, ...]

    @property
    def name(self) -> str:
        """What people type: model/version."""
        return f"{self.model}/{self.version}"

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the networks this release serves."""
        return tuple(self.architectures)

    @property
    def has_refiner(self) -> bool:
        return "refiner_unet" in self.architectures

    @property
    def targets(self) -> tuple[str, ...]:
        """The target keys this release has engines for, sorted."""
        return tuple(sorted({engine.target for engine in self.engines}))

    def blobs(self) -> dict[str, Blob]:
        """Every blob the release names, by digest."""
        found = [e.blob for e in self.engines] + [e.constants for e in self.engines]
        found += [blob for w in self.weights for blob in w.blobs]
        found += [t.blob for t in self.tokenizers.values()]
        return {blob.sha256: blob for blob in found}

    def to_json(self) -> bytes:
        return json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True).encode()


def split_name(name: str) -> tuple[str, str]:
    """ "model/version" -> its two halves. Names are data: anything that could leave the store's folder is refused."""
    parts = name.split("/")
    if len(parts) != 2 or not all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", part) for part in parts):
        raise ManifestError(
            f"{name!r} is no release name: write model/version, for example tiny-sdxl/1 (letters, digits, '.', '_', '-')."
        )
    return parts[0], parts[1]


def parse_manifest(data: bytes, name: str) -> Manifest:
    """Read a manifest and check it against the name it was asked for.

    Raises ManifestError: not JSON, too large, a newer schema, a missing, unknown or unsafe entry, another's name.
    """
    if len(data) > MANIFEST_LIMIT:
        raise ManifestError(f"The manifest of {name} has {len(data)} bytes; at most {MANIFEST_LIMIT} are read.")
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"The manifest of {name} is not JSON ({error}): publish the release again.") from error
    if not isinstance(raw, Mapping):
        raise ManifestError(f"The manifest of {name} is not a JSON object: publish the release again.")
    version = raw.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise ManifestError(
            f"The manifest of {name} has schema {version}; this server reads up to {SCHEMA_VERSION}: "
            "upgrade Preheat, or build the release with this version (`preheat build`)."
        )
    try:
        manifest = Manifest.model_validate(raw)
    except (ValidationError, RecursionError) as error:
        problem = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        where = ".".join(str(part) for part in problem["loc"]) or "top level"
        raise ManifestError(
            f"The manifest of {name} is damaged at {where}: {problem['msg']}. Publish the release again (`preheat publish`)."
        ) from error
    if manifest.name != name:
        raise ManifestError(
            f"The manifest under the name {name} is that of {manifest.name}: publish it under its own name."
        )
    return manifest
