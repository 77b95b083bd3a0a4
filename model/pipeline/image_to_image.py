"""Prepare latents from an input image, for image to image and inpainting.

The draws of noise and their order are those of diffusers' StableDiffusionXLImg2ImgPipeline and
StableDiffusionXLInpaintPipeline: a sample of the image's latents, the noise that is added to it, and with a mask a
sample of the masked image's latents.
"""

from collections.abc import Callable

import torch

from model.cuda.streams import to_device
from model.denoising.loop import ImageState, Known
from model.pipeline.encoded_once import EncodedOnce
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.overflow import IMAGE, is_finite
from model.pipeline.params import REPAINTED_LEVEL
from model.pipeline.request_plan import PassPlan, Source
from model.pipeline.vae import LatentDistribution, encode_pixels, to_pixels


def draw_latents(model: LoadedModel, plan: PassPlan, image: ImageState) -> torch.Tensor:
    """Draw N(0, 1) of the shape of an image's latents, float32 [1, channels, height/8, width/8] on the device."""
    settings, params = model.settings, plan.params
    scale = settings.vae_scale_factor
    shape = (1, settings.latent_channels, params.height // scale, params.width // scale)
    return to_device(torch.randn(shape, generator=image.generator), model.device)


def prepare_from_image(
    model: LoadedModel, plan: PassPlan, source: Source, image: ImageState, encoded: EncodedOnce
) -> None:
    """Set an image's latents, and with a mask what its steps keep of the input image, for the first UNet of a pass.

    All of it is queued on the encoding stream. `image.inputs` is its completion.
    """

    def encode(pixels: Callable[[LoadedModel, Source, ImageState], torch.Tensor]) -> LatentDistribution:
        if source.levels is None:  # each image encodes its own result of the pass before
            return encode_pixels(model, pixels(model, source, image))
        return encoded.get(pixels, image.index, lambda: encode_pixels(model, pixels(model, source, image)))

    extra = model.has_extra_channels(next(iter(plan.denoise)))
    with model.encode_stream.run_after():
        sample = None
        if not (source.from_noise and extra):  # diffusers does not encode the image where nothing reads its latents
            sample = encode(_pixels).sample(draw_latents(model, plan, image))
        noise = draw_latents(model, plan, image)
        if source.from_noise:
            image.latents = plan.init_sigma * noise
        else:
            assert sample is not None
            signal_share, noise_share = plan.first.step_plan.schedule.noising[0]
            image.latents = signal_share * sample + noise_share * noise
        if source.mask is not None:
            masked_noise = draw_latents(model, plan, image)  # drawn by diffusers for every UNet
            mask = to_device(source.mask, model.device)
            if extra:
                image.extra_channels = torch.cat([mask, encode(_masked_pixels).sample(masked_noise)], dim=1)
            else:
                assert sample is not None
                image.known = Known(sample, noise, mask)
    made = [image.latents]
    made += [] if image.known is None else [image.known.latents, image.known.noise, image.known.mask]
    made += [] if image.extra_channels is None else [image.extra_channels]
    with model.encode_stream.run_after():
        image.checks[IMAGE] = is_finite(*made)
    image.inputs = model.encode_stream.record([*made, image.checks[IMAGE]])


def keep_base_result(model: LoadedModel, plan: PassPlan, source: Source, image: ImageState) -> None:
    """Set what the refiner's steps keep outside of the mask: the latents of the base, with new noise.

    So it is in diffusers if the base's inpainting pipeline has `denoising_end` and the refiner's `denoising_start`.
    """
    image.extra_channels = None
    if source.mask is not None:
        image.known = Known(image.latents, draw_latents(model, plan, image), to_device(source.mask, model.device))


def _pixels(model: LoadedModel, source: Source, image: ImageState) -> torch.Tensor:
    """Return the pass's input image on the device: the request's, or the result of the pass before."""
    if source.levels is not None:
        return to_pixels(to_device(source.levels, model.device))
    assert image.result is not None
    image.result.release_to_current()
    return to_pixels(image.result.tensors[0])


def _masked_pixels(model: LoadedModel, source: Source, image: ImageState) -> torch.Tensor:
    """Return the pass's input image with 0, a medium grey, where it is repainted."""
    assert source.mask_levels is not None
    return _pixels(model, source, image) * to_device(source.mask_levels < REPAINTED_LEVEL, model.device)
