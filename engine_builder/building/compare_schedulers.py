"""Compare a sampler's schedule with the scheduler of diffusers that it replaces, before anything is compiled."""

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from model.denoising.edm_schedule import AnyNoiseSchedule, EdmSchedule
from model.denoising.loop_schedule import KEPT, NOISE, STATE, X, device_rows, loop_schedule
from model.denoising.noise_schedule import NoiseSchedule
from model.denoising.sampler_specs import EULER, sampler_spec
from model.denoising.samplers import most_steps, sampler_schedule
from model.denoising.step import advance

MAX_DIFFERENCE = 5e-4  # of `compare_sampler`: above rounding, and below the difference of one timestep
COMPARED_STEPS = (5, 20)
_SHAPE = (1, 4, 8, 8)
_SEED = 7


def compare_sampler(config: Mapping[str, Any], schedule: AnyNoiseSchedule, sampler: str) -> float:
    """Return the largest difference between this project's denoising and diffusers', relative to the values.

    Both denoise latents of random numbers with the same random prediction for each run of the UNet, in float32, over 5
    and over 20 steps. The result is the largest difference of the timesteps, of the UNet's inputs and of the latents
    after each step, each divided by the largest value of that step in diffusers: rounding gives some 1e-6.

    `config`: `SchedulerConfig.config`, which includes what diffusers' pipelines change. `schedule` and `sampler`: what
    the release has. `sampler` decides the scheduler's class. Raises RequestRefused for a sampler that does not serve
    the formulation.
    """
    with warnings.catch_warnings():
        # diffusers 0.42.1 calls np.array on tensors of a torch whose __array__ takes no `copy`: a defect of diffusers.
        warnings.simplefilter("ignore", DeprecationWarning)
        scheduler = diffusers_scheduler(config, schedule, sampler)
        most = most_steps(sampler_spec(sampler), schedule)
        return max(_compare(scheduler, schedule, sampler, min(steps, most)) for steps in COMPARED_STEPS)


def diffusers_scheduler(config: Mapping[str, Any], schedule: AnyNoiseSchedule, sampler: str) -> Any:
    """Return the scheduler of diffusers that implements a sampler. Arguments as of `compare_sampler`."""
    import diffusers.schedulers

    name, options = sampler_spec(sampler).implementation(isinstance(schedule, EdmSchedule))
    # diffusers warns of each entry of another class.
    kind: Any = getattr(diffusers.schedulers, name)
    known = {*inspect.signature(kind.__init__).parameters, "_class_name"}
    # The config may be of another sampler with Karras' spacing.
    entries = {**config, "use_karras_sigmas": False, **options}
    scheduler = kind.from_config({key: value for key, value in entries.items() if key in known})
    zero_snr = isinstance(schedule, NoiseSchedule) and schedule.rescale_betas_zero_snr
    if zero_snr and "rescale_betas_zero_snr" not in known:
        # diffusers' Heun ignores the setting. It gets the noise schedule of diffusers' Euler.
        scheduler.alphas_cumprod = diffusers_scheduler(config, schedule, EULER.name).alphas_cumprod
    return scheduler


def _compare(scheduler: Any, noise_schedule: AnyNoiseSchedule, sampler: str, steps: int) -> float:
    schedule = sampler_schedule(sampler, steps, noise_schedule)
    scheduler.set_timesteps(steps)
    # As StableDiffusionXLPipeline calls a scheduler: `prepare_latents`, `prepare_extra_step_kwargs`, and its loop.
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)
    if scheduler.timesteps.shape != (schedule.steps,):
        return float("inf")
    predictions = torch.randn(schedule.steps, *_SHAPE, generator=torch.Generator().manual_seed(_SEED + 1))
    generators = [torch.Generator().manual_seed(_SEED) for _ in range(2)]
    ours, theirs = ((torch.randn(_SHAPE, generator=generator), generator) for generator in generators)
    latents, expected = ours[0] * schedule.init_sigma, theirs[0] * scheduler.init_noise_sigma
    accepted = set(inspect.signature(scheduler.step).parameters)
    extra = {key: value for key, value in (("eta", 0.0), ("generator", theirs[1])) if key in accepted}
    evaluations = loop_schedule(schedule)
    rows = torch.from_numpy(device_rows(evaluations, schedule.steps))
    state = torch.zeros(1, STATE, *_SHAPE[1:])
    state[:, X] = latents
    differences = [_difference(torch.tensor(schedule.timesteps, dtype=torch.float32), scheduler.timesteps)]
    for i, t in enumerate(scheduler.timesteps):
        differences.append(_difference(rows[i, 0] * state[:, X], scheduler.scale_model_input(expected, t)))
        if schedule.draws_noise[i]:
            state[:, NOISE] = torch.randn(_SHAPE, generator=ours[1])
        advance(state, predictions[i], torch.tensor([i % KEPT]), rows[i, 1:-2].reshape(1, 2, STATE))
        expected = scheduler.step(predictions[i], t, expected, **extra, return_dict=False)[0]
        differences.append(_difference(state[:, X], expected))
    return max(differences)


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference relative to the largest expected value; infinity if one is not a number."""
    difference = float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
    return difference if np.isfinite(difference) else float("inf")
