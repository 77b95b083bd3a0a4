"""A release's weights by the names that an engine's code has for them, checked: the runtimes check next to nothing."""

from collections.abc import Mapping

import torch

from model.engines.components import (
    DTYPES,
    dtype_name,
)
from model.errors import EngineError, ManifestError
from model.store.manifest_json import parse_constants


def map_constants(
    component: str, constants: bytes, weights: Mapping[str, torch.Tensor], again: str
) -> dict[str, torch.Tensor]:
    """Name in the code -> tensor, each of the dtype and shape that the engine record's map (`constants`) says.

    Raises EngineError, which ends in `again`: the sentence that says how to mend it.
    """
    try:
        expected = parse_constants(constants)
    except ManifestError as error:
        raise EngineError(f"The {component} engine cannot be opened: {error} To mend it, {again}") from error
    mapped: dict[str, torch.Tensor] = {}
    for name, constant in expected.items():
        tensor = weights.get(constant.tensor)
        if tensor is None:
            raise EngineError(f"The weights of {component} lack {constant.tensor}: {again}")
        if tuple(tensor.shape) != constant.shape or tensor.dtype != DTYPES[constant.dtype]:
            raise EngineError(
                f"The weights of {component} do not fit its engine: {constant.tensor} is {dtype_name(tensor.dtype)} "
                f"{list(tensor.shape)}, expected {constant.dtype} {list(constant.shape)}; {again}"
            )
        mapped[name] = tensor
    return mapped
