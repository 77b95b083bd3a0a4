"""One protocol, one file per runtime. An engine is native code: it is opened only after its digest was checked."""

from collections.abc import Mapping
from typing import Protocol

import torch

from model.store.manifest import Signature

__all__ = ["Engine"]


class Engine(Protocol):
    """Compiled code of one component, with weights mapped into it."""

    component: str
    signature: Signature

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Named tensors in, named tensors out, on the current stream. Raises EngineError for inputs it does not take."""
