"""Decode latents to pixels."""

import torch

from model.engines.shapes import DTYPES
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.spec import VAE_DECODER


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
