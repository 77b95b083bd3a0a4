"""A sampler is data: a schedule of coefficients, one entry per step.

Every sampler served here is linear in its inputs. With `eps` the UNet's prediction for `c_in * x`, the noise or the
velocity of Salimans and Ho 2022 (arXiv 2202.00512), appendix D:

    denoised = a * x + b * eps
    next x   = x_coef * x + denoised_coef * denoised + prev_coef * previous denoised + noise_coef * noise

so a step is seven numbers (`COEFFICIENTS`), and a denoising loop names no sampler.

The UNet timesteps and the draws of noise equal those of diffusers 0.42.1. There, `from_config` makes the scheduler from
the same scheduler_config.json. The latents are equal except for rounding. The noise schedule is rounded to float32
where diffusers rounds it; all derived numbers are float64 until `model.denoising.loop_schedule` writes float32.

UniPC does not fit. The corrector of its second order (diffusers' default) reads the denoised estimates of the last two
steps in addition to this one, and a step here has one previous estimate. PNDM reads four.

Two deviations. With trailing spacing some step counts (61 of 1,000) give diffusers one step too many, at timestep -1,
because of rounding in `numpy.arange`. Here a schedule of n steps has n entries. And diffusers'
Heun ignores `rescale_betas_zero_snr`, which holds for all samplers here.

This module uses no tensors, devices, guidance or generators.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.denoising.edm_schedule import AnyNoiseSchedule, EdmSchedule
from model.denoising.noise_schedule import Floats, NoiseSchedule
from model.denoising.sampler_specs import SAMPLERS, SPECS, SamplerSpec, check_refiner, check_spacing, sampler_spec
from model.denoising.spacing import Points, chosen_points, edm_points, karras_points, points_at_timesteps, spaced
from model.errors import RequestRefused

COEFFICIENTS = ("c_in", "a", "b", "x", "denoised", "prev", "noise")


@dataclass(frozen=True, eq=False)
class SamplerSchedule:
    """The steps of one sampler. The arrays are read-only. A schedule without steps is false.

    timesteps: float64 [steps], the UNet's input; each is exact in float32.
    coefficients: float64 [steps, 7], in the order of COEFFICIENTS.
    noising: float64 [steps, 2]. Before a step, the latents of a noised image are its first entry * image + its second
        * N(0, 1). This is `add_noise` of diffusers' schedulers.
    init_sigma: the initial latents without an image are init_sigma * N(0, 1).
    draws_noise: bool [steps], true if the step draws noise from the generator. It may be true where the noise
        coefficient is 0: that draw is still needed, so that later draws equal those of diffusers.
    order: the entries of a requested step; the last step has one.
    """

    sampler: str
    timesteps: Floats
    coefficients: Floats
    noising: Floats
    init_sigma: float
    draws_noise: NDArray[np.bool_]
    order: int = 1

    def __post_init__(self) -> None:
        assert self.coefficients.shape == (self.steps, len(COEFFICIENTS)) and len(self.draws_noise) == self.steps
        assert self.noising.shape == (self.steps, 2)
        for array in (self.timesteps, self.coefficients, self.noising, self.draws_noise):
            array.setflags(write=False)

    @property
    def steps(self) -> int:
        return len(self.timesteps)

    def __len__(self) -> int:
        return self.steps


def served_samplers(noise_schedule: AnyNoiseSchedule) -> tuple[str, ...]:
    """Return the public names of the samplers that a model with this noise schedule serves."""
    is_edm = isinstance(noise_schedule, EdmSchedule)
    return tuple(name for name in SAMPLERS if not is_edm or SPECS[name].edm)


def most_steps(spec: SamplerSpec, noise_schedule: AnyNoiseSchedule) -> int:
    """Return the most steps of a sampler for a model with this noise schedule."""
    if spec.distilled and isinstance(noise_schedule, NoiseSchedule):
        return min(spec.max_steps, noise_schedule.original_inference_steps)
    return spec.max_steps


@lru_cache(maxsize=256)  # requests use the same few schedules
def sampler_schedule(
    sampler: str,
    steps: int,
    noise_schedule: AnyNoiseSchedule,
    timesteps: tuple[int, ...] | None = None,
    sigmas: tuple[float, ...] | None = None,
) -> SamplerSchedule:
    """Return the schedule of a sampler, by any name that `sampler_spec` accepts.

    `timesteps`: the UNet's timestep of each of the `steps`, descending. `sigmas`: the ratio of noise to signal before
    each step and after the last, descending. At most one of the two replaces the sampler's own spacing.

    Raises RequestRefused for too many steps, for a sampler that a model in the EDM formulation does not have, for a
    sampler that does not take timesteps or sigmas, and for a timestep that the model was not trained on.
    """
    spec, served = sampler_spec(sampler), served_samplers(noise_schedule)
    if spec.name not in served:
        raise RequestRefused(
            "scheduler",
            f"{spec.name!r} is not served by a model in the EDM formulation. Set one of {', '.join(served)}.",
        )
    if not isinstance(noise_schedule, EdmSchedule):
        check_spacing(spec, timesteps, sigmas)
    elif timesteps is not None or sigmas is not None:
        field = "sigmas" if timesteps is None else "timesteps"
        raise RequestRefused(field, "a model in the EDM formulation takes none. Leave the field out.")
    most = most_steps(spec, noise_schedule)
    if not 1 <= steps <= most:
        raise RequestRefused("num_inference_steps", f"{steps} is not 1 to {most}, the range of {spec.name}.")
    chosen = None if isinstance(noise_schedule, EdmSchedule) else chosen_points(timesteps, sigmas, noise_schedule)
    assert chosen is None or len(chosen.timesteps) == steps
    return _BUILDERS[spec.algorithm](spec, steps, noise_schedule, chosen)


@lru_cache(maxsize=256)
def split_schedule(
    schedule: SamplerSchedule, noise_schedule: AnyNoiseSchedule, denoising_frac: float
) -> tuple[SamplerSchedule, SamplerSchedule]:
    """Divide the steps between base and refiner, by diffusers' rule.

    Raises RequestRefused outside 0 to 1, and for a sampler that a refiner cannot continue.

    The base (StableDiffusionXLPipeline, `denoising_end`) keeps the timesteps from round(N - frac * N) up, where N is
    the model's number of training timesteps. The refiner (StableDiffusionXLImg2ImgPipeline, `denoising_start`) takes
    the others and continues with the base's latents: nothing is rescaled and no noise is drawn in between.

    The base and then the refiner, with one generator, give the result of the two pipelines. Steps keep the sigmas and
    the noise of the whole schedule: a base that stops early ends on an ordinary step, where LCM draws noise. The
    refiner has no history: its first entry has coefficient 0 for the previous denoised estimate, so DPM++ is first
    order there. The buffer of that estimate must still hold finite numbers.

    Either part may be empty: the base if the fraction is near 0, the refiner if it is near 1 or there are few steps.
    diffusers ignores the fractions 0 and 1; here they follow the rule.
    """
    check_refiner(sampler_spec(schedule.sampler))
    if not 0 <= denoising_frac <= 1:
        raise RequestRefused("denoising_frac", f"{denoising_frac} is not 0 to 1.")
    if isinstance(noise_schedule, EdmSchedule):
        raise RequestRefused("use_refiner", "a model in the EDM formulation has no refiner. Set false.")
    training_steps = noise_schedule.num_train_timesteps
    base_steps = int(np.count_nonzero(schedule.timesteps >= round(training_steps - denoising_frac * training_steps)))
    return _part(schedule, slice(base_steps)), skip_steps(schedule, base_steps)


@lru_cache(maxsize=256)
def skip_steps(schedule: SamplerSchedule, count: int) -> SamplerSchedule:
    """Return a schedule without its first `count` steps, as diffusers' image-to-image pipelines start.

    Steps keep the sigmas and the noise of the whole schedule. The new first step has no history: its coefficient of the
    previous denoised estimate is 0, so DPM++ is first order there.
    """
    rest = _part(schedule, slice(count, None))
    coefficients = rest.coefficients.copy()
    if count and len(coefficients):
        # `_dpm` adds a correction to `denoised` and subtracts it from `prev`. The sum of the two has no correction.
        denoised, prev = COEFFICIENTS.index("denoised"), COEFFICIENTS.index("prev")
        coefficients[0, denoised] += coefficients[0, prev]
        coefficients[0, prev] = 0.0
    return replace(rest, coefficients=coefficients)


def _part(schedule: SamplerSchedule, part: slice) -> SamplerSchedule:
    arrays = ("timesteps", "coefficients", "noising", "draws_noise")
    return replace(schedule, **{name: getattr(schedule, name)[part] for name in arrays})


def _coefficients(steps: int, **columns: Floats | float) -> Floats:
    """Return coefficients [steps, 7] from columns by name. Other columns are 0."""
    result = np.zeros((steps, len(COEFFICIENTS)))
    for name, values in columns.items():
        result[:, COEFFICIENTS.index(name)] = values
    return result


def _denoised(schedule: NoiseSchedule, signal: Floats, noise: Floats) -> tuple[Floats, Floats]:
    """Return the coefficients a and b of the denoised estimate, for x = signal * x0 + noise * N(0, 1)."""
    return (signal, -noise) if schedule.prediction_type == "v_prediction" else (1 / signal, -noise / signal)


def _noising(alphas: Floats) -> Floats:
    """Return the shares of signal and noise, float64 [steps, 2], from the signal's shares of the variance [steps]."""
    return np.stack([np.sqrt(alphas), np.sqrt(1 - alphas)], axis=1)


