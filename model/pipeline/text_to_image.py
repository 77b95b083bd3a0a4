"""Text to image, as plain functions over loaded engines.

The arithmetic is that of diffusers' StableDiffusionXLPipeline and, for the refiner, of StableDiffusionXLImg2ImgPipeline
with denoising_end/denoising_start. Images of one batch may differ in prompt, seed, sampler, steps and guidance. This
module knows nothing of HTTP, of stores, or of which runtime an engine is.
"""

from collections.abc import Callable, Sequence

import torch

from model.cuda.streams import StageTimer, to_device
from model.denoising.loop import ImageState, Loop, has_room
from model.denoising.samplers import SamplerSchedule, sampler_schedule, split_schedule
from model.engines import components
from model.images.encode import Pixels, broken_image
from model.pipeline.decode import PendingImage
from model.pipeline.guidance import guidance_by_step
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import GenerationParams
from model.pipeline.prompt import CfgConditioning, embeds_guidance, encode_prompt

Schedules = tuple[SamplerSchedule, SamplerSchedule | None]
"""The steps of the base and of the refiner; None where the refiner was not requested."""


def generate(model: LoadedModel, batch: Sequence[GenerationParams]) -> tuple[list[Pixels], dict[str, float], list[str]]:
    """Generate every image of every request of `batch`, all of one size.

    Returns the images (uint8 [height, width, 3], requests in order, each request's images in order), the milliseconds
    of each stage, and warnings. Raises BrokenImage for an image with NaN or infinity.
    """
    timer = StageTimer(model.device)
    schedules = [request_schedules(model, params) for params in batch]
    images = generate_latents(model, batch, schedules, timer.end)
    pairs = zip(batch, schedules, strict=True)
    warnings = [text for params, (_, refiner) in pairs for text in request_warnings(model, params, refiner)]
    # One image a call: a decoder's activations are the largest of the pipeline, and a batch of them is not faster.
    with torch.inference_mode():
        pending = [PendingImage(model, image.latents) for image in images]
    pixels = [one.wait() for one in pending]
    timer.end("decode")
    broken = [index for index, one in enumerate(pixels) if one is None]
    if broken:
        raise broken_image(broken, len(pixels))
    return [one for one in pixels if one is not None], timer.milliseconds(), warnings


@torch.inference_mode()
def generate_latents(
    model: LoadedModel,
    batch: Sequence[GenerationParams],
    schedules: Sequence[Schedules],
    end_stage: Callable[[str], None],
) -> list[ImageState]:
    """Run every stage of `generate` but decoding: one state an image, its latents queued on the current stream.

    `schedules`: the `request_schedules` of each request. `end_stage` is called with the name of each queued stage.
    """
    height, width = batch[0].height, batch[0].width
    images = [prepare_images(model, params, base) for params, (base, _) in zip(batch, schedules, strict=True)]
    end_stage("text")
    denoise(model.loop(components.UNET, height, width), [image for some in images for image in some])
    end_stage("denoise")
    for index, (params, (_, refiner)) in enumerate(zip(batch, schedules, strict=True)):
        if refiner:
            text = encode_prompt(model, params, refiner, refiner=True)
            images[index] = [prepare_refiner_image(params, refiner, image, text) for image in images[index]]
    refined = [image for some, (_, refiner) in zip(images, schedules, strict=True) if refiner for image in some]
    if refined:
        denoise(model.loop(components.REFINER_UNET, height, width), refined)
        end_stage("refine")
    return [image for some in images for image in some]


def denoise(loop: Loop, images: Sequence[ImageState]) -> None:
    """Run every image through all of its steps, as many at once as the loop takes; `image.latents` is then the result.

    An image without steps keeps its latents. The loop is empty afterwards, also after an error.
    """
    waiting = [image for image in images if image.schedule.steps]
    try:
        while waiting or loop.images:
            while waiting and has_room(loop, waiting[0].unet_batch):
                loop.add(waiting.pop(0))
            loop.step()
    finally:
        for image in list(loop.images):
            loop.remove(image)


def request_schedules(model: LoadedModel, params: GenerationParams) -> Schedules:
    """The steps of the base and, where the request uses the refiner, of the refiner (which may have none)."""
    noise_schedule = model.noise_schedules["base"]
    whole = sampler_schedule(params.scheduler, params.num_inference_steps, noise_schedule)
    if not params.use_refiner:
        return whole, None
    return split_schedule(whole, noise_schedule, params.denoising_frac)


def prepare_images(model: LoadedModel, params: GenerationParams, schedule: SamplerSchedule) -> list[ImageState]:
    """The states of a request's images before their first step: initial latents, conditioning, guidance by step."""
    settings = model.settings
    cond, uncond = encode_prompt(model, params, schedule)
    scale = settings.vae_scale_factor
    shape = (1, settings.latent_channels, params.height // scale, params.width // scale)
    guidance = guidance_by_step(params)[: schedule.steps]
    images = []
    for seed in params.seeds:
        generator = torch.Generator("cpu").manual_seed(seed)
        latents = torch.randn(shape, generator=generator) * schedule.init_sigma
        images.append(ImageState(to_device(latents, model.device), schedule, guidance, generator, cond, uncond))
    return images


def prepare_refiner_image(
    params: GenerationParams, schedule: SamplerSchedule, image: ImageState, text: CfgConditioning
) -> ImageState:
    """The state with which the refiner continues an image that the base has finished. `text`: `encode_prompt`.

    The latents are passed on unchanged, and so is the image's generator.
    """
    guidance = guidance_by_step(params)[params.num_inference_steps - schedule.steps :]
    return ImageState(image.latents, schedule, guidance, image.generator, *text)


def request_warnings(model: LoadedModel, params: GenerationParams, refiner: SamplerSchedule | None) -> list[str]:
    """Describe what could not be followed: a truncated prompt, an ignored negative prompt, a refiner without steps.

    `refiner`: the refiner's steps, None where it is not requested.
    """
    warnings = []
    for name in ("prompt", "negative_prompt"):
        text = getattr(params, name)
        tokenizer = model.tokenizers["tokenizer_2"]
        lost = tokenizer.encode(text)[1] if text else 0
        if lost:
            warnings.append(
                f"{name}: the text encoders read {tokenizer.settings.max_length} tokens; the last {lost} were left "
                f"out: {tokenizer.dropped_text(text)[:200]!r}"
            )
    if params.negative_prompt and params.guidance_scale > 1 and embeds_guidance(model, False):
        warnings.append(
            "negative_prompt: this model's UNet takes the guidance scale as an input and reads no negative prompt"
            f"{'; only the refiner does' if refiner and not embeds_guidance(model, True) else ''}."
        )
    if refiner is not None and not refiner:
        warnings.append(
            f"denoising_frac: {params.denoising_frac} of {params.num_inference_steps} steps leaves the refiner without "
            "steps; it was not used."
        )
    return warnings
