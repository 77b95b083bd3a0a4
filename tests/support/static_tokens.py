"""Networks of a CPU as a graph loop expects them: with a number of tokens, as engines for a GPU have."""

import copy
from dataclasses import replace

from model.denoising.loop import StepNetworks
from model.engines.engine import EngineSet
from model.engines.signatures import TOKENS


def with_static_tokens(networks: StepNetworks, tokens: int = 77) -> StepNetworks:
    """Return the same engines with signatures that state `tokens`."""
    return replace(
        networks,
        unet=_static(networks.unet, tokens),
        controlled=None if networks.controlled is None else _static(networks.controlled, tokens),
        image_prompted=None if networks.image_prompted is None else _static(networks.image_prompted, tokens),
        controlnets={name: _static(engines, tokens) for name, engines in networks.controlnets.items()},
    )


def _static(engines: EngineSet, tokens: int) -> EngineSet:
    static = copy.copy(engines)
    static.signature = engines.signature.model_copy(
        update={
            "inputs": tuple(
                spec.model_copy(update={"shape": tuple(tokens if size == TOKENS else size for size in spec.shape)})
                for spec in engines.signature.inputs
            )
        }
    )
    return static
