"""A sampler is a table of coefficients, one row a step.

Every sampler served here is linear in what it is given. With `eps` what the UNet says of `c_in * x`:

    denoised = a * x + b * eps
    next x   = x_coef * x + denoised_coef * denoised + prev_coef * previous denoised + noise_coef * noise

so a step is one row of seven numbers (`COLUMNS`) and a loop over steps knows no sampler by name.

Promised: the UNet timesteps and the draws of noise of diffusers 0.42.1, its scheduler made by `from_config`
from the same scheduler_config.json, and its latents but for rounding. The noise schedule is rounded to
float32 where diffusers rounds it; what follows from it is float64, until `stack` writes float32.

One deviation: with trailing spacing some step counts (61 of 1,000) give diffusers one step too many, at
timestep -1, by rounding in `numpy.arange`. Here a table of n steps has n rows.

This module knows nothing of tensors, devices, guidance or generators.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.denoising.noise_schedule import (
    MAX_STEPS,
    Floats,
    NoiseSchedule,
)
from model.errors import ManifestError, RequestRefused

COLUMNS = ("c_in", "a", "b", "x", "denoised", "prev", "noise")
MAX_STEPS_LCM = 50
SAMPLERS: tuple[str, ...] = (
    "Euler",
    "Euler a",
    "DDIM",
    "DPM++ 2M",
    "DPM++ 2M Karras",
    "DPM++ 2M SDE Karras",
    "LCM",
)
CLASSES = {
    "EulerDiscreteScheduler": "Euler",
    "EulerAncestralDiscreteScheduler": "Euler a",
    "DDIMScheduler": "DDIM",
    "DPMSolverMultistepScheduler": "DPM++ 2M",
    "LCMScheduler": "LCM",
}
# diffusers' DPM++ class is three of the samplers: its algorithm_type and use_karras_sigmas choose which.
DPM_VARIANTS = {
    ("dpmsolver++", False): "DPM++ 2M",
    ("dpmsolver++", True): "DPM++ 2M Karras",
    ("sde-dpmsolver++", True): "DPM++ 2M SDE Karras",
}


def sampler_name(name: str) -> str:
    """The public name of a sampler, from that name or from diffusers' class name."""
    if name not in SAMPLERS and name not in CLASSES:
        raise RequestRefused("scheduler", f"{name!r} is not one of {', '.join((*SAMPLERS, *CLASSES))}.")
    return CLASSES.get(name, name)


def configured_sampler(config: Mapping[str, Any]) -> str:
    """The public name of the sampler that a scheduler_config.json asks for itself: a release's default."""
    name = str(config.get("_class_name"))
    if name not in CLASSES:
        raise ManifestError(f"scheduler_config.json: _class_name is {name!r}, not of {', '.join(CLASSES)}.")
    if name != "DPMSolverMultistepScheduler":
        return CLASSES[name]
    pair = (str(config.get("algorithm_type", "dpmsolver++")), bool(config.get("use_karras_sigmas")))
    if pair not in DPM_VARIANTS:
        served = " or ".join(map(str, DPM_VARIANTS))
        raise ManifestError(f"scheduler_config.json: algorithm_type, use_karras_sigmas {pair}, not {served}.")
    return DPM_VARIANTS[pair]


@dataclass(frozen=True, eq=False)
class Table:
    """One sampler's steps. The arrays are read-only; a table with no rows is false.

    timesteps: float64 [steps], what the UNet is given; each is exact in float32.
    coefficients: float64 [steps, 7], in the order of COLUMNS.
    init_sigma: the first latents are init_sigma * N(0, 1).
    noise_drawn: bool [steps], whether that step draws from the generator. It may be true where the noise
        coefficient is 0: the draw must still be taken, so that later ones are those of diffusers.
    """

    sampler: str
    timesteps: Floats
    coefficients: Floats
    init_sigma: float
    noise_drawn: NDArray[np.bool_]

    def __post_init__(self) -> None:
        assert self.coefficients.shape == (self.steps, len(COLUMNS)) and len(self.noise_drawn) == self.steps
        for array in (self.timesteps, self.coefficients, self.noise_drawn):
            array.setflags(write=False)

    @property
    def steps(self) -> int:
        return len(self.timesteps)

    def __len__(self) -> int:
        return self.steps


@lru_cache(maxsize=256)  # requests ask for the same few, and the GPU waits while one is made
def table(sampler: str, steps: int, noise_schedule: NoiseSchedule) -> Table:
    """The table of a sampler, by any name `sampler_name` takes; RequestRefused past the steps it serves."""
    name = sampler_name(sampler)
    most = min(MAX_STEPS_LCM, noise_schedule.original_inference_steps) if name == "LCM" else MAX_STEPS
    if not 1 <= steps <= most:
        raise RequestRefused("num_inference_steps", f"{steps} is not 1 to {most}, the range of {name}.")
    build = {"Euler": _euler, "Euler a": _euler, "DDIM": _ddim, "LCM": _lcm}.get(name, _dpm)
    return build(name, steps, noise_schedule)


