"""How strongly each step of a request follows its prompt, and what a UNet that was distilled for it is told of that.

Knows nothing of engines.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from model.api.request import GenerationSettings
from model.denoising.noise_schedule import Floats


def guidance_by_step(request: GenerationSettings) -> NDArray[np.float32]:
    """Guidance scale of each step, [num_inference_steps]: 1 (none) from round(end_cfg_frac * steps) on."""
    return np.maximum(scale_by_step(request), 1.0).astype(np.float32)


def scale_by_step(request: GenerationSettings) -> Floats:
    """The request's own scale of each step, [num_inference_steps], which may be below 1: 1 once its guidance ends."""
    guided = round(request.end_cfg_frac * request.num_inference_steps)
    return np.where(np.arange(request.num_inference_steps) < guided, request.guidance_scale, 1.0)


def embed_guidance(scales: Floats, width: int) -> torch.Tensor:
    """Guidance scales [steps] -> what a UNet distilled to embed guidance is told of them, float32 [steps, width].

    Sines and cosines of 1000 * (scale - 1), as diffusers' `get_guidance_scale_embedding` computes them for Luo et al.
    2023 (arXiv 2310.04378), section 4; the frequencies are those of Kingma et al. 2021 (arXiv 2107.00630).
    """
    # Operation by operation in diffusers' order: a sine of thousands feels the last bit of its argument.
    half = width // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -(torch.log(torch.tensor(10000.0)) / (half - 1)))
    angles = (torch.from_numpy(scales - 1).float() * 1000.0)[:, None] * frequencies[None, :]
    embedded = torch.cat([torch.sin(angles), torch.cos(angles)], dim=1)
    return torch.nn.functional.pad(embedded, (0, width % 2))
