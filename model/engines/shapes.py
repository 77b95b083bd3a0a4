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
    """Check `inputs` against the signature and return its symbols: {"rows": batch, "height": pixels, "width": pixels}.

    Raises EngineError naming the input: missing or unknown, a wrong dtype, a shape that contradicts the signature or
    another input.
    """
    names = [spec.name for spec in signature.inputs]
    if set(names) != set(inputs):
        raise EngineError(f"{component} takes {', '.join(names)}; it received {', '.join(inputs) or 'nothing'}.", "")
    known: dict[str, int] = {}
    for spec in signature.inputs:
        tensor = inputs[spec.name]
        matches = tensor.dtype == DTYPES[spec.dtype] and len(tensor.shape) == len(spec.shape)
        for size, dimension in zip(tensor.shape, spec.shape, strict=False):
            if isinstance(dimension, int):
                matches = matches and size == dimension
            else:
                symbol, _, divisor = dimension.partition("/")
                value = size * int(divisor or 1)
                matches = matches and known.setdefault(symbol, value) == value
        if not matches:
            raise EngineError(
                f"{component}: input {spec.name} is {dtype_name(tensor.dtype)} {list(tensor.shape)}, "
                f"expected {spec.dtype} {list(spec.shape)}" + (f" with {known}." if known else "."),
                "",
            )
    return known


def bind_outputs(
    signature: Signature, outputs: Sequence[torch.Tensor], sizes: Mapping[str, int], component: str
) -> dict[str, torch.Tensor]:
    """Name an engine's outputs, in the order of the signature. `sizes` are what `bind_shapes` returned.

    Raises EngineError for a wrong number, dtype or shape: the code is not what its record states.
    """
    if len(outputs) != len(signature.outputs):
        raise EngineError(
            f"The {component} engine returns {len(outputs)} tensors and its record names {len(signature.outputs)}."
        )
    for spec, tensor in zip(signature.outputs, outputs, strict=True):
        expected = [size if isinstance(size, int) else _size(size, sizes) for size in spec.shape]
        if tensor.dtype != DTYPES[spec.dtype] or list(tensor.shape) != expected:
            raise EngineError(
                f"The {component} engine returns {spec.name} as {dtype_name(tensor.dtype)} {list(tensor.shape)}, and "
                f"its record states {spec.dtype} {expected}."
            )
    return {spec.name: tensor for spec, tensor in zip(signature.outputs, outputs, strict=True)}


def _size(dimension: str, sizes: Mapping[str, int]) -> int:
    """ "height/8" and {"height": 64} -> 8."""
    symbol, _, divisor = dimension.partition("/")
    return sizes[symbol] // int(divisor or 1)
