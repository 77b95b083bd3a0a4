"""Compute everything that follows from a request and its model, once, before the request is queued."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from model.adapters.layers import AdapterSet
from model.denoising.loop import Conditioning, ImageState
from model.denoising.loop_schedule import loop_schedule
from model.denoising.noise_schedule import Floats
from model.denoising.sampler_specs import skipped_steps
from model.denoising.samplers import SamplerSchedule, sampler_schedule, skip_steps, split_schedule
from model.denoising.step_plan import StepNeeds, StepPlan, needs_by_step
from model.engines.features import CONTROL, IMAGE_PROMPT, LORA
from model.engines.signatures import timestep_cond_width
from model.pipeline.guidance import scale_by_step
from model.pipeline.loaded_model import LoadedModel, LoopKey
from model.pipeline.params import REPAINTED_LEVEL, GenerationParams, ImagePrompt
from model.pipeline.spec import Denoiser, TimeIds
from model.prompts.prompt_warnings import prompt_warnings
from model.prompts.tokenizer import ClipTokenizer
from model.prompts.weighted_prompt import Chunks, plain_chunks, weighted_chunks

CfgConditioning = tuple[Conditioning, Conditioning | None]
"""Conditional and unconditional; None if no step is guided."""


@dataclass(frozen=True, eq=False)
class ControlPlan:
    """The use of a ControlNet in the steps of one UNet.

    levels: the control image, uint8 [height, width, 3] on the host.
    scales: float32 [steps], what the network's outputs are multiplied by; 0 where it is not used.
    mode: the type of the control image, for a Union network; None: another network.
    """

    levels: torch.Tensor
    scales: NDArray[np.float32]
    mode: int | None


@dataclass(frozen=True, eq=False)
class DenoisePlan:
    """The steps of one UNet in a pass, and what the conditioning of these steps is made from.

    loop: the loop that runs the steps.
    scales: float64 [steps], the requested guidance scale, 1 before guidance begins and after it has ended.
    time_ids: see `Family`.
    controls: the ControlNets in use, by name.
    image_prompts: the IP-Adapters in use.
    packed: the adapters that the UNet takes as inputs.
    """

    loop: LoopKey
    step_plan: StepPlan
    scales: Floats
    time_ids: TimeIds
    controls: Mapping[str, ControlPlan] = field(default_factory=dict)
    image_prompts: tuple[ImagePrompt, ...] = ()
    packed: AdapterSet = ()

    @property
    def guided(self) -> bool:
        """True if some step has an unconditional half. A UNet that embeds the guidance scale has none."""
        return bool((self.step_plan.entries == 2).any())


@dataclass(frozen=True, eq=False)
class Source:
    """The image that a pass starts from.

    levels: uint8 [height, width, 3] on the host; None: the result of the pass before.
    mask_levels: uint8 [height, width] on the host. Pixels with a level of at least 128 are repainted; None: all.
    mask: the same for latents, float32 [1, 1, height/8, width/8] on the host, 1 where they are repainted, else 0.
    from_noise: true if the pass starts from pure noise (strength 1 with a mask, as in diffusers).
    """

    levels: torch.Tensor | None
    mask_levels: torch.Tensor | None
    mask: torch.Tensor | None
    from_noise: bool


@dataclass(frozen=True, eq=False)
class PassPlan:
    """One pass of a request over all stages.

    params: the request's parameters, with the prompts, the strength and the mask of the pass.
    init_sigma: the initial latents are init_sigma * N(0, 1).
    texts: by tokenizer, the chunks of the prompt and of the negative prompt ("" if it is None).
    denoise: the plan of each UNet that has steps, in order, by the name of the UNet.
    source: the image that the pass starts from; None: noise.
    is_last: False if another pass continues with the result.
    """

    params: GenerationParams
    init_sigma: float
    texts: Mapping[str, list[Chunks]]
    denoise: Mapping[str, DenoisePlan]
    source: Source | None
    is_last: bool

    @property
    def first(self) -> DenoisePlan:
        """The plan of the UNet that runs the first step."""
        return next(iter(self.denoise.values()))


@dataclass(frozen=True)
class AdapterUse:
    """How the adapters of a request change its images.

    merged: those that must be merged into the weights while the request runs.
    packed: those that the UNet takes as inputs. They share no image's weights.
    """

    merged: AdapterSet
    packed: AdapterSet


@dataclass(frozen=True, eq=False)
class RequestPlan:
    """A request and what follows from it. A request that repaints several masks has a pass for each of them."""

    params: GenerationParams
    passes: tuple[PassPlan, ...]
    adapters: AdapterUse
    warnings: list[str]

    @property
    def first(self) -> DenoisePlan:
        """The plan of the loop that the images join first."""
        return self.passes[0].first

    @property
    def first_needs(self) -> StepNeeds:
        """What the first step of each image needs in that loop."""
        return self.first.step_plan.by_step[0]

    @property
    def steps(self) -> int:
        """The steps of each image, on all UNets and in all passes."""
        return sum(plan.sampler_steps for plan in self._step_plans())

    @property
    def evaluations(self) -> int:
        """The steps of the loops for each image. With forecasts they are fewer than its steps."""
        return sum(plan.steps for plan in self._step_plans())

    def evaluations_left(self, image: ImageState) -> int:
        """Return the remaining evaluations of an image, on its current UNet, on later ones and in later passes."""
        return sum(plan.steps for plan in self._plans_from(image)) - image.step

    def steps_done(self, image: ImageState) -> int:
        """Return the steps of an image that are done, on all UNets and in all passes."""
        left = sum(plan.sampler_steps for plan in self._plans_from(image))
        return self.steps - left + int(image.plan.schedule.step[image.step])

    def _plans_from(self, image: ImageState) -> list[StepPlan]:
        plans = self._step_plans(image.pass_index)
        return plans[[plan.schedule for plan in plans].index(image.plan.schedule) :]

    def images(self) -> list[ImageState]:
        """Make the states of the request's images before their first stage."""
        plan = self.first.step_plan
        return [ImageState(index, self.generator(index), plan) for index in range(self.params.num_images)]

    def generator(self, index: int) -> torch.Generator:
        """Return a new generator with the seed of image `index`. Each pass begins with one."""
        return torch.Generator("cpu").manual_seed(self.params.seeds[index])

    def _step_plans(self, first_pass: int = 0) -> list[StepPlan]:
        return [plan.step_plan for one in self.passes[first_pass:] for plan in one.denoise.values()]


