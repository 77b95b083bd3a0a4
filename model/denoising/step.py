"""The arithmetic of one denoising step, shared by both loops."""

from collections.abc import Sequence

import torch

from model.denoising.loop import ImageState, Known


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


def keep_known(x: torch.Tensor, known: Known, coefficients: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Replace latents outside of a mask by those of the known image, noised as much as the next step expects.

    out = mask * x + (1 - mask) * (coefficients[0] * latents + coefficients[1] * noise), as in diffusers'
    StableDiffusionXLInpaintPipeline. Where the mask is 1, `out` is exactly x. `x` and `out` are float32 [images,
    channels, height/8, width/8] and may be the same; the coefficients are `KNOWN_COEFFICIENTS`, each [images, 1, 1, 1].
    """
    noised = (coefficients[0] * known.latents).addcmul_(coefficients[1], known.noise)
    torch.lerp(noised, x, known.mask.expand_as(x), out=out)


def draw_noise(images: Sequence[ImageState], like: torch.Tensor) -> torch.Tensor:
    """Draw the next step's noise of each image from its own generator; zeros where the sampler draws none.

    Returns float32 of `like`'s shape [images, channels, height/8, width/8], on its device.
    """
    drawing = [image.plan.schedule.draws_noise[image.step] for image in images]
    if not any(drawing):
        return torch.zeros_like(like)
    shape = (1, *like.shape[1:])
    drawn = [
        torch.randn(shape, generator=image.generator) if draws else torch.zeros(shape)
        for image, draws in zip(images, drawing, strict=True)
    ]
    return torch.cat(drawn).to(like.device)
