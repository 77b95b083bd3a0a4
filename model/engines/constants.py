"""Map a release's weights to the names in an engine's code. Runtimes check almost nothing, so all is checked here."""

from collections.abc import Mapping

import torch

from model.engines.shapes import DTYPES, dtype_name
from model.errors import EngineError, ManifestError
from model.store.manifest import Constant
from model.store.manifest_json import parse_constants


def read_constants(component: str, constants: bytes) -> dict[str, Constant]:
    """Return an engine record's map, which is JSON. Raises EngineError if it is damaged."""
    try:
        return parse_constants(constants)
    except ManifestError as error:
        raise EngineError(f"The {component} engine cannot be opened: {error.args[0]}") from error


def map_constants(
    component: str, constants: Mapping[str, Constant], weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors of `weights` by their names in the code.

    `constants`: see `read_constants`. Raises EngineError unless each tensor has the dtype and shape that the map
    states.
    """
    mapped: dict[str, torch.Tensor] = {}
    for name, constant in constants.items():
        tensor = weights.get(constant.tensor)
        if tensor is None:
            raise EngineError(f"The weights of {component} lack {constant.tensor}.")
        if tuple(tensor.shape) != constant.shape or tensor.dtype != DTYPES[constant.dtype]:
            raise EngineError(
                f"The weights of {component} do not fit its engine: {constant.tensor} is {dtype_name(tensor.dtype)} "
                f"{list(tensor.shape)}, expected {constant.dtype} {list(constant.shape)}."
            )
        mapped[name] = tensor
    return mapped