def plan_request(model: LoadedModel, params: GenerationParams) -> RequestPlan:
    """Plan a request: schedules, guidance by step, tokens and warnings. Raises RequestRefused."""
    adapters = _adapter_use(model, params)
    passes = tuple(_plan_pass(model, params, number, adapters.packed) for number in range(len(params.passes())))
    warnings = [text for number, plan in enumerate(passes) for text in _warnings(model, plan, params, number)]
    warnings += _unused_masks(passes, model.settings.vae_scale_factor)
    return RequestPlan(params, passes, adapters, list(dict.fromkeys(warnings)))


def _adapter_use(model: LoadedModel, params: GenerationParams) -> AdapterUse:
    """Return the adapters as inputs of the UNet, if it takes them with the other conditions, or as merged ones.

    Raises RequestRefused for an adapter that does not fit the model.
    """
    needs = {LORA} | ({CONTROL} if params.controls else set()) | ({IMAGE_PROMPT} if params.image_prompts else set())
    if model.adapters is not None:
        model.adapters.check(params.loras)
    packed = model.adapters is not None and model.adapters.can_pack(params.loras)
    packed = packed and model.denoiser(model.family.base.unet, params.height, params.width).covers(frozenset(needs))
    return AdapterUse((), params.loras) if packed else AdapterUse(params.loras, ())


def _prompt_fields(params: GenerationParams, number: int) -> tuple[str, str]:
    """Return the fields of the request that have the prompt and the negative prompt of pass `number`."""
    prompt, negative_prompt = "prompt", "negative_prompt"
    if params.masks:
        mask = params.masks[number]
        prompt = prompt if mask.prompt == params.prompt else f"masks.{number}.{prompt}"
        if mask.negative_prompt != params.negative_prompt:
            negative_prompt = f"masks.{number}.{negative_prompt}"
    return prompt, negative_prompt


