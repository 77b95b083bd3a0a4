"""The pipeline as separate Triton models, and the ensemble that has every step written out.

    tokenizer -> text_encoders -> conditioner -> N x (denoiser -> scheduler_step) -> vae_decoder -> postprocessor

A batch entry is an image. The number of steps, the sampler and the size are fixed, so shapes are equal and Triton's
dynamic batching merges requests. Ensembles have no constants: the step index travels as a tensor.

An image that starts from an input image takes fewer steps. Its conditioning has `end` steps, and the remaining ones of
the ensemble change nothing.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from engine_builder.triton_repository.config import ANY, EnsembleStep, Tensor, TritonModel
from engine_builder.triton_repository.write_repository import RepositoryError, Versions
from model.denoising.buffers import SAMPLE, entry_shape
from model.denoising.edm_schedule import schedule_from_dict
from model.denoising.loop_schedule import ROW_WIDTH
from model.denoising.samplers import sampler_schedule
from model.engines.features import CONTROLNET_INPUTS
from model.engines.signatures import KEYS_VALUES, TIMESTEP_COND, control_types
from model.loading.served import read_defaults
from model.pipeline.components import FAMILIES, find_component
from model.pipeline.spec import (
    CONTROLNET,
    CONTROLNET_TIME,
    VAE_DECODER,
    VAE_ENCODER,
    control_components,
    controlnets_of,
)
from model.store.manifest import Blob, EngineRecord, Manifest, TensorSpec
from model.validation import MAX_STEPS

MAX_BATCH = 8  # images of one call; an engine with a smaller batch is called several times
_SERVING = "engine_builder.triton_repository.serving"
_TYPES = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}
_UNET_INPUTS = {"sample", "time_embeds", "keys_values"}
TOKENS, NEGATIVE_GIVEN, POOLED = "tokens", "negative_given", "pooled"
COEFFICIENT_ROWS, DRAWS, END = "coefficients", "draws", "end"
CONTROL_IMAGE, CONTROL_SCALE, CONTROL_MODE = "control_image", "control_scale", "control_mode"  # before .NAME
# Requests with texts of several lengths have several shapes. The conditioner conditions one image after the other.
_NOT_MERGED = ("tokenizer", "conditioner")
OF_TEXTS = (KEYS_VALUES, "time_embeds")  # inputs of a ControlNet that differ by text
CONTROL_BY_STEP = tuple(one.name for one in CONTROLNET_INPUTS if one.by_step)
INPUT_IMAGE, STRENGTH, MASK = "input_image", "strength", "mask"  # the ensemble's output is named `image`
_WARMUP = {"tokenizer": {"prompt": b"warm up"}, "denoiser": {END: (1).to_bytes(4, "little")}}  # other inputs are zeros
KNOWN, KNOWN_NOISE, LATENT_MASK = "known", "known_noise", "latent_mask"


def hidden_name(encoder: str) -> str:
    """Return the name of the tensor of a text encoder's hidden states."""
    return f"{encoder}_hidden_states"


def components_of_model(name: str, manifest: Manifest) -> tuple[str, ...]:
    """Return the components that a model of the unrolled pipeline loads."""
    denoiser = FAMILIES[manifest.family].base
    encoders = tuple(encoder for encoder, _ in denoiser.text_encoders)
    of_steps = {name: find_component(name).phase == "step" for name in control_components(controls_of(manifest))}
    in_steps = (denoiser.unet, *(name for name, runs in of_steps.items() if runs))
    conditioning = (denoiser.text, denoiser.time, *(name for name, runs in of_steps.items() if not runs))
    conditioning += (VAE_ENCODER,) if takes_image(manifest) else ()
    used = {"text_encoders": encoders, "conditioner": conditioning, "denoiser": in_steps}
    return used.get(name, (VAE_DECODER,) if name == "vae_decoder" else ())


def blobs_of_model(name: str, manifest: Manifest) -> list[Blob]:
    """Return the blobs that a model of the unrolled pipeline loads. Tokenizers are opened by every model."""
    components = components_of_model(name, manifest)
    engines = [engine for engine in manifest.engines if engine.component in components]
    blobs = [blob for engine in engines for blob in (engine.blob, engine.constants)]
    blobs += [engine.tensorrt.literals for engine in engines if engine.tensorrt]
    blobs += [blob for weights in manifest.weights if weights.component in components for blob in weights.blobs]
    return blobs + [tokenizer.blob for tokenizer in manifest.tokenizers.values()]


