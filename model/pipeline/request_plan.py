"""Compute everything that follows from a request and its model, once, before the request is queued."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from model.adapters.layers import AdapterSet
from model.adapters.merge import AdapterFactors
from model.denoising.loop import Conditioning, ImageState
from model.denoising.noise_schedule import Floats
from model.denoising.sampler_names import skipped_steps
from model.denoising.samplers import SamplerSchedule, sampler_schedule, skip_steps, split_schedule
from model.engines.signatures import timestep_cond_width
from model.pipeline.guidance import scale_by_step
from model.pipeline.loaded_model import LoadedModel, LoopKey
from model.pipeline.params import REPAINTED_LEVEL, GenerationParams, ImagePrompt
from model.pipeline.spec import UNET, UNET_LORA, Denoiser, TimeIds
from model.pipeline.vae import LatentDistribution
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
    """The steps of one UNet for a request.

    scales: float64 [steps], the requested guidance scale, 1 after guidance has ended.
    guidance: float32 [steps], the same scales, but at least 1.
    guided: True if some step has an unconditional half. A UNet that embeds the guidance scale has none.
    zero_negative: True if the unconditional half has zeros in place of an encoded text.
    time_ids: see `Family`.
    controls: the ControlNets in use, by name.
    image_prompts: the IP-Adapters in use.
    """

    schedule: SamplerSchedule
    scales: Floats
    guidance: NDArray[np.float32]
    guided: bool
    zero_negative: bool
    time_ids: TimeIds
    controls: Mapping[str, ControlPlan] = field(default_factory=dict)
    image_prompts: tuple[ImagePrompt, ...] = ()


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
class RequestPlan:
    """A request, or one pass of it, and what follows from it.

    Stages read it and change only `encoded`, `encoded_images` and `factors`.

    A request that repaints several masks has several passes over all stages. This plan is the first one, and `later`
    has the others.

    first_loop: the loop that its images join first.
    unet_batch: batch entries of that loop's UNet that the first step of each image takes.
    init_sigma: the initial latents are init_sigma * N(0, 1).
    texts: by tokenizer, the chunks of the prompt and of the negative prompt ("" if it is None).
    denoise: the plan of each UNet that has steps, in order, by the name of the UNet.
    source: the image that the pass starts from; None: noise.
    encoded: by UNet, one reference to the request's conditioning for each image that still needs it, with the check of
        its texts, bool [1], if there are any. `EncodePrompt` fills it for the first image. Each image takes one, so the
        tensors are freed with the last.
    encoded_images: the same for the request's image and its masked image, by the name that `share` gets.
    merged: the adapters that must be merged into the weights while the request runs.
    packed: the adapters that the UNet takes as inputs. They share no image's weights.
    factors: those of the packed adapters with their scales, for all passes. `EncodePrompt` fills it.
    """

    params: GenerationParams
    first_loop: LoopKey
    unet_batch: int
    init_sigma: float
    texts: Mapping[str, list[Chunks]]
    denoise: Mapping[str, DenoisePlan]
    warnings: list[str]
    source: Source | None = None
    later: "tuple[RequestPlan, ...]" = ()
    encoded: dict[str, list[tuple[CfgConditioning, torch.Tensor | None]]] = field(default_factory=dict)
    encoded_images: dict[str, list[LatentDistribution]] = field(default_factory=dict)
    merged: AdapterSet = ()
    packed: AdapterSet = ()
    factors: list[tuple[AdapterFactors, float]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """The steps of each image, on all UNets and in this pass and later ones."""
        return sum(plan.schedule.steps for one in (self, *self.later) for plan in one.denoise.values())

    def of(self, image: ImageState) -> "RequestPlan":
        """Return the plan of the pass that an image is in."""
        return (self, *self.later)[image.pass_index]

    def unet_of_loop(self, unet: str) -> str:
        """Return the UNet that runs the steps of `unet`: for packed adapters the one that takes them as inputs."""
        return UNET_LORA if self.packed and unet == UNET else unet

    def share(self, name: str, encode: Callable[[], LatentDistribution]) -> LatentDistribution:
        """Return the distribution of an image's latents. `encode` is called once for all images of a first pass.

        In a later pass each image encodes its own result of the pass before.
        """
        if self.source is None or self.source.levels is None:
            return encode()
        references = self.encoded_images.setdefault(name, [])
        if not references:
            references += [encode()] * self.params.num_images
        return references.pop()

    def steps_left(self, image: ImageState) -> int:
        """Return the remaining steps of an image, on its current UNet, on later ones and in later passes."""
        current = self.of(image)
        schedules = [plan.schedule for plan in current.denoise.values()]
        later = schedules[schedules.index(image.schedule) + 1 :]
        own = image.schedule.steps - image.step + sum(schedule.steps for schedule in later)
        return own + sum(plan.schedule.steps for one in current.later for plan in one.denoise.values())

    def images(self) -> list[ImageState]:
        """Make the states of the request's images before their first stage."""
        first = next(iter(self.denoise.values()))
        return [
            ImageState(index, self.generator(index), first.schedule, first.guidance, self.params.guidance_rescale)
            for index in range(self.params.num_images)
        ]

    def generator(self, index: int) -> torch.Generator:
        """Return a new generator with the seed of image `index`. Each pass begins with one."""
        return torch.Generator("cpu").manual_seed(self.params.seeds[index])