def split(table: Table, noise_schedule: NoiseSchedule, denoising_frac: float) -> tuple[Table, Table]:
    """The rows of the base and those of the refiner, by diffusers' rule.

    The base (StableDiffusionXLPipeline, `denoising_end`) keeps the timesteps from round(N - frac * N) up, of
    the model's N; the refiner (StableDiffusionXLImg2ImgPipeline, `denoising_start`) takes the others, on the
    latents as the base left them: nothing is rescaled and no noise is drawn in between.

    Promised: run in turn, with one generator, the two give what the two pipelines give. Steps keep the sigmas
    and the noise they have in the whole table: a base that stops early ends on a step like any other, and
    LCM's draws noise there. The refiner remembers nothing: its first row has 0 for the previous denoised, so
    DPM++ is first order there. (A buffer of it must hold finite numbers all the same.)

    Either part may have no rows: the base where the fraction is near 0, the refiner where it is near 1 or the
    steps are few. (0 and 1 are this rule's ends; to diffusers they are no hand-off.) RequestRefused outside.
    """
    if not 0 <= denoising_frac <= 1:
        raise RequestRefused("denoising_frac", f"{denoising_frac} is not 0 to 1.")
    whole = noise_schedule.num_train_timesteps
    count = int(np.count_nonzero(table.timesteps >= round(whole - denoising_frac * whole)))
    coefficients = table.coefficients.copy()
    if 0 < count < table.steps:
        # m0 + (m0 - m1) / 2r with no m1 is m0: the two coefficients fall together
        denoised, prev = COLUMNS.index("denoised"), COLUMNS.index("prev")
        coefficients[count, denoised] += coefficients[count, prev]
        coefficients[count, prev] = 0.0
    base, refiner = (
        replace(
            table, timesteps=table.timesteps[rows], coefficients=coefficients[rows], noise_drawn=table.noise_drawn[rows]
        )
        for rows in (slice(None, count), slice(count, None))
    )
    return base, refiner


