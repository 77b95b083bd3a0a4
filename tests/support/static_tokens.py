"""Networks of a CPU as a graph loop expects them: with a number of tokens, as engines for a GPU have."""

import copy
from dataclasses import replace

from model.denoising.graph_loop import GraphLoop
from model.denoising.networks import Denoiser
from model.engines.engine import EngineSet
from model.engines.signatures import TOKENS
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.spec import UNET
from tests.support.loops import captured


def with_static_tokens(denoiser: Denoiser, tokens: int = 77) -> Denoiser:
    """Return the same engines with signatures that state `tokens`."""
    return replace(
        denoiser,
        variants=tuple(replace(one, engines=_static(one.engines, tokens)) for one in denoiser.variants),
        before=tuple(replace(one, engines=_static(one.engines, tokens)) for one in denoiser.before),
    )


def with_graph_loop(model: LoadedModel, side: int, tokens: int = 77) -> LoadedModel:
    """Return the model with a loop of square images that has the buffers of a GPU's, and whose graphs run op by op."""
    denoiser = with_static_tokens(model.denoiser(UNET, side, side), tokens)
    return replace(model, loops={(UNET, side, side): captured(GraphLoop(denoiser, side, side, model.device))})


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
