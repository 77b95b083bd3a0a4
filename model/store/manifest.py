"""The manifest of a release: everything that serves one model, by SHA-256. Written once, read by every later server.

Numbers and names are bounded, unknown keys are refused, and repeated facts must agree. So code that has a parsed
manifest (model/store/manifest_json.py) need not check it again. This module is independent of where blobs are stored.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    model_serializer,
    model_validator,
)

from model.store.precision import Dtype, PrecisionField, StorageDtype
from model.validation import MAX_EMBEDDING_ROWS, MAX_STEPS

SCHEMA_VERSION = 5  # the newest. A release states the oldest that has all its entries, so that older servers read it
BLOB_LIMIT = 256 * 2**20  # bytes; weights are cut at this size so that hashing, fetching and copying run in parallel
ENGINE_LIMIT = 16 * 2**30  # bytes, the limit of every blob; a plan that holds SDXL's weights in fp16 has 5 GiB
MANIFEST_LIMIT = 4 * 2**20  # bytes; 36 buckets on three targets take 1 MiB, and parsed JSON many times its size
PACKAGE_LIMIT = 256 * 2**20  # bytes, of an AOTInductor engine; it is read into memory whole
SMALL_BLOB_LIMIT = 64 * 2**20  # bytes, of blobs that are read into memory whole: tokenizers and maps of constants
# So that a signature of a release is valid for nothing else, and neither is that of an adapter.
_SIGNED_PREFIX, SIGNED_ADAPTER_PREFIX = b"preheat release\n", b"preheat adapter\n"

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
Symbol = Annotated[str, StringConstraints(pattern=r"^(rows|height|width|tokens|(height|width)/[1-9][0-9]{0,2})$")]
Dimension = Size | Symbol
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
EMBEDDING_TOKEN = r"^[^\s\x00-\x1f]{1,64}$"
EmbeddingToken = Annotated[str, StringConstraints(pattern=EMBEDDING_TOKEN)]
Runtime = Literal["aot_inductor", "tensorrt", "tensorrt-rtx"]
Family = Literal["sdxl", "sd"]  # see `model.pipeline.families`; "sd" is Stable Diffusion 1 and 2
MAX_PREVIEW_CHANNELS, MAX_PREVIEW_UNITS = 32, 32  # of a map for previews, which has at most 9,347 numbers
Coefficient = Annotated[float, Field(ge=-1e6, le=1e6)]
PreviewRow = Annotated[tuple[Coefficient, ...], Field(min_length=1, max_length=9 * MAX_PREVIEW_CHANNELS)]
Sentence = Annotated[str, StringConstraints(pattern=r"^[ -~]{1,300}$")]


class Record(BaseModel):
    """Base class of what stores hold as JSON: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, serialize_by_alias=True)


class Blob(Record):
    """Immutable bytes, named by their SHA-256."""

    sha256: Digest
    bytes: Annotated[int, Field(ge=0, le=ENGINE_LIMIT)]


class TensorSpec(Record):
    """One input or output of a component.

    `shape` holds sizes and symbols: "rows" is the batch, and "height/8" an eighth of the height in pixels.
    """

    name: Name
    dtype: Dtype
    shape: tuple[Dimension, ...]


