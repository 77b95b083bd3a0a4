"""Generate the same requests with a reference model and a quantized model, and measure how far they are apart.

Each UNet call is compared on the reference's inputs (teacher forcing): the quantized UNet runs at once on the inputs
that the reference's UNet received, so no tensors are kept. Steps that the quantized model runs in fp16 are left out.
Latents and pictures come from a run of each model alone.
"""

import copy
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count

import torch
from torch import nn

from engine_builder.quantization.validation.contact_sheet import MAX_PAIRS, PicturePair
from engine_builder.quantization.validation.distances import NotComparable, perceptual_distance, psnr, sqnr
from engine_builder.quantization.validation.layers import LayerError, comparing_layers
from engine_builder.quantization.validation.report import CPU_SUFFIX, LayerResult, PromptResult, ValidationReport
from model.engines.engine import EngineSet
from model.engines.shapes import DTYPES
from model.engines.signatures import TOKENS
from model.errors import BrokenImage
from model.images.pixels import Pixels
from model.pipeline.components import unets
from model.pipeline.loaded_model import LoadedModel, make_loop
from model.pipeline.params import GenerationParams
from model.pipeline.request_plan import RequestPlan
from model.pipeline.runner import Runner
from model.pipeline.text_to_image import run_stages

MIN_PROMPTS = 32
Tensors = Mapping[str, torch.Tensor]
Observe = Callable[[Tensors, Tensors, int, int], None]
"""Called with the inputs and outputs of a run, and its height and width in pixels."""
Score = Callable[[Pixels, str], bool]
"""True if a picture, uint8 [height, width, 3], shows what a prompt states."""
ReportPrompt = Callable[[int, int], None]
"""Called with the number of finished prompts and the number of all prompts."""


@dataclass(frozen=True)
class LayerPair:
    """The modules of one component that the two models run, and the names of the layers to compare.

    `reference` must be the module that the reference model runs in eager PyTorch.
    """

    component: str
    reference: nn.Module
    quantized: nn.Module
    names: Sequence[str]


@dataclass(frozen=True)
class Comparison:
    """The report, and thumbnails of its worst prompts for `contact_sheet`."""

    report: ValidationReport
    pairs: tuple[PicturePair, ...]