def _plan_pass(model: LoadedModel, request: GenerationParams, number: int, packed: AdapterSet) -> PassPlan:
    """Plan pass `number` of a request. packed: see `AdapterUse`."""
    passes = request.passes()
    params = passes[number]
    steps, noise_schedule = params.num_inference_steps, model.noise_schedules["base"]
    whole_schedule = sampler_schedule(params.scheduler, steps, noise_schedule, params.timesteps, params.sigmas)
    source, run_schedule = None, whole_schedule
    if params.image is not None:
        source = _source(model, params, None if number else torch.from_numpy(params.image))
        run_schedule = skip_steps(whole_schedule, whole_schedule.order * skipped_steps(params.strength, steps))
    schedules = [(model.family.base, run_schedule)]
    if params.use_refiner:
        both = split_schedule(run_schedule, noise_schedule, params.denoising_frac)
        schedules = list(zip(model.family.denoisers, both, strict=True))
    requested_step, start = np.arange(run_schedule.steps) // run_schedule.order, 0
    denoise: dict[str, DenoisePlan] = {}
    for denoiser, schedule in schedules:
        own = slice(start, start := start + schedule.steps)
        if schedule.steps:
            denoise[denoiser.unet] = _denoise_plan(model, params, denoiser, schedule, requested_step[own], packed)
    prompt_fields = _prompt_fields(request, number)
    tokenizers = list(model.tokenizers.items())  # both at once: the scheduler's thread may exchange them
    texts = {name: _chunks(model, params, tokenizer, prompt_fields) for name, tokenizer in tokenizers}
    return PassPlan(params, whole_schedule.init_sigma, texts, denoise, source, is_last=number == len(passes) - 1)


def _unused_masks(plans: Sequence[PassPlan], scale: int) -> list[str]:
    """Describe the masks that mark no latent to repaint. `scale`: pixels on a side of a latent."""
    return [
        f"masks.{number}.image: the mask marks no latent to repaint, because it is white in no pixel of the result "
        f"whose row and column are multiples of {scale}. Draw white parts of at least {scale}x{scale} pixels."
        for number, plan in enumerate(plans)
        if plan.source is not None and plan.source.mask is not None and not plan.source.mask.any()
    ]


def _source(model: LoadedModel, params: GenerationParams, levels: torch.Tensor | None) -> Source:
    if not params.masks:
        return Source(levels, None, None, from_noise=False)
    [mask] = params.masks
    mask_levels = torch.from_numpy(mask.levels)
    scale = model.settings.vae_scale_factor
    # The nearest pixel of each latent, as in diffusers' `prepare_mask_latents`. The mask must be binary: it is applied
    # after every step, so the share of the result at a level between would shrink with each of them.
    repainted = (mask_levels[None, None, ::scale, ::scale] >= REPAINTED_LEVEL).float()
    return Source(levels, mask_levels, repainted, from_noise=params.strength == 1)


def _chunks(
    model: LoadedModel, params: GenerationParams, tokenizer: ClipTokenizer, prompt_fields: tuple[str, str]
) -> list[Chunks]:
    """Return the chunks of the prompt and of the negative prompt. Raises RequestRefused for a weight."""
    texts = (params.prompt, params.negative_prompt or "")
    if params.prompt_syntax == "plain":
        return [plain_chunks(tokenizer, text) for text in texts]
    most = model.max_text_chunks
    return [weighted_chunks(tokenizer, text, most, field) for text, field in zip(texts, prompt_fields, strict=True)]


def embeds_guidance(model: LoadedModel, denoiser: Denoiser) -> bool:
    """True if the UNet was distilled to take the guidance scale as an input.

    It then runs once per step, and no negative prompt reaches it.
    """
    return timestep_cond_width(model.engines[denoiser.time].signature) > 0


def _last_tokenizer(model: LoadedModel) -> str:
    """Return the name of the tokenizer of the last text encoder. A model's tokenizers drop the same tokens."""
    return model.family.base.text_encoders[-1][1]


