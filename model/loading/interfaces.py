"""Check that each loaded engine takes and returns the tensors that the pipeline's description names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from model.engines import signatures
from model.engines.engine import EngineSet
from model.engines.features import FEATURES, denoiser_signature, engine_name, features_of, parse_name
from model.engines.signatures import IMAGE_BIAS, IMAGE_FEATURES, IMAGE_KEYS, IMAGE_VALUES, UnetWidths, VaeWidths
from model.errors import EngineError
from model.pipeline.components import find_component
from model.pipeline.spec import IMAGE_ENCODER, IP_ADAPTER, ip_adapters_of
from model.store.manifest import Signature

# Only names are compared, so the sizes do not matter.
_VAE = VaeWidths(latent_channels=1, scale=1)
_UNET = UnetWidths(
    _VAE, tokens=1, context_width=1, pooled_width=1, time_ids=1, time_embeds_width=1, keys_values_width=1
)
_Names = tuple[list[str], list[str]]
_Shape = tuple[str | int, ...]


def check_interfaces(engines: Mapping[str, EngineSet]) -> None:
    """Raise EngineError for a component whose engines have the inputs or outputs of another one."""
    pools_text = any(find_component(name).signature is signatures.pooled_text_signature for name in engines)
    unet = _UNET if pools_text else replace(_UNET, pooled_width=0)
    for name, engine_set in engines.items():
        actual, expected = _names(engine_set.signature), _expected_names(name, unet, engine_set.signature)
        if actual not in expected:
            raise EngineError(
                f"The {name} engines cannot be used. They take {', '.join(actual[0])} and return "
                f"{', '.join(actual[1])}; {name} takes {', '.join(expected[0][0])} and returns "
                f"{', '.join(expected[0][1])}. The release mixes up its engines."
            )
    for part in ("base", "refiner"):
        _check_features({name: one for name, one in engines.items() if find_component(name).part == part})


def _check_features(engines: Mapping[str, EngineSet]) -> None:
    """Raise EngineError if the shapes of what is passed on to the UNets of a part differ."""
    inputs: dict[str, _Shape] = {}  # of features, by name
    for name, engine_set in engines.items():
        if find_component(name).is_denoiser:
            own = {spec.name: spec.shape for spec in engine_set.signature.inputs if _features_of_input(spec.name)}
            if differing := [one for one, shape in own.items() if inputs.get(one, shape) != shape]:
                raise EngineError(
                    f"The {name} engines cannot be used. Their {differing[0]} has another shape than the input of this "
                    "name of other UNets. The release mixes up its engines."
                )
            inputs |= own
    for name, engine_set in engines.items():
        if feature := find_component(name).adds_to:
            added = {one: shape for one, shape in inputs.items() if feature in _features_of_input(one)}
            if {spec.name: spec.shape for spec in engine_set.signature.outputs} != added:
                raise EngineError(
                    f"The {name} engines cannot be used. Their outputs do not have the shapes that UNets add them to. "
                    "The release mixes up its engines."
                )
    if IMAGE_BIAS in inputs:
        _check_ip_adapters(engines, inputs)


def _features_of_input(name: str) -> list[str]:
    """Return the feature that a UNet's input of this name belongs to, empty for an input of every UNet."""
    return [one.name for one in FEATURES.values() if any(given.matches(name) for given in one.inputs)]


def _check_ip_adapters(engines: Mapping[str, EngineSet], inputs: Mapping[str, _Shape]) -> None:
    """Raise EngineError if the tensors that an IP-Adapter's networks pass on have different shapes."""
    problem, slots = "", inputs[IMAGE_BIAS]
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


def _expected_names(name: str, unet: UnetWidths, own: Signature) -> list[_Names]:
    """Return a component's names without and with its optional inputs. `own`: its signature.

    Those are the embedded guidance scale, clip_skip, and of ControlNets the text and the type of the control image.
    """
    spec = find_component(name)
    residuals = signatures.residuals_of(own) if spec.is_denoiser else own.outputs
    with_residuals = replace(unet, residuals=((1, 1),) * len(residuals))
    if spec.is_denoiser:
        features = features_of(name, own)
        if engine_name(parse_name(name).component, features) != name:  # the name may leave out features of `own`
            features = spec.features
        return [_names(denoiser_signature(with_residuals, "float32", features))]
    texts = [signatures.TextEncoderWidths(tokens=1, width=1, pooled_width=1, layers=layers) for layers in (0, 1)]
    types = [replace(with_residuals, control_types=count) for count in (0, 1)]
    widths: dict[Callable[..., Signature], Sequence[object]] = {
        signatures.text_signature: texts,
        signatures.pooled_text_signature: texts,
        signatures.unet_time_signature: [replace(unet, timestep_cond=width) for width in (0, 1)],
        signatures.vae_encoder_signature: [_VAE],
        signatures.vae_decoder_signature: [_VAE],
        signatures.controlnet_time_signature: types,
        signatures.controlnet_image_signature: types,
        signatures.controlnet_signature: [with_residuals, replace(with_residuals, keys_values_width=0)],
        signatures.image_encoder_signature: [signatures.ImageEncoderWidths(side=1, features=(1,))],
        signatures.ip_adapter_signature: [signatures.IpAdapterWidths((1,), tokens=1, keys_values_width=1)],
        signatures.safety_checker_signature: [signatures.SafetyCheckerWidths(1, concepts=1, special_concepts=1)],
    }
    return [_names(spec.signature(of_kind, "float32")) for of_kind in widths.get(spec.signature, [unet])]


def _names(signature: Signature) -> _Names:
    return [spec.name for spec in signature.inputs], [spec.name for spec in signature.outputs]
