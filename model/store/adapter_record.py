"""The record of an adapter: changes of a model's layers, by SHA-256. Written once, like a release.

Names of layers and their shapes are those of the checkpoint. So a record fits every release of the architecture, in any
precision and for any target. The parts of layer L's change are tensors of the blobs, in the dtype of the adapter's
file: `L.down` [rank, in...] and `L.up` [out, rank] of a LoRA, and those of other forms by their names.
"""

import json
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, model_validator

from model.errors import AdapterError
from model.store.adapter_forms import FACTORS, MAX_RANK, FormName, Shapes, check_parts
from model.store.manifest import (
    BLOB_LIMIT,
    SIGNED_ADAPTER_PREFIX,
    Blob,
    Digest,
    Name,
    Record,
    ReleaseSignature,
)
from model.store.manifest_json import printable, problem, refuse_repeated_keys

MAX_LAYERS = 8192  # SDXL has some 1,100 layers, and with biases and norms 2,900 tensors, that adapters change
ADAPTER_LIMIT = 2**22  # bytes of a record; one of SDXL has some 150 KiB, and some 1 MiB with parts
_FIRST_MAX_RANK = 128  # of schema 1, whose layers are LoRAs

LayerName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+(\.[a-z0-9_]+){1,30}$", max_length=300)]
Side = Annotated[int, Field(ge=1, le=2**20)]


class AdapterLayer(Record):
    """The change of one layer: `scale` times what its parts make.

    shape: of the layer's tensor, [out, in] or [out, in, 3, 3], or [out] of a bias. A LoRA has a `rank`. Other changes
    have a `form` and the shapes of their `parts`, see `model.store.adapter_forms`.
    """

    rank: Annotated[int, Field(ge=1, le=MAX_RANK)] | None = None
    scale: float  # alpha / rank
    shape: Annotated[tuple[Side, ...], Field(min_length=1, max_length=4)]
    form: FormName | None = None
    parts: Annotated[dict[str, tuple[Side, ...]], Field(min_length=1, max_length=8)] | None = None

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if (self.form is None) != (self.parts is None) or (self.rank is None) == (self.form is None):
            raise ValueError("expected a rank, or a form and its parts")
        if self.is_low_rank and self.rank is None:
            raise ValueError("expected a rank")
        check_parts(self.form or "matrix", self.shape, self.part_shapes)
        return self

    @property
    def part_shapes(self) -> Shapes:
        """The shape of each part by its name."""
        if self.parts is not None:
            return self.parts
        assert self.rank is not None
        return {"down": (self.rank, *self.shape[1:]), "up": (self.shape[0], self.rank)}

    @property
    def is_low_rank(self) -> bool:
        """True for a plain LoRA, which a network may take as an input."""
        return self.part_shapes.keys() == FACTORS


class AdapterRecord(Record):
    """One adapter. `source`: SHA-256 of the file that it was read from. Schema 2 added forms, and ranks above 128."""

    schema_version: Literal[1, 2] = 1
    name: Name
    source: Digest
    layers: Annotated[dict[LayerName, AdapterLayer], Field(min_length=1, max_length=MAX_LAYERS)]
    blobs: Annotated[tuple[Blob, ...], Field(min_length=1, max_length=64)]
    signature: ReleaseSignature | None = None

    @model_validator(mode="after")
    def _check_blobs(self) -> "AdapterRecord":
        if any(blob.bytes > BLOB_LIMIT for blob in self.blobs):
            raise ValueError(f"a blob has more than {BLOB_LIMIT} bytes")
        if len({blob.sha256 for blob in self.blobs}) < len(self.blobs):
            raise ValueError("a blob is listed twice")
        return self

    @property
    def required_schema(self) -> Literal[1, 2]:
        """The first schema that has all entries of the record."""
        is_first = all(layer.rank is not None and layer.rank <= _FIRST_MAX_RANK for layer in self.layers.values())
        return 1 if is_first else 2

    @property
    def title(self) -> str:
        """The record in messages."""
        return f"Adapter {self.name}"

    def to_json(self) -> bytes:
        """Return the record as the bytes of its file."""
        return json.dumps(self.model_dump(mode="json", exclude_none=True), indent=1, sort_keys=True).encode()

    def signed_bytes(self) -> bytes:
        """Return the bytes to sign: the canonical JSON of the record without the signature."""
        entries = self.model_dump(mode="json", exclude={"signature"}, exclude_none=True)
        return SIGNED_ADAPTER_PREFIX + json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()

    @property
    def total_bytes(self) -> int:
        """Bytes of all blobs."""
        return sum(blob.bytes for blob in self.blobs)


def parse_adapter(data: bytes, name: str) -> AdapterRecord:
    """Read the record of adapter `name`. Raises AdapterError."""
    if len(data) > ADAPTER_LIMIT:
        raise AdapterError(f"The record of adapter {name} has more than {ADAPTER_LIMIT} bytes.")
    try:
        json.loads(data, object_pairs_hook=refuse_repeated_keys)
        record = AdapterRecord.model_validate_json(data, strict=True)
    except ValidationError as error:
        raise AdapterError(f"The record of adapter {name} is damaged at {problem(error)}.") from error
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"The record of adapter {name} is not JSON ({printable(str(error))}).") from error
    if record.name != name:
        raise AdapterError(f"The record of adapter {name} is that of {record.name}.")
    return record
