"""The guidance scale of each step, and its embedding for UNets that were distilled to take it as an input."""

import numpy as np
import torch
from numpy.typing import NDArray

from model.denoising.noise_schedule import Floats
from model.denoising.sampler_specs import skipped_steps
from model.pipeline.params import GenerationParams


def scale_by_step(params: GenerationParams, requested_step: NDArray[np.int64]) -> Floats:
    """Return the requested guidance scale of some of the steps that run, float64 [steps].

    It may be below 1. Before guidance begins and after it has ended it is 1. `requested_step`: see `StepPlan`. All
    evaluations of a requested step have one scale.
    """
    steps = params.num_inference_steps
    if params.image is not None:
        steps -= skipped_steps(params.strength, steps)
    start, end = (round(share * steps) for share in (params.guidance_start, params.guidance_end))
    return np.where((start <= requested_step) & (requested_step < end), params.guidance_scale, 1.0)


def embed_guidance(scales: Floats, width: int) -> torch.Tensor:
    """Embed guidance scales [steps] for a distilled UNet, float32 [steps, width].

    The embedding is sines and cosines of 1000 * (scale - 1), as in diffusers' `get_guidance_scale_embedding`. Sources:
    Luo et al. 2023 (arXiv 2310.04378), section 4; for the frequencies Kingma et al. 2021 (arXiv 2107.00630).
    """
    # The order of operations is diffusers': the sine of a number in the thousands depends on the number's last bit.
    half = width // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -(torch.log(torch.tensor(10000.0)) / (half - 1)))
    angles = (torch.from_numpy(scales - 1).float() * 1000.0)[:, None] * frequencies[None, :]
    embedded = torch.cat([torch.sin(angles), torch.cos(angles)], dim=1)
    return torch.nn.functional.pad(embedded, (0, width % 2))