def plan_request(model: LoadedModel, params: GenerationParams) -> RequestPlan:
    """Plan a request: schedules, guidance by step, tokens and warnings. Raises RequestRefused."""
    levels = None if params.image is None else torch.from_numpy(params.image)
    plans = [
        _plan_pass(model, of_pass, None if number else levels, _prompt_fields(params, number))
        for number, of_pass in enumerate(params.passes())
    ]
    warnings = [text for plan in plans for text in plan.warnings]
    warnings += _unused_masks(plans, model.settings.vae_scale_factor)
    later: tuple[RequestPlan, ...] = ()
    # No UNet takes both adapters and the outputs of ControlNets, or reference images, as inputs.
    packed = model.adapters is not None and model.adapters.can_pack(params.loras)
    packed = packed and not params.controls and not params.image_prompts
    packed = packed and model.takes_adapters(params.height, params.width)
    merged, inputs = ((), params.loras) if packed else (params.loras, ())
    factors: list[tuple[AdapterFactors, float]] = []
    for plan in reversed(plans):
        first = replace(plan, later=later, merged=merged, packed=inputs, factors=factors)
        first = replace(first, first_loop=(first.unet_of_loop(plan.first_loop[0]), *plan.first_loop[1:]))
        later = (first, *later)
    return replace(first, params=params, warnings=list(dict.fromkeys(warnings)))


def _prompt_fields(params: GenerationParams, number: int) -> tuple[str, str]:
    """Return the fields of the request that have the prompt and the negative prompt of pass `number`."""
    prompt, negative_prompt = "prompt", "negative_prompt"
    if params.masks:
        mask = params.masks[number]
        prompt = prompt if mask.prompt == params.prompt else f"masks.{number}.{prompt}"
        if mask.negative_prompt != params.negative_prompt:
            negative_prompt = f"masks.{number}.{negative_prompt}"
    return prompt, negative_prompt