def _start(spec: SamplerSpec, steps: int, schedule: AnyNoiseSchedule, chosen: Points | None) -> tuple[Points, float]:
    """Return the points of a sampler whose x is x0 + sigma * noise, and the factor of the initial latents."""
    if isinstance(schedule, EdmSchedule):
        return edm_points(schedule, steps), math.hypot(schedule.sigma_max, 1.0)
    spacing = schedule.spacing(spec.spacing)
    timesteps = spaced(schedule, spacing, steps, steps).astype(np.float32).astype(np.float64)
    points = chosen or points_at_timesteps(timesteps, schedule)
    return points, math.hypot(points.sigmas[:-1].max(), 1.0 if spacing == "leading" else 0.0)


def _prediction(schedule: AnyNoiseSchedule, sigmas: Floats, alpha: Floats | float = 1.0) -> dict[str, Floats]:
    """Return the coefficients c_in, a and b for x = alpha * (x0 + sigma * noise).

    In the EDM formulation alpha is 1, and they are the preconditioning of Karras et al. 2022, table 1.
    """
    if isinstance(schedule, EdmSchedule):
        data, both = schedule.sigma_data, np.hypot(sigmas, schedule.sigma_data)
        sign = -1 if schedule.prediction_type == "v_prediction" else 1
        return {"c_in": 1 / both, "a": data**2 / both**2, "b": sign * sigmas * data / both}
    signal = 1 / np.sqrt(sigmas**2 + 1)
    a, b = _denoised(schedule, signal, signal * sigmas)
    scale = signal / alpha
    return {"c_in": scale, "a": a * scale, "b": b}


