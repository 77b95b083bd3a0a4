"""Check the tensors that an engine takes and returns against its signature.

Neither runtime checks the shapes of its inputs, so every engine checks them here.
"""

from collections.abc import Mapping, Sequence

import torch

from model.errors import EngineError
from model.store.manifest import Signature
from model.store.precision import StorageDtype

DTYPES: dict[StorageDtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> "float32"."""
    return str(dtype).removeprefix("torch.")


def bind_shapes(signature: Signature, inputs: Mapping[str, torch.Tensor], component: str) -> dict[str, int]:
    """Check `inputs` against the signature. Returns its symbols: {"rows": batch, "height": pixels, "width": pixels}.

    Raises EngineError naming the input: missing or unknown, a wrong dtype, a shape that contradicts the signature or
    another input.
    """
    names = [spec.name for spec in signature.inputs]
    if set(names) != set(inputs):
        raise EngineError(f"{component} takes {', '.join(names)}; it received {', '.join(inputs) or 'nothing'}.", "")
    sizes: dict[str, int] = {}
    for spec in signature.inputs:
        tensor = inputs[spec.name]
        matches = tensor.dtype == DTYPES[spec.dtype] and len(tensor.shape) == len(spec.shape)
        for size, dimension in zip(tensor.shape, spec.shape, strict=False):
            if isinstance(dimension, int):
                matches = matches and size == dimension
            else:
                symbol, divisor = symbol_of(dimension)
                value = size * divisor
                matches = matches and sizes.setdefault(symbol, value) == value
        if not matches:
            raise EngineError(
                f"{component}: input {spec.name} is {dtype_name(tensor.dtype)} {list(tensor.shape)}, "
                f"expected {spec.dtype} {list(spec.shape)}" + (f" with {sizes}." if sizes else "."),
                "",
            )
    return sizes


def bind_outputs(
    signature: Signature, outputs: Sequence[torch.Tensor], sizes: Mapping[str, int], component: str
) -> dict[str, torch.Tensor]:
    """Return an engine's outputs by name. They are in the order of the signature, and `sizes` is from `bind_shapes`.

    Raises EngineError for a wrong number, dtype or shape: the code does not match its manifest entry.
    """
    if len(outputs) != len(signature.outputs):
        raise EngineError(
            f"The {component} engine and its manifest entry disagree on the number of outputs: {len(outputs)} and "
            f"{len(signature.outputs)}."
        )
    for spec, tensor in zip(signature.outputs, outputs, strict=True):
        expected = shape_at(spec.shape, sizes)
        if tensor.dtype != DTYPES[spec.dtype] or tuple(tensor.shape) != expected:
            raise EngineError(
                f"The {component} engine returns {spec.name} as {dtype_name(tensor.dtype)} {list(tensor.shape)}, and "
                f"its manifest entry states {spec.dtype} {list(expected)}."
            )
    return {spec.name: tensor for spec, tensor in zip(signature.outputs, outputs, strict=True)}


def symbol_of(dimension: str) -> tuple[str, int]:
    """Return the symbol of a dimension and its divisor: "height/8" -> ("height", 8)."""
    symbol, _, divisor = dimension.partition("/")
    return symbol, int(divisor or 1)


def shape_at(shape: Sequence[int | str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return a symbolic shape in numbers: ("rows", 4, "height/8") at {"rows": 2, "height": 64} -> (2, 4, 8)."""
    parsed = [size if isinstance(size, int) else symbol_of(size) for size in shape]
    return tuple(size if isinstance(size, int) else sizes[size[0]] // size[1] for size in parsed)