def unrolled_models(manifest: Manifest, steps: int) -> dict[str, TritonModel]:
    """Return the models of the pipeline with this number of steps, by name, without the ensemble.

    Raises RepositoryError, and RequestRefused for a number of steps that the release's sampler does not have.
    """
    defaults = read_defaults(manifest.defaults)
    schedule = sampler_schedule(defaults.scheduler, steps, schedule_from_dict(manifest.schedulers["base"]))
    if schedule.order != 1:
        raise RepositoryError(
            f"The sampler of release {manifest.name}, {schedule.sampler}, runs the UNet twice in a step, which the "
            "unrolled pipeline does not do.",
            "Write the repository with --loop.",
        )
    if defaults.forecast != "off":
        raise RepositoryError(
            f"Release {manifest.name} forecasts some of the steps by default (`forecast`), and the unrolled pipeline "
            "keeps no predictions.",
            "Write the repository with --loop.",
        )
    denoiser = FAMILIES[manifest.family].base
    unet, time, text = (_engine(manifest, name) for name in (denoiser.unet, denoiser.time, denoiser.text))
    if {spec.name for spec in unet.signature.inputs} != _UNET_INPUTS or unet.signature.extra_channels:
        raise RepositoryError(
            f"The UNet of release {manifest.name} takes more than latents, time and text, such as a mask, and the "
            "unrolled pipeline does not make it.",
            "Write the repository with --loop.",
        )
    settings = manifest.settings
    height, width = settings.native_height, settings.native_width
    texts = texts_of(manifest)
    latents = (settings.latent_channels, height // settings.vae_scale_factor, width // settings.vae_scale_factor)
    state = (Tensor("latents", "FP32", latents), Tensor("previous", "FP32", latents))
    step, seed = Tensor("step", "INT32", (1,)), Tensor("seed", "INT64", (1,))
    tokens = Tensor(TOKENS, "INT64", (len(manifest.tokenizers), texts, _tokens(manifest)))
    given = Tensor(NEGATIVE_GIVEN, "INT32", (1,))
    encoded = tuple(_encoded(manifest, texts))
    conditioning: tuple[Tensor, ...] = (
        _tensor("keys_values", text.signature.outputs[0], texts),
        _tensor("time_embeds", time.signature.outputs[0], texts, steps),
        Tensor("guidance", "FP32", (steps,)),
        Tensor(END, "INT32", (1,)),
    )
    controls = tuple(tensor for name in controls_of(manifest) for tensor in _control_inputs(manifest, name))
    conditioning += tuple(
        tensor for name in controls_of(manifest) for tensor in _control_conditioning(manifest, name, texts, steps)
    )
    coefficients = Tensor(COEFFICIENT_ROWS, "FP32", (steps, ROW_WIDTH))
    draws = Tensor(DRAWS, "INT32", (steps,))
    from_image: tuple[Tensor, ...] = ()
    known: tuple[Tensor, ...] = ()
    if takes_image(manifest):
        from_image = (
            Tensor(INPUT_IMAGE, "UINT8", (height, width, 3), optional=True),
            Tensor(STRENGTH, "FP32", (1,), optional=True),
            Tensor(MASK, "UINT8", (height, width), optional=True),
        )
        known = (
            Tensor(KNOWN, "FP32", latents),
            Tensor(KNOWN_NOISE, "FP32", latents),
            Tensor(LATENT_MASK, "FP32", (1, *latents[1:])),
        )
    noise, pixels = Tensor("noise", "FP32", latents), Tensor("pixels", "FP32", (3, height, width))
    prompts = (Tensor("prompt", "UINT8", (ANY,)), Tensor("negative_prompt", "UINT8", (ANY,), optional=True))
    inputs_and_outputs: dict[str, tuple[str, tuple[Tensor, ...], tuple[Tensor, ...]]] = {
        "tokenizer": ("unrolled.Tokenize", prompts, (tokens, given)),
        "text_encoders": ("unrolled.EncodeTexts", (tokens,), encoded),
        "conditioner": (
            "conditioner.Condition",
            (*encoded, given, seed, Tensor("guidance_scale", "FP32", (1,)), *from_image, *controls),
            (*state, step, coefficients, draws, *conditioning, *known),
        ),
        "denoiser": ("unrolled.PredictNoise", (state[0], step, coefficients, *conditioning), (noise,)),
        "scheduler_step": (
            "unrolled.TakeStep",
            (*state, noise, step, seed, coefficients, draws, *known),
            (*state, step),
        ),
        "vae_decoder": ("unrolled.DecodeLatents", (state[0],), (pixels,)),
        "postprocessor": ("unrolled.PostProcess", (pixels,), (Tensor("image", "UINT8", (height, width, 3)),)),
    }
    return {
        name: TritonModel(
            name,
            inputs,
            outputs,
            f"{_SERVING}.{serving}",
            MAX_BATCH,
            preferred=() if name in _NOT_MERGED else _preferred(manifest, components_of_model(name, manifest), texts),
            warms_up=True,
            warmup=_WARMUP.get(name, {}),
            parameters={"steps": str(steps)},
        )
        for name, (serving, inputs, outputs) in inputs_and_outputs.items()
    }


def takes_image(manifest: Manifest) -> bool:
    """True if a release can start from an input image."""
    return any(engine.component == VAE_ENCODER for engine in manifest.engines)


def controls_of(manifest: Manifest) -> tuple[str, ...]:
    """Return the names of a release's ControlNets."""
    return controlnets_of(dict.fromkeys(engine.component for engine in manifest.engines))


def control_specs(manifest: Manifest, controlnet: str) -> tuple[TensorSpec, ...]:
    """Return the inputs of a ControlNet's steps that the conditioner makes."""
    inputs = _engine(manifest, f"{CONTROLNET}.{controlnet}").signature.inputs
    return tuple(spec for spec in inputs if spec.name != SAMPLE)


def shortest_decimal(value: float) -> float:
    """Return the shortest decimal of an FP32 number: 0.7, where float() gives 0.699999988."""
    return float(str(np.float32(value)))


def control_tensor(controlnet: str, name: str) -> str:
    """Return the name of the tensor of a ControlNet's input `name`. No other tensor has such a name."""
    return f"{CONTROLNET}.{controlnet}.{name}"


def texts_of(manifest: Manifest) -> int:
    """Return the texts of an image: its prompt and negative prompt, or 1 if the UNet embeds the guidance scale."""
    names = {spec.name for spec in _engine(manifest, FAMILIES[manifest.family].base.time).signature.inputs}
    return 1 if TIMESTEP_COND in names else 2


def ensemble(name: str, models: Mapping[str, TritonModel], steps: int, version: int) -> TritonModel:
    """Return the ensemble of these models, of one version of each."""
    calls = [
        _call(models["tokenizer"], version, {}),
        _call(models["text_encoders"], version, {}),
        _call(models["conditioner"], version, {"latents": "latents_0", "previous": "previous_0", "step": "step_0"}),
    ]
    for number in range(steps):
        names = {"latents": f"latents_{number}", "step": f"step_{number}", "noise": f"noise_{number}"}
        calls.append(_call(models["denoiser"], version, names))
        is_last = number == steps - 1
        after = {"latents": f"latents_{number + 1}"}
        # Triton refuses a tensor that no model reads.
        after |= {} if is_last else {"previous": f"previous_{number + 1}", "step": f"step_{number + 1}"}
        before = names | {"previous": f"previous_{number}"}
        scheduler = models["scheduler_step"]
        inputs = {tensor.name: before.get(tensor.name, tensor.name) for tensor in scheduler.inputs}
        calls.append(EnsembleStep(scheduler.name, version, inputs, after))
    calls.append(_call(models["vae_decoder"], version, {"latents": f"latents_{steps}"}))
    calls.append(_call(models["postprocessor"], version, {}))
    produced = {tensor.name for name in ("tokenizer", "text_encoders") for tensor in models[name].outputs}
    given = tuple(tensor for tensor in models["conditioner"].inputs if tensor.name not in produced)
    return TritonModel(
        name,
        inputs=(*models["tokenizer"].inputs, *given),
        outputs=models["postprocessor"].outputs,
        max_batch=MAX_BATCH,
        steps=tuple(calls),
    )


def unrolled_repository(releases: Mapping[int, Manifest], steps: int) -> list[Versions]:
    """Return the models of a repository: the pipeline's models in all versions, and an ensemble for each version.

    The newest version's ensemble is `generate_<steps>_pipeline`. Others end with `_v` and their version, because a
    config of Triton's, and so the steps of an ensemble, applies to all versions of a model.
    """
    if not 1 <= steps <= MAX_STEPS:
        raise RepositoryError(f"{steps} steps are not possible.", f"Give 1 to {MAX_STEPS}.")
    by_version = {version: unrolled_models(manifest, steps) for version, manifest in releases.items()}
    newest = max(by_version)
    repository: list[Versions] = []
    for name, model in by_version[newest].items():
        for version, models in by_version.items():
            if models[name] != model:
                raise RepositoryError(
                    f"{name} of {releases[version].name} has other tensors than that of {releases[newest].name}.",
                    "Write a repository for each.",
                )
        repository.append({v: (model, blobs_of_model(name, manifest)) for v, manifest in releases.items()})
    for version, models in by_version.items():
        name = f"generate_{steps}_pipeline" + ("" if version == newest else f"_v{version}")
        repository.append({version: (ensemble(name, models, steps, version), [])})
    return repository


def _call(model: TritonModel, version: int, names: Mapping[str, str]) -> EnsembleStep:
    """Return a call of a model whose tensors have their own names in the ensemble, or the names in `names`."""
    inputs, outputs = (
        {tensor.name: names.get(tensor.name, tensor.name) for tensor in tensors}
        for tensors in (model.inputs, model.outputs)
    )
    return EnsembleStep(model.name, version, inputs, outputs)


def _engine(manifest: Manifest, component: str) -> EngineRecord:
    """Return the first engine of a component. A server selects engines of one signature."""
    found = [engine for engine in manifest.engines if engine.component == component]
    if not found:
        raise RepositoryError(
            f"Release {manifest.name} has no engine of its {component}.", "Build it (`preheat build`)."
        )
    return found[0]


def _control_inputs(manifest: Manifest, controlnet: str) -> list[Tensor]:
    """Return the ensemble's inputs of a ControlNet."""
    settings = manifest.settings
    size = (settings.native_height, settings.native_width, 3)
    tensors = [Tensor(f"{CONTROL_IMAGE}.{controlnet}", "UINT8", size, optional=True)]
    tensors.append(Tensor(f"{CONTROL_SCALE}.{controlnet}", "FP32", (1,), optional=True))
    if control_types(_engine(manifest, f"{CONTROLNET_TIME}.{controlnet}").signature):
        tensors.append(Tensor(f"{CONTROL_MODE}.{controlnet}", "INT32", (1,), optional=True))
    return tensors


def _control_conditioning(manifest: Manifest, controlnet: str, texts: int, steps: int) -> list[Tensor]:
    """Return what the conditioner makes of a ControlNet's inputs: of each text or of both, for each step or for all."""
    settings, tensors = manifest.settings, []
    for spec in control_specs(manifest, controlnet):
        rows = ((texts,) if spec.name in OF_TEXTS else ()) + ((steps,) if spec.name in CONTROL_BY_STEP else ())
        dims = entry_shape(spec, settings.native_height, settings.native_width)
        if spec.name == KEYS_VALUES:  # of any number of tokens
            dims = (ANY, *dims[1:])
        name = control_tensor(controlnet, spec.name)
        tensors.append(Tensor(name, _TYPES[spec.dtype], (*rows, *dims)))  # type: ignore[arg-type]
    return tensors


def _tokens(manifest: Manifest) -> int:
    [length] = {tokenizer.max_length for tokenizer in manifest.tokenizers.values()}
    return length


def _encoded(manifest: Manifest, texts: int) -> Sequence[Tensor]:
    tensors = []
    encoders = FAMILIES[manifest.family].base.text_encoders
    for encoder, _ in encoders:
        outputs = {spec.name: spec for spec in _engine(manifest, encoder).signature.outputs}
        tensors.append(_tensor(hidden_name(encoder), outputs["hidden_states"], texts))
    if POOLED in outputs:
        tensors.append(_tensor(POOLED, outputs[POOLED], texts))
    return tensors


def _tensor(name: str, spec: TensorSpec, *batch: int) -> Tensor:
    """Return a tensor with `batch` in place of the batch dimension of an engine."""
    dims = tuple(size if isinstance(size, int) else ANY for size in spec.shape[1:])
    return Tensor(name, _TYPES[spec.dtype], (*batch, *dims))  # type: ignore[arg-type]


def _preferred(manifest: Manifest, components: Sequence[str], texts: int) -> tuple[int, ...]:
    """Return the numbers of images that fill an engine's batch. The largest batch counts if there is no such engine."""
    per_image = 1 if components == (VAE_DECODER,) else texts
    batches = {engine.bucket.batch.max for engine in manifest.engines if engine.component in components}
    sizes = {batch // per_image for batch in batches if batch % per_image == 0}
    return tuple(sorted(size for size in sizes if 1 <= size <= MAX_BATCH)) or (MAX_BATCH,)