def _euler(spec: SamplerSpec, steps: int, schedule: AnyNoiseSchedule, chosen: Points | None) -> SamplerSchedule:
    """Euler: Karras et al. 2022 (EDM), algorithm 1 without its correction; ancestral: k-diffusion.

    x is x0 + sigma * noise. A step, x + (sigma' - sigma) * (x - denoised) / sigma, is a mean of x and denoised. An
    ancestral step goes down to sigma'^2 / sigma. Noise then raises it to sigma': Song et al. 2020 (DDIM), equation 16
    with eta = 1. The last step draws noise too, with coefficient 0.
    """
    (timesteps, sigmas), init_sigma = _start(spec, steps, schedule, chosen)
    start, end = sigmas[:-1], sigmas[1:]
    down = end**2 / start if spec.draws_noise else end
    columns = {"x": down / start, "denoised": 1 - down / start, "noise": np.sqrt(end**2 - down**2)}
    coefficients = _coefficients(steps, **_prediction(schedule, start), **columns)
    noising = np.stack([np.ones(steps), start], axis=1)
    return SamplerSchedule(spec.name, timesteps, coefficients, noising, init_sigma, np.full(steps, spec.draws_noise))


def _heun(spec: SamplerSpec, steps: int, schedule: AnyNoiseSchedule, chosen: Points | None) -> SamplerSchedule:
    """Heun: Karras et al. 2022 (EDM), algorithm 1. Each step has two entries, except the last.

    The first entry is a step of Euler from sigma to sigma'. The second one is at sigma' and replaces it by the step
    along the mean of both slopes. It needs the x before the first entry, which follows from the x after it and the
    previous denoised estimate.
    """
    points, init_sigma = _start(spec, steps, schedule, chosen)
    start, end = points.sigmas[:-1], points.sigmas[1:]
    ratio = end / start  # Euler: x' = ratio * x + (1 - ratio) * denoised
    # At sigma': x = (x' - (1 - ratio) * previous) / ratio, and the next x is
    # x + (sigma' - sigma) / 2 * ((x - previous) / sigma + (x' - denoised) / sigma').
    half, before = (end[:-1] - start[:-1]) / 2, 1 / ratio[:-1]
    of_before = 1 + half / start[:-1]
    second = {
        "x": of_before * before + half / end[:-1],
        "denoised": -half / end[:-1],
        "prev": of_before * (1 - before) - half / start[:-1],
    }
    timesteps, sigmas = (np.append(values[:1], np.repeat(values[1:], 2)) for values in (points.timesteps, start))
    coefficients = _coefficients(len(sigmas), **_prediction(schedule, sigmas))
    coefficients[::2] += _coefficients(steps, x=ratio, denoised=1 - ratio)
    coefficients[1::2] += _coefficients(steps - 1, **second)
    noising = np.stack([np.ones(len(sigmas)), sigmas], axis=1)
    draws_noise = np.full(len(sigmas), spec.draws_noise)
    return SamplerSchedule(spec.name, timesteps, coefficients, noising, init_sigma, draws_noise, spec.order)


