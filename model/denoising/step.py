"""The arithmetic of one denoising step, shared by both loops."""

from collections.abc import Sequence

import torch

from model.denoising.loop import ImageState, Known
from model.denoising.loop_schedule import FIRST_KEPT


def guide(uncond: torch.Tensor, cond: torch.Tensor, scale: torch.Tensor, rescale: torch.Tensor) -> torch.Tensor:
    """Return g = uncond + scale * (cond - uncond), the form of diffusers, with its standard deviation corrected.

    The result is g * (1 + rescale * (std(cond) / std(g) - 1)), and exactly g where `rescale` is 0. The standard
    deviations are those of each image. `scale` and `rescale` are [images, 1, 1, 1].

    Sources: Ho and Salimans, "Classifier-free diffusion guidance", 2022; for the correction Lin et al. 2023 (arXiv
    2305.08891), section 3.4, in diffusers `rescale_noise_cfg`.
    """
    guided = torch.addcmul(uncond, scale, cond - uncond)
    ratio = cond.std(dim=(1, 2, 3), keepdim=True) / guided.std(dim=(1, 2, 3), keepdim=True)
    # A constant prediction has the ratio 0 / 0.
    return guided * torch.where(rescale > 0, 1 + rescale * (ratio - 1), 1.0)


def advance(state: torch.Tensor, prediction: torch.Tensor, position: torch.Tensor, rows: torch.Tensor) -> None:
    """Keep a prediction, and take the steps that follow from it (`model.denoising.loop_schedule`), in place.

    state: float32 [images, STATE, channels, height/8, width/8]. prediction: float32 [images, channels, height/8,
    width/8]. position: int64 [images], where it is kept. rows: float32 [images, 2, STATE].
    """
    state[torch.arange(len(state), device=state.device), FIRST_KEPT + position] = prediction
    state[:, :FIRST_KEPT] = torch.bmm(rows, state.flatten(2)).view_as(state[:, :FIRST_KEPT])


def keep_known(x: torch.Tensor, known: Known, coefficients: torch.Tensor, out: torch.Tensor) -> None:
    """Replace latents outside of a mask by those of the known image, noised as much as the next step expects.

    out = mask * x + (1 - mask) * (coefficients[0] * latents + coefficients[1] * noise), as in diffusers'
    StableDiffusionXLInpaintPipeline. Where the mask is 1, `out` is exactly x. `x` and `out` are float32 [images,
    channels, height/8, width/8] and may be the same. coefficients: float32 [2] or [2, images, 1, 1, 1].
    """
    noised = (coefficients[0] * known.latents).addcmul_(coefficients[1], known.noise)
    torch.lerp(noised, x, known.mask.expand_as(x), out=out)


def draw_noise(image: ImageState, shape: Sequence[int]) -> torch.Tensor | None:
    """Draw the noise of an image's next step from its generator: float32 [1, ...], or None if there is no draw."""
    draws = image.plan.schedule.draws_noise[image.step]
    return torch.randn((1, *shape), generator=image.generator) if draws else None
