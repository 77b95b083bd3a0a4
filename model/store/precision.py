"""The number types of an engine. A manifest holds their short name, and code reads the type that it needs."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

Dtype = Literal["float32", "float16", "bfloat16", "int64", "int32", "uint8"]
"""The types that a manifest may name."""
StorageDtype = Dtype | Literal["float8_e4m3fn", "int8"]
DTYPE_BYTES: dict[StorageDtype, int] = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int64": 8, "int32": 4, "int8": 1, "uint8": 1,
}  # fmt: skip
PrecisionName = Literal["fp32", "fp16", "bf16", "fp8", "int8"]


@dataclass(frozen=True)
class Precision:
    """`storage`: the type of the weights in the store and on the device. `compute`: the operands of matrix products.
    `io`: a component's inputs and outputs. In an 8-bit precision these are the types of the quantized layers."""

    name: PrecisionName
    storage: StorageDtype
    compute: StorageDtype
    io: Dtype

    @classmethod
    def named(cls, name: Any) -> "Precision":
        """Return the precision of that name. Raises ValueError for an unknown name."""
        if not isinstance(name, str) or name not in PRECISIONS:
            raise ValueError(f"the precision is one of {', '.join(PRECISIONS)}")
        return PRECISIONS[name]

    @property
    def unquantized(self) -> "Precision":
        """The precision of everything that is not quantized: FP16 for 8-bit precisions, otherwise this one."""
        return FP16 if self.storage in ("float8_e4m3fn", "int8") else self

    @property
    def is_quantized(self) -> bool:
        """True for 8-bit precisions."""
        return self.unquantized != self

    def __str__(self) -> str:
        return self.name


FP32 = Precision("fp32", "float32", "float32", "float32")
FP16 = Precision("fp16", "float16", "float16", "float16")
BF16 = Precision("bf16", "bfloat16", "bfloat16", "bfloat16")
# Quantized engines keep half precision for inputs and outputs, so that they exchange tensors with the fp16 components.
FP8 = Precision("fp8", "float8_e4m3fn", "float8_e4m3fn", "float16")
INT8 = Precision("int8", "int8", "int8", "float16")
PRECISIONS: dict[str, Precision] = {precision.name: precision for precision in (FP32, FP16, BF16, FP8, INT8)}
# If a release has a component in several precisions, the first of these is served. Those that change images are last.
SERVED_FIRST = (FP16, BF16, FP32, FP8, INT8)

PrecisionField = Annotated[
    Precision,
    PlainValidator(lambda value: value if isinstance(value, Precision) else Precision.named(value)),
    PlainSerializer(lambda precision: precision.name, return_type=str),
    WithJsonSchema({"enum": list(PRECISIONS)}),
]
"""A pydantic field that is a name in JSON and a `Precision` in Python."""