def _ddim(spec: SamplerSpec, steps: int, schedule: NoiseSchedule, _: Points | None) -> SamplerSchedule:
    """DDIM with eta = 0: Song et al. 2020, equation 12, with eps expressed by x and denoised.

    A step goes back by a fixed stride, as in diffusers, even where the next entry's timestep is different.
    """
    alphas = schedule.alphas_cumprod()
    timesteps = spaced(schedule, schedule.spacing(spec.spacing), steps, steps).round()
    now = timesteps.astype(np.int64)
    back = now - schedule.num_train_timesteps // steps
    alpha = alphas[now]
    alpha_back = np.where(back >= 0, alphas[back], 1.0 if schedule.set_alpha_to_one else alphas[0])
    noise_ratio = np.sqrt((1 - alpha_back) / (1 - alpha))
    a, b = _denoised(schedule, np.sqrt(alpha), np.sqrt(1 - alpha))
    denoised = np.sqrt(alpha_back) - np.sqrt(alpha) * noise_ratio
    coefficients = _coefficients(steps, c_in=1.0, a=a, b=b, x=noise_ratio, denoised=denoised)
    noising = _noising(alpha)
    return SamplerSchedule(spec.name, timesteps, coefficients, noising, 1.0, np.full(steps, spec.draws_noise))