def _plan_pass(
    model: LoadedModel, params: GenerationParams, levels: torch.Tensor | None, prompt_fields: tuple[str, str]
) -> RequestPlan:
    """Plan one pass. `levels`: see `Source`. `prompt_fields`: see `_prompt_fields`."""
    steps, noise_schedule = params.num_inference_steps, model.noise_schedules["base"]
    whole_schedule = sampler_schedule(params.scheduler, steps, noise_schedule, params.timesteps, params.sigmas)
    source, run_schedule = None, whole_schedule
    if params.image is not None:
        source = _source(model, params, levels)
        run_schedule = skip_steps(whole_schedule, whole_schedule.order * skipped_steps(params.strength, steps))
    schedules = [(model.family.base, run_schedule)]
    if params.use_refiner:
        both = split_schedule(run_schedule, noise_schedule, params.denoising_frac)
        schedules = list(zip(model.family.denoisers, both, strict=True))
    scales, start = scale_by_step(params, run_schedule.steps, run_schedule.order), 0
    denoise: dict[str, DenoisePlan] = {}
    for denoiser, schedule in schedules:
        end = start + schedule.steps
        if schedule.steps:
            denoise[denoiser.unet] = _denoise_plan(model, params, denoiser, schedule, scales[start:end])
        start = end
    texts = {name: _chunks(model, params, tokenizer, prompt_fields) for name, tokenizer in model.tokenizers.items()}
    unet, plan = next(iter(denoise.items()))
    return RequestPlan(
        params,
        first_loop=(unet, params.height, params.width),
        unet_batch=2 if plan.guided else 1,
        init_sigma=whole_schedule.init_sigma,
        texts=texts,
        denoise=denoise,
        warnings=_warnings(model, params, schedules[-1][1], texts[_last_tokenizer(model)], prompt_fields)
        + _unused_controls(params, denoise.get(model.family.base.unet)),
        source=source,
    )


def _unused_controls(params: GenerationParams, base: DenoisePlan | None) -> list[str]:
    """Describe the ControlNets that no step uses, although their scale is not 0."""
    steps = 0 if base is None else base.schedule.steps
    return [
        f"controls.{number}: no step of {steps} lies between start {control.start:g} and end {control.end:g}; "
        f"{control.name} was not used."
        for number, control in enumerate(params.controls)
        if control.scale and (base is None or control.name not in base.controls)
    ]


def _unused_masks(plans: Sequence[RequestPlan], scale: int) -> list[str]:
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
    model: LoadedModel, params: GenerationParams, denoiser: Denoiser, schedule: SamplerSchedule, scales: Floats
) -> DenoisePlan:
    settings = model.settings.refiner if denoiser.part == "refiner" else model.settings
    assert settings is not None
    guidance, size = np.maximum(scales, 1.0).astype(np.float32), (params.height, params.width)
    return DenoisePlan(
        schedule,
        scales,
        guidance,
        guided=bool((guidance > 1).any()) and not embeds_guidance(model, denoiser),
        zero_negative=params.negative_prompt is None and settings.force_zeros_for_empty_prompt,
        time_ids=model.family.time_ids(params.original_size or size, params.crop, params.target_size or size, settings),
        controls=_plan_controls(params, schedule.steps) if denoiser.part == "base" else {},
        image_prompts=params.image_prompts if denoiser.part == "base" else (),
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


def _warnings(
    model: LoadedModel,
    params: GenerationParams,
    last_schedule: SamplerSchedule,
    texts: Sequence[Chunks],
    prompt_fields: tuple[str, str],
) -> list[str]:
    """Describe what cannot be followed: a truncated prompt, an ignored negative prompt, a refiner without steps.

    `last_schedule`: the steps of the last UNet. `texts`: the prompt and the negative prompt.
    `prompt_fields`: their fields in the request.
    """
    read = model.tokenizers[_last_tokenizer(model)].settings.max_length
    if params.prompt_syntax == "weighted":
        read = (read - 2) * model.max_text_chunks
    prompts = (params.prompt, params.negative_prompt or "")
    warnings = [
        warning
        for name, prompt, text in zip(prompt_fields, prompts, texts, strict=True)
        for warning in prompt_warnings(name, prompt, params.prompt_syntax, text, read)
    ]
    if params.negative_prompt and params.guidance_scale > 1 and embeds_guidance(model, model.family.base):
        last = model.family.denoisers[-1]
        refiner_reads_it = params.use_refiner and last_schedule.steps and not embeds_guidance(model, last)
        warnings.append(
            f"{prompt_fields[1]}: this model's UNet takes the guidance scale as an input and reads no negative prompt"
            f"{'; only the refiner does' if refiner_reads_it else ''}."
        )
    if not last_schedule.steps:
        warnings.append(
            f"denoising_frac: {params.denoising_frac} of {params.num_inference_steps} steps leaves the refiner without "
            "steps; it was not used."
        )
    return warnings
