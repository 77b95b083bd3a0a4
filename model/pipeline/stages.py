"""The stages of the pipeline: encode the prompts, prepare latents, denoise and decode, for one image at a time.

Every image passes all stages in the order of STAGES, once for each pass of its request. The stages of a UNet do nothing
for a request that has no steps on this UNet. To add a stage, implement `Stage` and pass a longer tuple of stages to
`Runner`.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from model.adapters.changes import AdapterChanges
from model.adapters.layers import Scale
from model.denoising.loop import Conditioning, ImageState
from model.engines.signatures import IMAGE_KEYS, IMAGE_VALUES, KEYS_VALUES
from model.images.encode import to_levels
from model.images.pending import PendingImage
from model.pipeline.encoded_once import EncodedOnce
from model.pipeline.image_to_image import draw_latents, keep_base_result, prepare_from_image
from model.pipeline.loaded_model import LoadedModel, LoopKey
from model.pipeline.overflow import CHECKS, IMAGE, LATENTS, PIXELS, TEXT, is_finite, latents_are_sane
from model.pipeline.prompt import encode_prompt
from model.pipeline.request_plan import CfgConditioning, PassPlan
from model.pipeline.safety import check_image
from model.pipeline.spec import Part
from model.pipeline.vae import decode_latents

_ENCODED = (KEYS_VALUES, "time_embeds", IMAGE_KEYS, IMAGE_VALUES)  # inputs of a UNet that prompts and images become


class Stage(Protocol):
    """One step of the pipeline for an image.

    `timing`: the entry of a request's timings that includes the stage's time. An entry ends before the first loop and
    after each loop. Code reads `timing` only of the first stage and of stages with a loop.
    """

    @property
    def timing(self) -> str: ...

    def run(self, model: LoadedModel, plan: PassPlan, image: ImageState, encoded: EncodedOnce) -> LoopKey | None:
        """Queue the stage's work for an image on the device, without waiting for it.

        Work is queued on the current stream, except that encoding and decoding an image have streams of their own. A
        stage with denoising steps only prepares the image, and returns the key of the loop that runs them. Other stages
        return None. `plan`: of the pass that the image is in. `encoded`: of the request's images.
        """


@dataclass(frozen=True)
class EncodePrompt:
    """Set an image's conditioning for one UNet. The prompts are encoded once for all images of a request."""

    part: Part
    timing: str

    def run(self, model: LoadedModel, plan: PassPlan, image: ImageState, encoded: EncodedOnce) -> None:
        denoiser = model.family.denoiser(self.part)
        if denoiser is None or (denoise_plan := plan.denoise.get(denoiser.unet)) is None:
            return
        changes: list[tuple[AdapterChanges, Scale]] = []
        if denoise_plan.packed:
            assert model.adapters is not None
            # Kept for later passes, because the library may evict them once the request has begun.
            read = partial(model.adapters.changes, denoise_plan.packed)
            changes = encoded.get("changes", image.index, read, again=not plan.is_last)

        def encode() -> tuple[CfgConditioning, torch.Tensor | None]:
            conditionings = encode_prompt(model, plan, denoiser, changes)
            return conditionings, _are_finite(conditionings)

        (cond, uncond), finite = encoded.get((image.pass_index, denoiser.unet), image.index, encode)
        image.cond = _copy_inputs(cond)
        image.uncond = None if uncond is None else _copy_inputs(uncond)
        if finite is not None:
            earlier = image.checks.get(TEXT)
            image.checks[TEXT] = finite if earlier is None else finite & earlier


def _are_finite(conditionings: CfgConditioning) -> torch.Tensor | None:
    """Return bool [1], true if all encoded texts are finite; None if there are none."""
    texts = [half.inputs for half in conditionings if half is not None]
    encoded = [inputs[name] for inputs in texts for name in _ENCODED if name in inputs]
    return is_finite(*encoded) if encoded else None


def _copy_inputs(conditioning: Conditioning) -> Conditioning:
    """Return a conditioning with the same tensors in a new dict, to which a later stage may add an input."""
    return replace(conditioning, inputs=dict(conditioning.inputs))


@dataclass(frozen=True)
class PrepareLatents:
    """Draw an image's initial noise. If there is an input image, encode it and add noise to it."""

    timing: str = "text"

    def run(self, model: LoadedModel, plan: PassPlan, image: ImageState, encoded: EncodedOnce) -> None:
        image.known = image.extra_channels = None
        image.checks.pop(IMAGE, None)  # of the pass before
        if plan.source is None:
            image.latents = plan.init_sigma * draw_latents(model, plan, image)
        else:
            prepare_from_image(model, plan, plan.source, image, encoded)


@dataclass(frozen=True)
class Denoise:
    """Prepare an image for its steps on one UNet. The refiner continues with the base's latents and generator."""

    part: Part
    timing: str

    def run(self, model: LoadedModel, plan: PassPlan, image: ImageState, encoded: EncodedOnce) -> LoopKey | None:
        denoiser = model.family.denoiser(self.part)
        if denoiser is None or (denoise_plan := plan.denoise.get(denoiser.unet)) is None:
            return None
        image.plan, image.step = denoise_plan.step_plan, 0
        if plan.source is not None and denoise_plan is not plan.first:
            keep_base_result(model, plan, plan.source, image)
        return denoise_plan.loop


@dataclass(frozen=True)
class Decode:
    """Decode an image, while other images are denoised, and copy it to the host unless another pass continues it.

    A safety checker, if one is loaded, checks what is copied to the host.
    """

    timing: str = "decode"

    def run(self, model: LoadedModel, plan: PassPlan, image: ImageState, encoded: EncodedOnce) -> None:
        with model.decode_stream.run_after(image.latents, *image.checks.values()):
            levels, finite = to_levels(decode_latents(model, image.latents))
            checks = {LATENTS: latents_are_sane(image.latents), PIXELS: finite, **image.checks}
            passed = torch.ones_like(finite)  # a check that was not made
            finite = torch.cat([checks.get(name, passed) for name in CHECKS])
            if image.result is not None:
                finite &= image.result.tensors[1]
            if plan.is_last:
                image.pixels = PendingImage(levels, finite, check_image(model, levels))
            else:
                image.result = model.decode_stream.record([levels[0], finite])


STAGES: tuple[Stage, ...] = (
    EncodePrompt("base", timing="text"),
    PrepareLatents(),
    Denoise("base", timing="denoise"),
    EncodePrompt("refiner", timing="refine"),
    Denoise("refiner", timing="refine"),
    Decode(),
)
