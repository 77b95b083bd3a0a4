"""The schedulers of diffusers that implement our samplers, noise schedules from configs, and a loop of each.

The network of both loops is a function.
"""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EDMDPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    LCMScheduler,
)

from engine_builder.checkpoints.scheduler_config import read_scheduler_config
from model.denoising.edm_schedule import EdmSchedule
from model.denoising.loop_schedule import KEPT, NOISE, STATE, X, device_rows, loop_schedule
from model.denoising.noise_schedule import NoiseSchedule
from model.denoising.samplers import SamplerSchedule
from model.denoising.step import advance

# Sampler -> class, and the settings that differ from the checkpoint's.
DIFFUSERS_SCHEDULERS: dict[str, tuple[type, dict[str, Any]]] = {
    "Euler": (EulerDiscreteScheduler, {}),
    "Euler a": (EulerAncestralDiscreteScheduler, {}),
    "DDIM": (DDIMScheduler, {}),
    "DPM++ 2M": (DPMSolverMultistepScheduler, {}),
    "DPM++ 2M Karras": (DPMSolverMultistepScheduler, {"use_karras_sigmas": True}),
    "DPM++ 2M SDE Karras": (
        DPMSolverMultistepScheduler,
        {"use_karras_sigmas": True, "algorithm_type": "sde-dpmsolver++"},
    ),
    "LCM": (LCMScheduler, {}),
    "Heun": (HeunDiscreteScheduler, {}),
}
# The same for models in the EDM formulation.
EDM_SCHEDULERS: dict[str, tuple[type, dict[str, Any]]] = {
    "Euler": (EDMEulerScheduler, {}),
    "DPM++ 2M Karras": (EDMDPMSolverMultistepScheduler, {}),
    "DPM++ 2M SDE Karras": (EDMDPMSolverMultistepScheduler, {"algorithm_type": "sde-dpmsolver++"}),
}


def read_noise_schedule(config: Mapping[str, Any]) -> NoiseSchedule:
    """Return the noise schedule of the scheduler_config.json of an SDXL."""
    schedule = read_scheduler_config(config, "sdxl").schedule
    assert isinstance(schedule, NoiseSchedule)
    return schedule


def read_edm_schedule(config: Mapping[str, Any]) -> EdmSchedule:
    """Return the noise schedule of the scheduler_config.json of an SDXL in the EDM formulation."""
    schedule = read_scheduler_config(config, "sdxl").schedule
    assert isinstance(schedule, EdmSchedule)
    return schedule


SHAPE = (1, 4, 3, 5)
TOLERANCE = 1e-5  # relative to the largest latent; both sides are float32


class Inpainted(NamedTuple):
    """The latents and noise of an image that is kept where the mask is 0."""

    image: torch.Tensor
    noise: torch.Tensor
    mask: torch.Tensor


def predict_noise(model_input: torch.Tensor, timestep: float) -> torch.Tensor:
    """A prediction that depends on both arguments, differently at each position."""
    tilt = torch.linspace(0.5, 1.5, model_input.numel()).reshape(SHAPE)
    return 0.3 * model_input * tilt + 0.2 * float(np.sin(timestep / 7)) * tilt.flip(-1)


def denoise(
    schedule: SamplerSchedule,
    latents: torch.Tensor,
    generator: torch.Generator,
    padding: int = 0,
    inpainted: Inpainted | None = None,
) -> torch.Tensor:
    """Run the steps of the device's loop for one image, in float32, then `padding` further ones."""
    evaluations = loop_schedule(schedule)
    state = torch.zeros(1, STATE, *SHAPE[1:])
    state[:, X] = latents
    for i, row in enumerate(torch.from_numpy(device_rows(evaluations, schedule.steps + padding))):
        timestep = np.float32(schedule.timesteps[i] if i < schedule.steps else 0)
        eps = predict_noise(row[0] * state[:, X], timestep)
        if i < schedule.steps and schedule.draws_noise[i]:
            state[:, NOISE] = torch.randn(SHAPE, generator=generator)
        advance(state, eps, torch.tensor([i % KEPT]), row[1:-2].reshape(1, 2, STATE))
        if inpainted is not None:
            known = row[-2] * inpainted.image + row[-1] * inpainted.noise
            state[:, X] = inpainted.mask * state[:, X] + (1 - inpainted.mask) * known
    latents = state[:, X]
    return latents


def denoise_with_diffusers(
    scheduler: Any,
    timesteps: torch.Tensor,
    latents: torch.Tensor,
    generator: torch.Generator,
    inpainted: Inpainted | None = None,
) -> torch.Tensor:
    """Run the loop of the SDXL pipelines, with their `prepare_extra_step_kwargs`."""
    parameters = set(inspect.signature(scheduler.step).parameters)
    extra = {key: value for key, value in (("eta", 0.0), ("generator", generator)) if key in parameters}
    for i, t in enumerate(timesteps):
        eps = predict_noise(scheduler.scale_model_input(latents, t), float(t))
        latents = scheduler.step(eps, t, latents, **extra, return_dict=False)[0]
        if inpainted is not None:  # StableDiffusionXLInpaintPipeline.__call__, 11
            known = inpainted.image
            if i < len(timesteps) - 1:
                known = scheduler.add_noise(known, inpainted.noise, torch.tensor([timesteps[i + 1]]))
            latents = (1 - inpainted.mask) * known + inpainted.mask * latents
    return latents


def initial_latents(init_sigma: float, seed: int = 7) -> tuple[torch.Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPE, generator=generator) * init_sigma, generator


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert torch.isfinite(expected).all()
    assert float((actual - expected).abs().max() / expected.abs().max()) < tolerance


def check_denoises_alike(
    schedule: SamplerSchedule, scheduler: Any, tolerance: float = TOLERANCE, same_noise: bool = True
) -> None:
    """A schedule has the timesteps and results of diffusers' scheduler, and has drawn as much noise."""
    assert schedule.timesteps == pytest.approx(scheduler.timesteps.double().numpy(), rel=1e-5, abs=1e-6)
    assert schedule.init_sigma == pytest.approx(float(scheduler.init_noise_sigma), rel=1e-6)
    latents, generator = initial_latents(schedule.init_sigma)
    result = denoise(schedule, latents, generator)
    latents, reference_generator = initial_latents(scheduler.init_noise_sigma)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)
    expected = denoise_with_diffusers(scheduler, scheduler.timesteps, latents, reference_generator)
    assert_close(result, expected, tolerance)
    assert not same_noise or torch.equal(generator.get_state(), reference_generator.get_state())
