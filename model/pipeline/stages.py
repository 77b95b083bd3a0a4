"""The stages of the pipeline. Each advances one image, and reads only its own part of the request's plan.

A stage that has nothing to do for a request returns at once. A new feature may add a stage: see `Stage`.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from model.cuda.streams import to_device
from model.denoising.loop import ImageState
from model.images.pending import PendingImage
from model.pipeline.decode import decode_latents
from model.pipeline.loaded_model import LoadedModel, LoopKey
from model.pipeline.plan import RequestPlan
from model.pipeline.prompt import encode_prompt
from model.pipeline.spec import BASE, REFINER, Denoiser


class Stage(Protocol):
    """One stage.

    `name` is the stage's entry in a request's timings. Only the first stage and stages with a loop have an entry. The
    time of another stage is part of the next entry, or of "decode" after the last loop.
    """

    @property
    def name(self) -> str: ...

    def run(self, model: LoadedModel, plan: RequestPlan, image: ImageState) -> LoopKey | None:
        """Queue the stage's work for an image on the current stream, without waiting for it.

        A stage of many steps only prepares the image, and returns the loop that runs its steps. None: no loop.
        """


@dataclass(frozen=True)
class EncodePrompt:
    """Condition an image on its prompts, for one UNet. The text is encoded once for all images of a request."""

    denoiser: Denoiser
    name: str

    def run(self, model: LoadedModel, plan: RequestPlan, image: ImageState) -> None:
        unet = self.denoiser.unet
        if unet in plan.denoise:
            conditionings = plan.encoded.setdefault(unet, [])
            if not conditionings:
                conditionings += [encode_prompt(model, plan, self.denoiser)] * plan.params.num_images
            cond, uncond = conditionings.pop()
            # Images share the tensors, not the dicts: a later stage may add an input for one image.
            image.cond = replace(cond, inputs=dict(cond.inputs))
            image.uncond = uncond and replace(uncond, inputs=dict(uncond.inputs))


@dataclass(frozen=True)
class PrepareLatents:
    """Draw an image's initial noise."""

    name: str = "text"

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
    name: str

    def run(self, model: LoadedModel, plan: RequestPlan, image: ImageState) -> LoopKey | None:
        unet = self.denoiser.unet
        if unet not in plan.denoise:
            return None
        image.schedule, image.guidance, image.step = plan.denoise[unet].schedule, plan.denoise[unet].guidance, 0
        return unet, plan.params.height, plan.params.width


@dataclass(frozen=True)
class Decode:
    """Decode an image and copy it to the host, while other images are denoised."""

    name: str = "decode"

    def run(self, model: LoadedModel, plan: RequestPlan, image: ImageState) -> None:
        with model.decode_stream.run_after(image.latents):
            image.pixels = PendingImage(decode_latents(model, image.latents))


TEXT_TO_IMAGE: tuple[Stage, ...] = (
    EncodePrompt(BASE, "text"),
    PrepareLatents(),
    Denoise(BASE, "denoise"),
    EncodePrompt(REFINER, "refine"),
    Denoise(REFINER, "refine"),
    Decode(),
)