def validation_requests(
    prompts: Sequence[str],
    width: int,
    height: int,
    *,
    steps: int = 20,
    guidance: float = 8.0,
    negative_prompt: str | None = "",
    use_refiner: bool = False,
    min_prompts: int = MIN_PROMPTS,
) -> list[GenerationParams]:
    """Return a request for each prompt. Its seed is the prompt's number. Sizes in pixels.

    Raises NotComparable for fewer than `min_prompts`.
    """
    if len(prompts) < max(1, min_prompts):
        raise NotComparable(
            f"A validation needs at least {max(1, min_prompts)} prompts; {len(prompts)} were given.", "Add prompts."
        )
    return [
        GenerationParams(
            prompt=prompt, negative_prompt=negative_prompt, width=width, height=height, num_inference_steps=steps,
            guidance_scale=guidance, guidance_end=1.0, scheduler="Euler", use_refiner=use_refiner, denoising_frac=0.8,
            seed=number, num_images=1, output_format="png",
        )
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip


def compare_models(
    reference: LoadedModel,
    quantized: LoadedModel,
    requests: Sequence[GenerationParams],
    *,
    names: tuple[str, str] = ("reference", "quantized"),
    layers: Sequence[LayerPair] = (),
    score: Score | None = None,
    identity: Mapping[str, str] | None = None,
    report: ReportPrompt = lambda *_: None,
) -> Comparison:
    """Generate one image of each request with both models, and return the distances.

    The models may have engines of any runtime on one device, with the same inputs and sizes. They run op by op, without
    CUDA graphs, and without the UNet's variant for guided images, which has the same weights. Neither model is changed.

    layers: compares these layers too, during the reference's runs. score: judges each picture of both models.
    names, identity: stored in the report.

    Raises NotComparable for models or layers that do not fit, for no request or one of several images, and for NaN in
    an output; BrokenImage for NaN in a picture; RequestRefused.
    """
    _check(reference, quantized, requests)
    results: list[PromptResult] = []
    pairs: dict[int, PicturePair] = {}
    with ExitStack() as stack:
        errors = [
            (pair.component, stack.enter_context(comparing_layers(pair.reference, pair.quantized, pair.names)))
            for pair in layers
        ]
        for number, params in enumerate(requests):
            report(number, len(requests))
            unet_decibels: dict[str, list[float]] = {}
            plan = Runner(reference).plan(params)
            expected = _generate(reference, plan, _teacher_forcing(quantized, plan, unet_decibels), names[0])
            found = _generate(quantized, Runner(quantized).plan(params), {}, names[1])
            results.append(
                PromptResult(
                    number=number,
                    prompt=params.prompt,
                    negative_prompt=params.negative_prompt,
                    seed=params.seed,
                    width=params.width,
                    height=params.height,
                    steps=params.num_inference_steps,
                    guidance=params.guidance_scale,
                    sampler=params.scheduler,
                    unet_decibels={unet: tuple(calls) for unet, calls in unet_decibels.items()},
                    latents_decibels=sqnr(expected.latents, found.latents),
                    psnr_decibels=psnr(expected.pixels, found.pixels),
                    perceptual_distance=perceptual_distance(expected.pixels, found.pixels),
                    reference_true=None if score is None else bool(score(expected.pixels, params.prompt)),
                    quantized_true=None if score is None else bool(score(found.pixels, params.prompt)),
                )
            )
            results.sort(key=_badness)
            pairs[number] = PicturePair.of(number, expected.pixels, found.pixels)
            pairs = {result.number: pairs[result.number] for result in results[:MAX_PAIRS]}
        report(len(requests), len(requests))
    validated = ValidationReport(
        reference=names[0],
        quantized=names[1],
        device=_device_name(reference.device),
        torch=torch.__version__,
        identity=dict(identity or {}),
        prompts=tuple(results),
        layers=tuple(_layer_results(errors)),
    )
    return Comparison(validated, tuple(pairs.values()))


@dataclass(frozen=True)
class _Image:
    """pixels: uint8 [height, width, 3]. latents: float32 [1, channels, height/8, width/8], after the last step."""

    pixels: Pixels
    latents: torch.Tensor


class _ObservedEngines(EngineSet):
    """The engines of another set. `observe` is called after each run."""

    def __init__(self, engines: EngineSet, observe: Observe) -> None:
        super().__init__(engines.engines)
        self._observe = observe

    def run(self, inputs: Tensors, height: int = 0, width: int = 0) -> dict[str, torch.Tensor]:
        outputs = super().run(inputs, height, width)
        self._observe(inputs, outputs, height, width)
        return outputs


def _generate(model: LoadedModel, plan: RequestPlan, observers: Mapping[str, Observe], name: str) -> _Image:
    """Return the image of a plan. `observers`: by component. `name`: of the model, for errors."""
    observed = copy.copy(model)  # with the same streams: an engine must always run on the same one
    observed.engines = dict(model.engines)
    for component, observe in observers.items():
        observed.engines[component] = _ObservedEngines(model.engines[component], observe)
    size = (plan.params.height, plan.params.width)
    # Also where the model would use CUDA graphs: a replay of a graph calls no engine that could be observed.
    observed.loops = {
        (unet, *size): make_loop(observed, unet, *size, use_graphs=False) for unet in plan.passes[0].denoise
    }
    [image] = run_stages(Runner(observed), [plan])
    pixels = None if image.pixels is None else image.pixels.wait()
    if pixels is None:
        raise BrokenImage(f"The image of {plan.params.prompt!r} by {name} has NaN or infinite values.")
    return _Image(pixels, image.latents)


def _teacher_forcing(quantized: LoadedModel, plan: RequestPlan, decibels: dict[str, list[float]]) -> dict[str, Observe]:
    """Return an observer for each UNet of the reference, which adds the SQNR of each call to `decibels`.

    The loop of one image calls a UNet once in each step. Steps that `quantized` runs in fp16 are not compared.
    """

    def observer(component: str) -> Observe:
        engines = quantized.engines[component]
        output = engines.signature.outputs[0].name
        compared = _quantized_steps(quantized, component, plan.passes[0].denoise[component].step_plan.steps)
        steps = count()
        calls = decibels.setdefault(component, [])

        def compare(inputs: Tensors, outputs: Tensors, height: int, width: int) -> None:
            step = next(steps)
            if step not in compared:
                return
            dtypes = {spec.name: DTYPES[spec.dtype] for spec in engines.signature.inputs}
            found = engines.run({name: inputs[name].to(dtype) for name, dtype in dtypes.items()}, height, width)
            try:
                calls.append(sqnr(outputs[output], found[output]))
            except NotComparable as error:
                raise NotComparable(f"Call {step} of {component}: {error.args[0]}", error.remedy) from error

        return compare

    return {unet: observer(unet) for unet in plan.passes[0].denoise}


def _quantized_steps(model: LoadedModel, unet: str, steps: int) -> range:
    """Return which of an image's steps on a UNet do not run in fp16."""
    if unet not in model.fp16_engines:
        return range(steps)
    return range(model.fp16_steps.first, steps - model.fp16_steps.last)


def _check(reference: LoadedModel, quantized: LoadedModel, requests: Sequence[GenerationParams]) -> None:
    """Raise NotComparable for models or requests that do not fit."""
    if not requests:
        raise NotComparable("There is no request to compare the models on.", "Give at least one prompt.")
    if several := [params for params in requests if params.num_images != 1]:
        raise NotComparable(f"The request {several[0].prompt!r} has {several[0].num_images} images; one is compared.")
    if reference.device != quantized.device:
        raise NotComparable(f"The models are on {reference.device} and {quantized.device}, not on one device.")
    for spec in unets():
        sides = [_tensor_shapes(model, spec.name) for model in (reference, quantized)]
        if not _shapes_agree(*sides):
            raise NotComparable(f"The models differ in the inputs or outputs of {spec.name}.")


_Shapes = Mapping[str, tuple[int | str, ...]]


def _tensor_shapes(model: LoadedModel, component: str) -> _Shapes | None:
    """Return the shapes of a component's inputs and outputs by name, or None if the model lacks it."""
    if component not in model.engines:
        return None
    signature = model.engines[component].signature
    return {spec.name: tuple(spec.shape) for spec in (*signature.inputs, *signature.outputs)}


def _shapes_agree(one: _Shapes | None, other: _Shapes | None) -> bool:
    """True if the tensors of two engines agree. An engine for any number of tokens agrees with a fixed number."""
    if one is None or other is None or one.keys() != other.keys():
        return one is other
    return all(
        len(shape) == len(other[name])
        and all(size == size_2 or TOKENS in (size, size_2) for size, size_2 in zip(shape, other[name], strict=True))
        for name, shape in one.items()
    )


def _badness(result: PromptResult) -> tuple[float, float, int]:
    """Return the key that sorts the worst prompt first."""
    return result.latents_decibels, result.psnr_decibels, result.number


def _layer_results(errors: Sequence[tuple[str, dict[str, LayerError]]]) -> list[LayerResult]:
    """Return the layers of all components, the worst first."""
    results = [
        LayerResult(
            component=component,
            name=name,
            decibels=error.decibels,
            worst_decibels=error.worst,
            calls=error.calls,
        )
        for component, of_component in errors
        for name, error in of_component.items()
    ]
    return sorted(results, key=lambda layer: layer.decibels)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()}{CPU_SUFFIX}"