class Signature(Record):
    """The inputs and outputs of a component, in the order of the compiled call."""

    inputs: Annotated[tuple[TensorSpec, ...], Field(min_length=1)]
    outputs: Annotated[tuple[TensorSpec, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_tensors(self) -> "Signature":
        for specs in (self.inputs, self.outputs):
            if len({spec.name for spec in specs}) < len(specs):
                raise ValueError("two tensors have the same name")
            if any(spec.shape[:1] != ("rows",) for spec in specs):
                raise ValueError("the first dimension of every tensor is rows")
        if _symbols(self.outputs) - _symbols(self.inputs):
            raise ValueError("an output has a size that no input has")
        return self

    @property
    def extra_channels(self) -> int:
        """The channels that a UNet takes after the latents: a mask and masked latents. 0 for every other network."""
        return max(0, _channels(self.inputs, "sample") - _channels(self.outputs, "noise"))


def _channels(specs: tuple[TensorSpec, ...], name: str) -> int:
    """Return the second dimension of a tensor, or 0 if there is no such tensor or dimension."""
    return next(
        (
            spec.shape[1]
            for spec in specs
            if spec.name == name and len(spec.shape) > 1 and isinstance(spec.shape[1], int)
        ),
        0,
    )


def _symbols(specs: tuple[TensorSpec, ...]) -> set[str]:
    return {size.partition("/")[0] for spec in specs for size in spec.shape if isinstance(size, str)}


class Span(Record):
    """The multiples of `multiple` from `min` to `max`, both included. A static dimension has min == max."""

    min: Size
    max: Size
    multiple: Size = 1

    @model_validator(mode="after")
    def _check_bounds(self) -> "Span":
        if self.min > self.max or self.min % self.multiple or self.max % self.multiple:
            raise ValueError(f"{self.min} to {self.max} in steps of {self.multiple} is not a valid span")
        return self

    def holds(self, value: int) -> bool:
        """True if `value` is in the span."""
        return self.min <= value <= self.max and value % self.multiple == 0


class Bucket(Record):
    """The batch sizes, heights and widths (pixels) that an engine serves; text encoders have no height and width.

    `batch` is called "rows" in JSON.
    """

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    batch: Annotated[Span, Field(alias="rows")]
    height: Span | None = None
    width: Span | None = None

    def holds(self, batch: int, height: int, width: int) -> bool:
        """True if an engine of this bucket runs a batch of that size at `height` x `width` pixels."""
        return (
            self.batch.holds(batch)
            and (self.height is None or self.height.holds(height))
            and (self.width is None or self.width.holds(width))
        )

    @property
    def label(self) -> str:
        """Return "1024x1024@2"; "any@1-16" for an engine of any size; "@2" for an engine without a size."""
        batch, height, width = self.batch, self.height, self.width
        size = ""
        if height and width:
            size = f"{width.max}x{height.max}" if height.min == height.max and width.min == width.max else "any"
        return f"{size}@{batch.max}" if batch.min == batch.max else f"{size}@{batch.min}-{batch.max}"


class Accuracy(Record):
    """Error of an engine against eager PyTorch on the same inputs: largest and mean absolute, relative by norm."""

    worst: float
    mean: float
    relative: float
    cases: Annotated[int, Field(ge=1)]


class Benchmark(Record):
    """Milliseconds of one run of an engine on the machine that built it, at its bucket's largest shape."""

    median: Annotated[float, Field(gt=0)]
    runs: Annotated[int, Field(ge=1)]


class TensorRTPlan(Record):
    """The entries of an engine that is one profile of a plan of TensorRT or TensorRT-RTX.

    A component's engines share one plan. `literals` is a safetensors blob of the graph's own small constants, `onnx`
    the graph that was compiled. `refit` states which weights the plan takes: "identical" only those whose blobs are
    `weights`, "any" those of every model of the architecture. A plan with "none" holds the weights, whose blobs are
    `weights`. `workspace_bytes` is the device memory that a run of this profile takes; None: the plan was built without
    its GPU, so the number is not known.
    """

    profile: Annotated[int, Field(ge=0, le=1023)]
    literals: Blob
    onnx: Blob
    refit: Literal["identical", "any", "none"]
    weights: tuple[Digest, ...] = ()
    workspace_bytes: Annotated[int | None, Field(ge=0, le=2**40)] = None

    @model_validator(mode="after")
    def _check_blobs(self) -> "TensorRTPlan":
        if (self.refit != "any") != bool(self.weights):
            raise ValueError("a plan names blobs of weights if, and only if, it does not take those of any model")
        if self.literals.bytes > SMALL_BLOB_LIMIT:
            raise ValueError(f"the literals of a graph have more than {SMALL_BLOB_LIMIT} bytes")
        return self


class EngineRecord(Record):
    """Compiled code of one component for one target, bucket and precision. It holds no weights, except some plans.

    `key` is a digest of everything that was compiled (architecture, target, bucket, precision, layout, toolchain),
    without the weights. `constants` is a JSON blob: constant of the code -> {tensor, dtype, shape} of the weights.
    `accuracy` is None for a plan that was built without its GPU: it has not run.
    """

    component: Name
    key: Digest
    target: Name
    runtime: Runtime
    runtime_version: str
    bucket: Bucket
    precision: PrecisionField
    layout: Name
    signature: Signature
    blob: Blob
    constants: Blob
    accuracy: Accuracy | None = None
    build_seconds: float
    benchmark: Benchmark | None = None
    tensorrt: TensorRTPlan | None = None

    @property
    def required_schema(self) -> int:
        """The oldest schema that has all entries of this record.

        Schema 2 added TensorRT-RTX, plans with weights and 8-bit engines. Schema 3 added UNets for inpainting.
        Schema 4 added text encoders that take clip_skip.
        """
        if any(spec.name == "clip_skip" for spec in self.signature.inputs):
            return 4
        if self.signature.extra_channels:
            return 3
        plan = self.tensorrt
        is_new = self.runtime == "tensorrt-rtx" or self.accuracy is None or self.precision.is_quantized
        return 2 if is_new or (plan and (plan.refit == "none" or plan.workspace_bytes is None)) else 1

    @property
    def holds_weights(self) -> bool:
        """True for a plan that holds the weights it was built with, so that no others are loaded for it."""
        return self.tensorrt is not None and self.tensorrt.refit == "none"

    @model_serializer(mode="wrap")
    def _omit_empty(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit empty entries that older versions do not support, so that they can read the record."""
        entries: dict[str, Any] = write(self)
        return {key: value for key, value in entries.items() if value is not None or key not in _ADDED_ENTRIES}

    @model_validator(mode="after")
    def _check_runtime(self) -> "EngineRecord":
        if self.tensorrt is not None and self.runtime == "aot_inductor":
            raise ValueError("only an engine of TensorRT or TensorRT-RTX has a plan")
        if self.accuracy is None and self.runtime != "tensorrt-rtx":
            raise ValueError("the engine was not compared with eager PyTorch")
        if self.runtime == "aot_inductor" and self.blob.bytes > PACKAGE_LIMIT:
            raise ValueError(f"the engine has more than {PACKAGE_LIMIT} bytes")
        if self.constants.bytes > SMALL_BLOB_LIMIT:
            raise ValueError(f"the map of constants has more than {SMALL_BLOB_LIMIT} bytes")
        sized = {"height", "width"} <= _symbols(self.signature.inputs)
        if (self.bucket.height is not None) != sized or (self.bucket.width is not None) != sized:
            raise ValueError("the bucket and the signature do not agree on height and width")
        return self


_ADDED_ENTRIES = ("accuracy", "benchmark", "tensorrt")  # since the first version of the schema, or optional since then


class Constant(Record):
    """The tensor of the weights that a constant of the compiled code is mapped to."""

    tensor: Annotated[str, Field(min_length=1, max_length=512)]
    dtype: StorageDtype
    shape: tuple[Annotated[int, Field(ge=0, le=2**31 - 1)], ...]


WeightsKey = tuple[str, str, str]
"""What tells the weights of a release apart: component, precision and layout."""


class WeightsRecord(Record):
    """One component's weights in one precision and layout: ordered safetensors blobs of at most 256 MiB each."""

    component: Name
    precision: PrecisionField
    layout: Name
    blobs: Annotated[tuple[Blob, ...], Field(min_length=1)]

    @property
    def key(self) -> WeightsKey:
        return self.component, self.precision.name, self.layout

    @property
    def identity(self) -> tuple[str, ...]:
        """Equal for components that have the same weights, which are then loaded once."""
        return tuple(blob.sha256 for blob in self.blobs)

    @model_validator(mode="after")
    def _check_blobs(self) -> "WeightsRecord":
        if any(blob.bytes > BLOB_LIMIT for blob in self.blobs):
            raise ValueError(f"a blob of weights has more than {BLOB_LIMIT} bytes")
        if len(set(self.identity)) < len(self.blobs):
            raise ValueError("a blob is listed twice")
        return self


class TokenizerRecord(Record):
    """A tokenizer.json of the `tokenizers` library, and the numbers that CLIP needs in addition.

    `embeddings`: each token of textual inversion -> the rows of its vectors in the text encoders' tables of tokens.
    Releases of versions before schema 5 have these tokens in tokenizer.json.
    """

    blob: Blob
    max_length: Annotated[int, Field(ge=2, le=2**16)]
    pad_token_id: TokenId
    bos_token_id: TokenId
    eos_token_id: TokenId
    embeddings: (
        Annotated[
            dict[EmbeddingToken, Annotated[tuple[TokenId, ...], Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_EMBEDDING_ROWS),
        ]
        | None
    ) = None

    @property
    def chunk_tokens(self) -> int:
        """The tokens of a chunk between its begin and end tokens: 75."""
        return self.max_length - 2

    @model_serializer(mode="wrap")
    def _omit_embeddings(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit missing embeddings, which older versions do not support, so that they can read the record."""
        entries: dict[str, Any] = write(self)
        return {key: value for key, value in entries.items() if value is not None}

    @model_validator(mode="after")
    def _check_embeddings(self) -> "TokenizerRecord":
        if any(len(ids) > self.chunk_tokens for ids in (self.embeddings or {}).values()):
            raise ValueError(f"an embedding has more vectors than a chunk has tokens, {self.chunk_tokens}")
        return self

    @model_validator(mode="after")
    def _check_blob(self) -> "TokenizerRecord":
        if self.blob.bytes > SMALL_BLOB_LIMIT:
            raise ValueError(f"the tokenizer has more than {SMALL_BLOB_LIMIT} bytes")
        return self


class RefinerFacts(Record):
    """Facts about a refiner that the pipeline needs."""

    force_zeros_for_empty_prompt: bool
    requires_aesthetics_score: bool


class PreviewLayer(Record):
    """One layer of a map for previews: outputs = weight @ inputs + bias. `weight` has a row for each output."""

    weight: Annotated[tuple[PreviewRow, ...], Field(min_length=1, max_length=MAX_PREVIEW_UNITS)]
    bias: Annotated[tuple[Coefficient, ...], Field(min_length=1, max_length=MAX_PREVIEW_UNITS)]


class PreviewRecord(Record):
    """A map from latents to the colours of a preview, fitted to the release's VAE decoder.

    The first layer reads the 3 x 3 latents around a pixel, channel by channel, and tanh follows it. The second returns
    red, green and blue in [-1, 1]. `error`: mean difference from the decoder's colours on pictures outside of the fit,
    as a share of the range.
    """

    version: Literal[1]
    layers: tuple[PreviewLayer, PreviewLayer]
    error: Annotated[float, Field(ge=0, le=1)]

    @model_validator(mode="after")
    def _check_shapes(self) -> "PreviewRecord":
        sizes = [len(self.layers[0].weight[0]), len(self.layers[0].weight), 3]
        for layer, inputs, outputs in zip(self.layers, sizes, sizes[1:], strict=False):
            if len(layer.weight) != outputs or len(layer.bias) != outputs:
                raise ValueError("a layer of the map for previews has another number of outputs")
            if any(len(row) != inputs for row in layer.weight):
                raise ValueError("a layer of the map for previews has another number of inputs")
        return self


class ModelFacts(Record):
    """Facts about a model that the pipeline needs. Heights and widths in pixels.

    `preview`: None in releases of older versions, and if the build did not run the VAE; servers then fit a map.
    `latents_mean`, `latents_std`: of the VAE's latents, by channel; the UNet reads (latents - mean) / std * scaling.
    """

    native_height: Size
    native_width: Size
    vae_scale_factor: Annotated[int, Field(ge=1, le=999)]
    vae_scaling_factor: Annotated[float, Field(gt=0)]
    latent_channels: Annotated[int, Field(ge=1, le=1024)]
    force_zeros_for_empty_prompt: bool
    refiner: RefinerFacts | None = None
    latents_mean: Annotated[tuple[float, ...], Field(min_length=1, max_length=1024)] | None = None
    latents_std: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1, max_length=1024)] | None = (
        None
    )
    preview: PreviewRecord | None = None

    @model_serializer(mode="wrap")
    def _omit_added(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit missing entries that older versions do not support, so that they can read the record."""
        entries: dict[str, Any] = write(self)
        added = ("latents_mean", "latents_std", "preview")
        return {key: value for key, value in entries.items() if value is not None or key not in added}

    @model_validator(mode="after")
    def _check_normalization(self) -> "ModelFacts":
        lengths = {len(values) for values in (self.latents_mean, self.latents_std) if values is not None}
        if (self.latents_mean is None) != (self.latents_std is None) or lengths - {self.latent_channels}:
            raise ValueError("the latents' mean and deviation do not have one number for each channel")
        return self

    @model_validator(mode="after")
    def _check_preview(self) -> "ModelFacts":
        if self.preview is not None and len(self.preview.layers[0].weight[0]) != 9 * self.latent_channels:
            raise ValueError("the map for previews does not have nine inputs for each channel of the latents")
        return self

    @model_validator(mode="after")
    def _check_native_size(self) -> "ModelFacts":
        if self.native_height % self.vae_scale_factor or self.native_width % self.vae_scale_factor:
            raise ValueError("the native size is not a multiple of the VAE's scale")
        return self


class Validation(Record):
    """The comparison of FP8 engines with the model's own precision that the release was published with.

    `report`: JSON. `pictures`: a PNG of pairs, the worst first. Servers fetch neither. `accepted`: published although
    limits were violated, which `violations` lists.
    """

    report: Blob
    pictures: Blob
    accepted: bool
    violations: Annotated[tuple[Sentence, ...], Field(max_length=100)]

    @model_validator(mode="after")
    def _check_entries(self) -> "Validation":
        if self.accepted != bool(self.violations):
            raise ValueError("a validation is accepted if, and only if, it lists violated limits")
        if max(self.report.bytes, self.pictures.bytes) > SMALL_BLOB_LIMIT:
            raise ValueError(f"a blob of the validation has more than {SMALL_BLOB_LIMIT} bytes")
        return self


class Fp16Steps(Record):
    """The first and last steps of an image on each UNet that run on the UNet in fp16, of a release with 8-bit UNets."""

    first: Annotated[int, Field(ge=0, le=MAX_STEPS, strict=True)] = 0
    last: Annotated[int, Field(ge=0, le=MAX_STEPS, strict=True)] = 0

    @property
    def exist(self) -> bool:
        """True if there are such steps."""
        return bool(self.first or self.last)


class ReleaseSignature(Record):
    """The id of the Ed25519 key that signed the release, and its signature (64 bytes, base64) of `signed_bytes`."""

    key_id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
    ed25519: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/]{85}[AQgw]==$")]


class Manifest(Record):
    """One release.

    `defaults`: the request defaults that it changes. `schedulers`: the configs of diffusers' schedulers.
    `architectures`: every network of the release -> digest of its architecture. `fp16_steps`: the default of
    deployments that serve an 8-bit precision. `schema_version`: a server that knows only older schemas refuses the
    release by that number. Some releases with entries of schema 2 state 1.
    """

    schema_version: Literal[1, 2, 3, 4, 5] = 1
    model: Name
    version: Name
    family: Family
    created: str
    builder: dict[str, str]
    settings: ModelFacts
    defaults: dict[str, Any] = {}
    schedulers: dict[Literal["base", "refiner"], dict[str, Any]]
    tokenizers: dict[Literal["tokenizer", "tokenizer_2"], TokenizerRecord]
    architectures: dict[Name, Digest]
    engines: tuple[EngineRecord, ...]
    weights: tuple[WeightsRecord, ...]
    fp16_steps: Fp16Steps | None = None
    validation: Validation | None = None
    signature: ReleaseSignature | None = None

    @model_validator(mode="after")
    def _check_consistency(self) -> "Manifest":
        used = {engine.component for engine in self.engines} | {weights.component for weights in self.weights}
        if unknown := used - self.architectures.keys():
            raise ValueError(f"{min(unknown)} has no architecture")
        _refuse_duplicates("engine", [(engine.component, engine.key) for engine in self.engines])
        _refuse_duplicates("weights", [weights.key for weights in self.weights])
        sizes: dict[str, int] = {}
        for blob in self._named_blobs():
            if sizes.setdefault(blob.sha256, blob.bytes) != blob.bytes:
                raise ValueError(f"blob {blob.sha256[:12]} has two sizes")
        has_networks = any(component.startswith("refiner_") for component in self.architectures)
        if has_networks and self.settings.refiner is None:
            raise ValueError("the release has networks of a refiner but not its settings")
        # Both text encoders must read a token as the same number of vectors, or their chunks belong to different texts.
        counts = [{token: len(ids) for token, ids in (t.embeddings or {}).items()} for t in self.tokenizers.values()]
        if any(other != counts[0] for other in counts):
            raise ValueError("the tokenizers have different embeddings")
        return self

    @property
    def name(self) -> str:
        """The release's name, "model/version"."""
        return f"{self.model}/{self.version}"

    @property
    def required_schema(self) -> int:
        """The oldest schema that has all entries of this release.

        Schema 5 added a tokenizer's `embeddings` and the map for previews.
        """
        if self.settings.preview is not None or any(record.embeddings for record in self.tokenizers.values()):
            return 5
        is_new = self.validation is not None or self.fp16_steps is not None
        return max([2 if is_new else 1, *(engine.required_schema for engine in self.engines)])

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the networks in this release."""
        return tuple(self.architectures)

    @property
    def has_refiner(self) -> bool:
        return self.settings.refiner is not None

    @property
    def targets(self) -> tuple[str, ...]:
        """The keys of the targets that this release has engines for, sorted."""
        return tuple(sorted({engine.target for engine in self.engines}))

    def blobs(self) -> dict[str, Blob]:
        """Return every blob that the release names, by digest."""
        return {blob.sha256: blob for blob in self._named_blobs()}

    def _named_blobs(self) -> list[Blob]:
        blobs = [e.blob for e in self.engines] + [e.constants for e in self.engines]
        blobs += [blob for e in self.engines if e.tensorrt for blob in (e.tensorrt.literals, e.tensorrt.onnx)]
        blobs += [blob for w in self.weights for blob in w.blobs]
        blobs += [self.validation.report, self.validation.pictures] if self.validation else []
        return blobs + [t.blob for t in self.tokenizers.values()]

    @property
    def title(self) -> str:
        """The release in messages."""
        return f"Release {self.name}"

    def to_json(self) -> bytes:
        """Return the manifest as the bytes of its file."""
        # A release without them stays readable for versions that do not know them.
        absent = {name for name in ("signature", "validation", "fp16_steps") if getattr(self, name) is None}
        return json.dumps(self.model_dump(mode="json", exclude=absent), indent=1, sort_keys=True).encode()

    def signed_bytes(self) -> bytes:
        """Return the bytes to sign: the canonical JSON of a parsed manifest, without the signature.

        Entries that the file lacks are omitted, so a version with more optional entries returns the same bytes.
        """
        entries = self.model_dump(mode="json", exclude={"signature"}, exclude_unset=True)
        canonical = json.dumps(entries, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return _SIGNED_PREFIX + canonical.encode()


def _refuse_duplicates(what: str, identities: list[tuple[str, ...]]) -> None:
    seen: set[tuple[str, ...]] = set()
    for identity in identities:
        if identity in seen:
            raise ValueError(f"{what} {' '.join(identity)} is listed twice")
        seen.add(identity)