def _dpm(spec: SamplerSpec, steps: int, schedule: AnyNoiseSchedule, chosen: Points | None) -> SamplerSchedule:
    """DPM-Solver++ (2M), Lu et al. 2022 (arXiv 2211.01095), algorithm 2, and its SDE-DPM-Solver++ (2M).

    x is alpha * (x0 + sigma * noise), and alpha is 1 in the EDM formulation.

    h is the step in log(alpha / sigma). `shrink` is exp(-h), a ratio of EDM's sigmas. It is 0 in the last step, where
    h is infinite. r is the previous h over this one. The data prediction is m0 + (m0 - m1) / 2r (midpoint). It is m0 in
    the first step, which has no m1, and in the last. The SDE draws noise at every step, with coefficient 0 at the last.
    """
    if isinstance(schedule, EdmSchedule):
        (timesteps, sigmas), init_sigma = _start(spec, steps, schedule, chosen)
    else:
        if spec.karras:
            chosen = karras_points(schedule, steps)
        points = spaced(schedule, schedule.spacing(spec.spacing), steps, steps + 1).round()
        (timesteps, sigmas), init_sigma = chosen or points_at_timesteps(points, schedule), 1.0
    start, end = sigmas[:-1], sigmas[1:]
    alpha = np.ones(steps) if isinstance(schedule, EdmSchedule) else 1 / np.sqrt(start**2 + 1)
    alpha_end, shrink = np.append(alpha[1:], 1.0), end / start
    decay = shrink**2 if spec.draws_noise else shrink
    m0, h, correction = alpha_end * (1 - decay), -np.log(shrink[:-1]), np.zeros(steps)
    correction[1:-1] = m0[1:-1] * h[1:] / h[:-1] / 2
    columns = {"x": decay * alpha_end / alpha, "denoised": m0 + correction, "prev": -correction}
    if spec.draws_noise:
        columns["noise"] = end * alpha_end * np.sqrt(1 - decay)
    coefficients = _coefficients(steps, **_prediction(schedule, start, alpha), **columns)
    noising = np.stack([alpha, alpha * start], axis=1)
    return SamplerSchedule(spec.name, timesteps, coefficients, noising, init_sigma, np.full(steps, spec.draws_noise))


def _lcm(spec: SamplerSpec, steps: int, schedule: NoiseSchedule, chosen: Points | None) -> SamplerSchedule:
    """Multistep latent consistency sampling: Luo et al. 2023 (arXiv 2310.04378), algorithm 3.

    c_skip and c_out are those of diffusers. The steps are some of the distillation's. The scheduler's timestep spacing
    and offset have no effect. Each step predicts the denoised image and adds noise for the next one. The last step
    neither draws nor adds noise.
    """
    alphas, original, sigma_data = schedule.alphas_cumprod(), schedule.original_inference_steps, 0.5
    of_original = original - np.floor(np.linspace(0, original, steps, endpoint=False)).astype(np.int64)
    now = of_original * (schedule.num_train_timesteps // original) - 1
    now = now if chosen is None else chosen.timesteps.astype(np.int64)
    alpha, alpha_next = alphas[now], np.append(alphas[now[1:]], 1.0)
    scaled = now * schedule.timestep_scaling
    c_skip = sigma_data**2 / (scaled**2 + sigma_data**2)
    c_out = scaled / np.sqrt(scaled**2 + sigma_data**2)
    a, b = _denoised(schedule, np.sqrt(alpha), np.sqrt(1 - alpha))
    a, b, next_signal = c_out * a + c_skip, c_out * b, np.sqrt(alpha_next)
    coefficients = _coefficients(steps, c_in=1.0, a=a, b=b, denoised=next_signal, noise=np.sqrt(1 - alpha_next))
    draws_noise = spec.draws_noise & (np.arange(steps) < steps - 1)
    return SamplerSchedule(spec.name, now.astype(np.float64), coefficients, _noising(alpha), 1.0, draws_noise)


# A builder whose sampler does not serve the EDM formulation gets a NoiseSchedule only.
_Builder = Callable[[SamplerSpec, int, Any, Points | None], SamplerSchedule]
_BUILDERS: dict[str, _Builder] = {"euler": _euler, "heun": _heun, "ddim": _ddim, "dpm": _dpm, "lcm": _lcm}
