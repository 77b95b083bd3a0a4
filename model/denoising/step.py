"""The arithmetic of one denoising step, shared by both loops."""

from collections.abc import Sequence

import torch

from model.denoising.loop import ImageState


def guide(uncond: torch.Tensor, cond: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return uncond + scale * (cond - uncond), the form of diffusers.

    Source: Ho and Salimans, "Classifier-free diffusion guidance", 2022.
    """
    return torch.addcmul(uncond, scale, cond - uncond)


def advance(
    x: torch.Tensor, previous: torch.Tensor, eps: torch.Tensor, noise: torch.Tensor, update: Sequence[torch.Tensor]
) -> None:
    """Take one sampler step (`model.denoising.samplers`) in place.

    `previous` becomes the denoised estimate, `x` the next latents:

        denoised = a * x + b * eps
        next x   = x_coef * x + denoised_coef * denoised + prev_coef * previous + noise_coef * noise

    All are float32 [images, channels, height/8, width/8]. `update`: `COEFFICIENTS` without the first, each
    [images, 1, 1, 1].
    """
    # In place, because a copy would be one more node of the graph, which takes longer than these sums.
    a, b, x_coef, denoised_coef, prev_coef, noise_coef = update
    mean = prev_coef * previous
    torch.mul(a, x, out=previous).addcmul_(b, eps)
    mean.addcmul_(x_coef, x).addcmul_(denoised_coef, previous)
    torch.addcmul(mean, noise_coef, noise, out=x)


def draw_noise(images: Sequence[ImageState], like: torch.Tensor) -> torch.Tensor:
    """Draw the next step's noise of each image from its own generator; zeros where the sampler draws none.

    Returns float32 of `like`'s shape [images, channels, height/8, width/8], on its device.
    """
    if not any(image.schedule.draws_noise[image.step] for image in images):
        return torch.zeros_like(like)
    shape = (1, *like.shape[1:])
    drawn = [
        torch.randn(shape, generator=image.generator) if image.schedule.draws_noise[image.step] else torch.zeros(shape)
        for image in images
    ]
    return torch.cat(drawn).to(like.device)
