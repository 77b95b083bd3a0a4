"""Check that each loaded engine takes and returns the tensors that the pipeline's description names."""

from collections.abc import Mapping
from dataclasses import replace

from model.engines.engine import EngineSet
from model.engines.signatures import Widths
from model.errors import EngineError
from model.pipeline.spec import COMPONENTS, TEXT_ENCODER_FINAL, ComponentSpec
from model.store.manifest import Signature

# Only names are compared, so the sizes do not matter.
_WIDTHS = Widths(
    tokens=1, text_width=1, text_width_2=1, pooled_width=1, context_width=1, latent_channels=1, time_ids=1, vae_scale=1,
    time_embeds_width=1, keys_values_width=1,
)  # fmt: skip
_Names = tuple[list[str], list[str]]


def check_interfaces(engines: Mapping[str, EngineSet]) -> None:
    """Raise EngineError for a component whose engines have the inputs or outputs of another one."""
    # The UNets of the other text encoders take pooled text.
    widths = replace(_WIDTHS, pooled_width=0) if TEXT_ENCODER_FINAL in engines else _WIDTHS
    for name, engine_set in engines.items():
        spec = COMPONENTS[name]
        actual, expected = _names(engine_set.signature), _expected_names(spec, widths)
        if actual not in expected:
            raise EngineError(
                f"The {name} engines cannot be used. They take {', '.join(actual[0])} and return "
                f"{', '.join(actual[1])}; {name} takes {', '.join(expected[0][0])} and returns "
                f"{', '.join(expected[0][1])}. The release mixes up its engines."
            )


def _expected_names(spec: ComponentSpec, widths: Widths) -> list[_Names]:
    """Return a component's names without and with the embedded guidance scale."""
    return [_names(spec.signature(replace(widths, timestep_cond=width), "float32")) for width in (0, 1)]


def _names(signature: Signature) -> _Names:
    return [spec.name for spec in signature.inputs], [spec.name for spec in signature.outputs]