def stack(tables: Sequence[Table], max_steps: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Tables as the device holds them: timesteps [rows, max_steps] and coefficients [rows, max_steps, 7].

    A padded step has timestep 0 and is the identity: denoised = x and next x = x, for finite eps and buffers.
    RequestRefused for a table of more than `max_steps`.
    """
    timesteps = np.zeros((len(tables), max_steps), dtype=np.float32)
    coefficients = np.zeros((len(tables), max_steps, len(COLUMNS)), dtype=np.float32)
    coefficients[:] = [1.0 if name in ("c_in", "a", "x") else 0.0 for name in COLUMNS]
    for row, one in enumerate(tables):
        if one.steps > max_steps:
            raise RequestRefused("num_inference_steps", f"{one.steps} is more than the {max_steps} served.")
        timesteps[row, : one.steps] = one.timesteps
        coefficients[row, : one.steps] = one.coefficients
    return timesteps, coefficients


def _spaced(schedule: NoiseSchedule, steps: int, points: int) -> Floats:
    """Timesteps, descending: Lin et al. 2023 (arXiv 2305.08891), table 2.

    Leading and linspace are laid over `points`: DPM++ lays one more than its steps and drops the last.
    """
    count = schedule.num_train_timesteps
    if schedule.timestep_spacing == "leading":
        result = np.arange(points)[::-1] * float(count // points) + schedule.steps_offset
    elif schedule.timestep_spacing == "trailing":
        result = np.arange(count, 0, -count / steps).round() - 1.0
    else:
        result = np.linspace(0, count - 1, points)[::-1]
    return np.asarray(result[:steps], dtype=np.float64)


def _sigmas(schedule: NoiseSchedule) -> Floats:
    """Noise over signal at each training timestep, as in Karras et al. 2022 (EDM): x0 + sigma * noise."""
    alphas = schedule.alphas_cumprod()
    return np.sqrt((1 - alphas) / alphas)


def _coefficients(steps: int, **columns: Floats | float) -> Floats:
    """[steps, 7] from columns by name; those not named are 0."""
    result = np.zeros((steps, len(COLUMNS)))
    for name, values in columns.items():
        result[:, COLUMNS.index(name)] = values
    return result


def _euler(name: str, steps: int, schedule: NoiseSchedule) -> Table:
    """Euler: Karras et al. 2022 (EDM), algorithm 1 without its correction; ancestral: k-diffusion.

    x is x0 + sigma * noise; x + (sigma' - sigma) * (x - denoised) / sigma is a mean of x and denoised.
    Ancestral goes down to sigma'^2 / sigma and up again to sigma' by noise (Song et al. 2020, DDIM, equation
    16 with eta = 1). It draws at the last step too, where noise counts for 0.
    """
    timesteps = _spaced(schedule, steps, steps).astype(np.float32).astype(np.float64)
    every = _sigmas(schedule)
    start = np.interp(timesteps, np.arange(len(every)), every)
    end = np.append(start[1:], 0.0)
    ancestral = name == "Euler a"
    down = end**2 / start if ancestral else end
    coefficients = _coefficients(
        steps,
        c_in=1 / np.sqrt(start**2 + 1),
        a=1.0,
        b=-start,
        x=down / start,
        denoised=1 - down / start,
        noise=np.sqrt(end**2 - down**2),
    )
    init_sigma = math.hypot(start.max(), 1.0 if schedule.timestep_spacing == "leading" else 0.0)
    return Table(name, timesteps, coefficients, init_sigma, np.full(steps, ancestral))


def _ddim(name: str, steps: int, schedule: NoiseSchedule) -> Table:
    """DDIM with eta = 0: Song et al. 2020, equation 12, its eps written as what x and denoised make it.

    A step goes back by a fixed stride, as in diffusers, even where the next row's timestep is elsewhere.
    """
    alphas = schedule.alphas_cumprod()
    timesteps = _spaced(schedule, steps, steps).round()
    now = timesteps.astype(np.int64)
    back = now - schedule.num_train_timesteps // steps
    alpha = alphas[now]
    alpha_back = np.where(back >= 0, alphas[back], 1.0 if schedule.set_alpha_to_one else alphas[0])
    kept = np.sqrt((1 - alpha_back) / (1 - alpha))
    coefficients = _coefficients(
        steps,
        c_in=1.0,
        a=1 / np.sqrt(alpha),
        b=-np.sqrt((1 - alpha) / alpha),
        x=kept,
        denoised=np.sqrt(alpha_back) - np.sqrt(alpha) * kept,
    )
    return Table(name, timesteps, coefficients, 1.0, np.zeros(steps, dtype=np.bool_))


def _dpm(name: str, steps: int, schedule: NoiseSchedule) -> Table:
    """DPM-Solver++ (2M), Lu et al. 2022 (arXiv 2211.01095), algorithm 2, and its SDE-DPM-Solver++ (2M).

    h is the step in log(alpha / sigma); exp(-h) is `shrink`, a ratio of EDM's sigmas, so nothing is infinite
    at the last. r is the last h over this one. The data prediction is m0 + (m0 - m1) / 2r (midpoint), but m0
    in the first step, which has no m1, and in the last, whose h has no end. The SDE draws at every step, and
    at the last it counts for 0. Karras sigmas: EDM, equation 5, rho = 7, over the whole training range
    whatever the spacing; their timesteps are rounded, the sigmas are not.
    """
    every = _sigmas(schedule)
    if name == "DPM++ 2M":
        timesteps = _spaced(schedule, steps, steps + 1).round()
        start = np.interp(timesteps, np.arange(len(every)), every)
    else:
        high, low = every[-1] ** (1 / 7), every[0] ** (1 / 7)
        start = (high + np.linspace(0, 1, steps) * (low - high)) ** 7
        timesteps = np.interp(np.log(start), np.log(every), np.arange(len(every))).round()
    end = np.append(start[1:], 0.0)
    alpha, alpha_end, shrink = 1 / np.sqrt(start**2 + 1), 1 / np.sqrt(end**2 + 1), end / start
    sde = name == "DPM++ 2M SDE Karras"
    decay = shrink**2 if sde else shrink
    m0, h, half = alpha_end * (1 - decay), -np.log(shrink[:-1]), np.zeros(steps)
    half[1:-1] = m0[1:-1] * h[1:] / h[:-1] / 2
    coefficients = _coefficients(
        steps,
        c_in=1.0,
        a=1 / alpha,
        b=-start,
        x=decay * alpha_end / alpha,
        denoised=m0 + half,
        prev=-half,
        noise=end * alpha_end * np.sqrt(1 - decay) if sde else 0.0,
    )
    return Table(name, timesteps, coefficients, 1.0, np.full(steps, sde))


def _lcm(name: str, steps: int, schedule: NoiseSchedule) -> Table:
    """Multistep latent consistency sampling: Luo et al. 2023 (arXiv 2310.04378), algorithm 3.

    c_skip and c_out as in diffusers. Steps are picked from the distillation's own, whatever the spacing and
    its offset. Each goes to the denoised picture and noises it for the next; the last does not, nor draws.
    """
    alphas, original, sigma_data = schedule.alphas_cumprod(), schedule.original_inference_steps, 0.5
    picked = np.floor(np.linspace(0, original, steps, endpoint=False)).astype(np.int64)
    now = (original - picked) * (schedule.num_train_timesteps // original) - 1
    alpha, alpha_next = alphas[now], np.append(alphas[now[1:]], 1.0)
    scaled = now * schedule.timestep_scaling
    c_skip = sigma_data**2 / (scaled**2 + sigma_data**2)
    c_out = scaled / np.sqrt(scaled**2 + sigma_data**2)
    coefficients = _coefficients(
        steps,
        c_in=1.0,
        a=c_out / np.sqrt(alpha) + c_skip,
        b=-c_out * np.sqrt((1 - alpha) / alpha),
        denoised=np.sqrt(alpha_next),
        noise=np.sqrt(1 - alpha_next),
    )
    return Table(name, now.astype(np.float64), coefficients, 1.0, np.arange(steps) < steps - 1)
