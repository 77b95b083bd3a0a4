"""Check that each loaded engine takes and returns the tensors that the pipeline's description names."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from model.engines.engine import EngineSet
from model.engines.signatures import IMAGE_BIAS, IMAGE_FEATURES, IMAGE_KEYS, IMAGE_VALUES, Widths, residuals_of
from model.errors import EngineError
from model.pipeline.spec import (
    CONTROL_COMPONENTS,
    CONTROLNET,
    IMAGE_ENCODER,
    IP_ADAPTER,
    TEXT_ENCODER_FINAL,
    UNET_CONTROLLED,
    UNET_IP,
    ComponentSpec,
    find_component,
    ip_adapters_of,
)
from model.store.manifest import Signature, TensorSpec

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
    residuals = residuals_of(engines[UNET_CONTROLLED].signature) if UNET_CONTROLLED in engines else ()
    for name, engine_set in engines.items():
        spec, _ = find_component(name)
        actual, expected = _names(engine_set.signature), _expected_names(spec, widths, residuals)
        if actual not in expected:
            raise EngineError(
                f"The {name} engines cannot be used. They take {', '.join(actual[0])} and return "
                f"{', '.join(actual[1])}; {name} takes {', '.join(expected[0][0])} and returns "
                f"{', '.join(expected[0][1])}. The release mixes up its engines."
            )
        if spec.feeds == UNET_CONTROLLED and _shapes(engine_set.signature.outputs) != _shapes(residuals):
            raise EngineError(
                f"The {name} engines cannot be used. Their outputs do not have the shapes that {UNET_CONTROLLED} adds "
                "them to. The release mixes up its engines."
            )
    if UNET_IP in engines:
        _check_ip_adapters(engines, residuals)


def _check_ip_adapters(engines: Mapping[str, EngineSet], residuals: Sequence[TensorSpec]) -> None:
    """Raise EngineError if the tensors that an IP-Adapter's networks pass on have different shapes."""
    unet = engines[UNET_IP].signature
    inputs = {spec.name: spec.shape for spec in unet.inputs}
    own_residuals = residuals_of(unet)
    problem = (
        "the shapes of the ControlNets' outputs"
        if residuals and own_residuals and (_shapes(residuals) != _shapes(own_residuals))
        else ""
    )
    slots = inputs[IMAGE_BIAS]
    if len(slots) != 3 or any(inputs[name] != (*slots, inputs[name][-1]) for name in (IMAGE_KEYS, IMAGE_VALUES)):
        problem = "the shapes of keys, values and bias of images"
    for name in ip_adapters_of(engines):
        adapter = engines[f"{IP_ADAPTER}.{name}"].signature
        encoder = engines[f"{IMAGE_ENCODER}.{name}"].signature
        features = {spec.name: spec.shape for spec in (*adapter.inputs, *encoder.outputs)}
        if [spec.shape for spec in encoder.outputs] != [features[IMAGE_FEATURES]]:
            problem = f"the features of images of {name}"
        if any(len(spec.shape) != 3 or spec.shape[-1] != inputs[spec.name][-1] for spec in adapter.outputs):
            problem = f"the keys and values of {name}"
    if problem:
        raise EngineError(f"The engines of IP-Adapters differ in {problem}. The release mixes up its engines.")


def _expected_names(spec: ComponentSpec, widths: Widths, residuals: Sequence[TensorSpec]) -> list[_Names]:
    """Return a component's names without and with its optional inputs.

    Those are the embedded guidance scale, clip_skip, and of ControlNets the text and the type of the control image.
    """
    variants = [replace(widths, timestep_cond=n, text_layers=n, text_layers_2=n) for n in (0, 1)]
    kind = spec.name.partition(".")[0]
    if kind == UNET_IP:  # with or without the outputs of ControlNets
        with_residuals = replace(widths, residuals=((1, 1),) * len(residuals))
        variants = [widths, with_residuals] if residuals else [widths]
    if kind in CONTROL_COMPONENTS:
        of_control = replace(widths, residuals=((1, 1),) * len(residuals))
        texts = (1, 0) if kind == CONTROLNET else (1,)
        variants = [
            replace(of_control, control_types=types, keys_values_width=text) for types in (0, 1) for text in texts
        ]
    return [_names(spec.signature(variant, "float32")) for variant in variants]


def _shapes(specs: Sequence[TensorSpec]) -> list[tuple[object, ...]]:
    return [(spec.name, *spec.shape) for spec in specs]


def _names(signature: Signature) -> _Names:
    return [spec.name for spec in signature.inputs], [spec.name for spec in signature.outputs]