def _denoise_plan(
    model: LoadedModel,
    params: GenerationParams,
    denoiser: Denoiser,
    schedule: SamplerSchedule,
    requested_step: NDArray[np.int64],
    packed: AdapterSet,
) -> DenoisePlan:
    is_base = denoiser.part == "base"
    settings = model.settings if is_base else model.settings.refiner
    assert settings is not None
    scales, size = scale_by_step(params, requested_step), (params.height, params.width)
    controls = _plan_controls(params, schedule.steps) if is_base else {}
    guided = (np.maximum(scales, 1.0) > 1) & (not embeds_guidance(model, denoiser))
    read = np.stack([scales, *(control.scales for control in controls.values())])
    breaks = 1 + np.flatnonzero((read[:, 1:] != read[:, :-1]).any(axis=0))  # where the prediction becomes another one
    forecast = params.used_forecast
    evaluations = loop_schedule(schedule, forecast, tuple(breaks.tolist()) if forecast != "off" else ())
    at = evaluations.step[:-1]  # the step of each evaluation
    controls = {name: replace(control, scales=control.scales[at]) for name, control in controls.items()}
    image_prompts = params.image_prompts if is_base else ()
    packed = packed if is_base else ()
    uses = {name: control.scales != 0 for name, control in controls.items()}
    always = {name for name, used in ((IMAGE_PROMPT, image_prompts), (LORA, packed)) if used}
    fp16 = model.fp16_steps
    step_plan = StepPlan(
        evaluations,
        np.maximum(scales, 1.0).astype(np.float32)[at],
        params.guidance_rescale,
        entries=np.where(guided, 2, 1).astype(np.int8)[at],
        zero_negative=params.negative_prompt is None and settings.force_zeros_for_empty_prompt,
        requested_step=requested_step[at],
        needs=needs_by_step(always, uses, len(at)),
        uses=uses,
        exact=(at < fp16.first) | (at >= schedule.steps - fp16.last),
    )
    return DenoisePlan(
        (denoiser.unet, *size),
        step_plan,
        scales[at],
        time_ids=model.family.time_ids(params.original_size or size, params.crop, params.target_size or size, settings),
        controls=controls,
        image_prompts=image_prompts,
        packed=packed,
    )


def _plan_controls(params: GenerationParams, steps: int) -> dict[str, ControlPlan]:
    """Plan the ControlNets that some step uses. A step is used if it lies within start and end, as in diffusers."""
    plans = {}
    for control in params.controls:
        used = [step / steps >= control.start and (step + 1) / steps <= control.end for step in range(steps)]
        scales = np.where(used, control.scale, 0).astype(np.float32)
        if scales.any():
            plans[control.name] = ControlPlan(torch.from_numpy(control.levels), scales, control.mode)
    return plans


def _warnings(model: LoadedModel, plan: PassPlan, request: GenerationParams, number: int) -> Iterator[str]:
    """Describe what pass `number` of a request cannot follow: a truncated prompt, an ignored negative prompt, a refiner
    or ControlNets without steps.
    """
    params, prompt_fields, last_tokenizer = plan.params, _prompt_fields(request, number), _last_tokenizer(model)
    read = model.tokenizers[last_tokenizer].settings.max_length
    if params.prompt_syntax == "weighted":
        read = (read - 2) * model.max_text_chunks
    prompts = (params.prompt, params.negative_prompt or "")
    for name, prompt, text in zip(prompt_fields, prompts, plan.texts[last_tokenizer], strict=True):
        yield from prompt_warnings(name, prompt, params.prompt_syntax, text, read)
    base, last = model.family.base, model.family.denoisers[-1]
    refines = last is not base and last.unet in plan.denoise
    if params.negative_prompt and params.guidance_scale > 1 and embeds_guidance(model, base):
        refiner_reads_it = refines and not embeds_guidance(model, last)
        yield (
            f"{prompt_fields[1]}: this model's UNet takes the guidance scale as an input and reads no negative prompt"
            f"{'; only the refiner does' if refiner_reads_it else ''}."
        )
    elif params.negative_prompt and params.guidance_scale <= 1:
        yield f"{prompt_fields[1]}: without guidance (guidance_scale {params.guidance_scale:g}) it is not read."
    if params.use_refiner and not refines:
        yield (
            f"denoising_frac: {params.denoising_frac} of {params.num_inference_steps} steps leaves the refiner without "
            "steps; it was not used."
        )
    guided = [bool((one.scales > 1).any()) for one in plan.denoise.values()]
    if params.guidance_scale > 1 and params.guidance_end and not any(guided):
        yield (
            f"guidance_scale: no step lies between guidance_start {params.guidance_start:g} and guidance_end "
            f"{params.guidance_end:g}; no step was guided."
        )
    if params.forecast != params.used_forecast:
        yield f"forecast: {params.scheduler} does not offer {params.forecast}, the release's default; it was not used."
    base_plan = plan.denoise.get(base.unet)
    steps = 0 if base_plan is None else base_plan.step_plan.sampler_steps
    for index, control in enumerate(params.controls):
        if control.scale and (base_plan is None or control.name not in base_plan.controls):
            yield (
                f"controls.{index}: no step of {steps} lies between start {control.start:g} and end {control.end:g}; "
                f"{control.name} was not used."
            )
