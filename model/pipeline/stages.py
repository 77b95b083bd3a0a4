"""The stages of text to image: encode the prompts, prepare latents, denoise and decode, for one image at a time.

Every image passes all stages in the order of TEXT_TO_IMAGE. The stages of a UNet do nothing for a request that has no
steps on this UNet. To add a stage, implement `Stage` and pass a longer tuple of stages to `Runner`.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from model.cuda.streams import to_device
from model.denoising.loop import Conditioning, ImageState
from model.images.pending import PendingImage
from model.pipeline.decode import decode_latents
from model.pipeline.loaded_model import LoadedModel, LoopKey
from model.pipeline.plan import RequestPlan
from model.pipeline.prompt import encode_prompt
from model.pipeline.spec import BASE, REFINER, Denoiser


class Stage(Protocol):
    """One step of the pipeline for an image.

    `timing`: the entry of a request's timings that includes the stage's time. An entry ends before the first loop and
    after each loop. Code reads `timing` only of the first stage and of stages with a loop.
    """

    @property
    def timing(self) -> str: ...

    def run(self, model: LoadedModel, plan: RequestPlan, image: ImageState) -> LoopKey | None:
        """Queue the stage's work for an image on the device, without waiting for it.

        Work is queued on the current stream, except that decoding has a stream of its own. A stage with denoising
        steps only prepares the image, and returns the key of the loop that runs them. Other stages return None.
        """


@dataclass(frozen=True)
class EncodePrompt:
    """Set an image's conditioning for one UNet. The prompts are encoded once for all images of a request."""

    denoiser: Denoiser
    timing: str

    def run(self, model: LoadedModel, plan: RequestPlan, image: ImageState) -> None:
        unet = self.denoiser.unet
        if unet not in plan.denoise:
            return
        references = plan.encoded.setdefault(unet, [])
        if not references:
            # One reference for each image. The tensors are freed when the last image has taken its reference.
            references += [encode_prompt(model, plan, self.denoiser)] * plan.params.num_images
        cond, uncond = references.pop()
        image.cond = _copy_inputs(cond)
        image.uncond = None if uncond is None else _copy_inputs(uncond)


def _copy_inputs(conditioning: Conditioning) -> Conditioning:
    """Return a conditioning with the same tensors in a new dict, to which a later stage may add an input."""
    return replace(conditioning, inputs=dict(conditioning.inputs))


@dataclass(frozen=True)
class PrepareLatents:
    """Draw an image's initial noise."""

    timing: str = "text"

    def run(self, model: LoadedModel, plan: RequestPlan, image: ImageState) -> None:
        settings, params = model.settings, plan.params
        scale = settings.vae_scale_factor
        shape = (1, settings.latent_channels, params.height // scale, params.width // scale)
        latents = torch.randn(shape, generator=image.generator) * plan.init_sigma
        image.latents = to_device(latents, model.device)


@dataclass(frozen=True)
class Denoise:
    """Prepare an image for its steps on one UNet. The refiner continues with the base's latents and generator."""

    denoiser: Denoiser
    timing: str

    def run(self, model: LoadedModel, plan: RequestPlan, image: ImageState) -> LoopKey | None:
        unet = self.denoiser.unet
        if (denoise_plan := plan.denoise.get(unet)) is None:
            return None
        image.schedule, image.guidance, image.step = denoise_plan.schedule, denoise_plan.guidance, 0
        return unet, plan.params.height, plan.params.width


@dataclass(frozen=True)
class Decode:
    """Decode an image and copy it to the host, while other images are denoised."""

    timing: str = "decode"

    def run(self, model: LoadedModel, plan: RequestPlan, image: ImageState) -> None:
        with model.decode_stream.run_after(image.latents):
            image.pixels = PendingImage(decode_latents(model, image.latents))


TEXT_TO_IMAGE: tuple[Stage, ...] = (
    EncodePrompt(BASE, timing="text"),
    PrepareLatents(),
    Denoise(BASE, timing="denoise"),
    EncodePrompt(REFINER, timing="refine"),
    Denoise(REFINER, timing="refine"),
    Decode(),
)
