"""Encode pixels to latents, and decode latents to pixels."""

from dataclasses import dataclass

import torch

from model.engines.shapes import DTYPES
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.spec import VAE_DECODER, VAE_ENCODER

_LOG_VARIANCE_RANGE = (-30.0, 20.0)  # diffusers' DiagonalGaussianDistribution clamps to it


@dataclass(frozen=True, eq=False)
class LatentDistribution:
    """The normal distribution of an image's latents, with the VAE's scaling factor applied.

    mean, deviation: float32 [1, channels, height/8, width/8].
    """

    mean: torch.Tensor
    deviation: torch.Tensor

    def sample(self, noise: torch.Tensor) -> torch.Tensor:
        """Return a sample. `noise`: N(0, 1), of the shape of the mean."""
        return torch.addcmul(self.mean, self.deviation, noise)


def to_pixels(levels: torch.Tensor) -> torch.Tensor:
    """Convert uint8 [height, width, 3] to float32 [1, 3, height, width] in [-1, 1].

    The arithmetic is that of diffusers' `VaeImageProcessor.preprocess`.
    """
    return levels.permute(2, 0, 1)[None].float().div_(255).mul_(2).sub_(1).contiguous()


def encode_pixels(model: LoadedModel, pixels: torch.Tensor) -> LatentDistribution:
    """Encode float32 pixels [1, 3, height, width] in [-1, 1].

    Call it on `model.encode_stream`. The arithmetic is that of diffusers' `AutoencoderKL.encode`.
    """
    encoder = model.engines[VAE_ENCODER]
    scaling: float | torch.Tensor = model.settings.vae_scaling_factor
    dtype = DTYPES[encoder.signature.inputs[0].dtype]
    moments = encoder.run({"pixels": pixels.to(dtype)}, *pixels.shape[-2:])["moments"]
    mean, log_variance = moments.float().chunk(2, dim=1)
    deviation = torch.exp(0.5 * log_variance.clamp(*_LOG_VARIANCE_RANGE))
    if model.latents_normalization is not None:
        latents_mean, latents_deviation = model.latents_normalization
        mean, scaling = mean - latents_mean, scaling / latents_deviation
    return LatentDistribution(scaling * mean, scaling * deviation)


def decode_latents(model: LoadedModel, latents: torch.Tensor) -> torch.Tensor:
    """Decode latents [1, channels, height/8, width/8] to float32 pixels [1, 3, height, width], nominally in [-1, 1].

    Call it on `model.decode_stream`.
    """
    decoder, scale = model.engines[VAE_DECODER], model.settings.vae_scale_factor
    dtype = DTYPES[decoder.signature.inputs[0].dtype]
    height, width = latents.shape[-2] * scale, latents.shape[-1] * scale
    if model.latents_normalization is not None:
        mean, deviation = model.latents_normalization
        latents = latents * deviation / model.settings.vae_scaling_factor + mean
    else:
        latents = latents / model.settings.vae_scaling_factor
    inputs = {"latents": latents.to(dtype)}
    return decoder.run(inputs, height, width)["pixels"].float()
