"""Where the steps of a sampler are: timesteps, and the ratio of noise to signal at each (sigma)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from model.denoising.edm_schedule import EdmSchedule
from model.denoising.noise_schedule import Floats, NoiseSchedule
from model.errors import RequestRefused


class Points(NamedTuple):
    """The points of a schedule. x is a multiple of x0 + sigma * N(0, 1): Karras et al. 2022 (EDM)."""

    timesteps: Floats  # [steps], the UNet's input at each step
    sigmas: Floats  # [steps + 1], before each step and after the last


def spaced(schedule: NoiseSchedule, spacing: str, steps: int, points: int) -> Floats:
    """Return the timesteps of a spacing, descending: Lin et al. 2023 (arXiv 2305.08891), table 2.

    Leading and linspace spacing divide the range into `points`. DPM++ uses one more than its steps and drops the last.
    """
    count = schedule.num_train_timesteps
    if spacing == "leading":
        result = np.arange(points)[::-1] * float(count // points) + schedule.steps_offset
    elif spacing == "trailing":
        result = np.arange(count, 0, -count / steps).round() - 1.0
    else:
        result = np.linspace(0, count - 1, points)[::-1]
    return np.asarray(result[:steps], dtype=np.float64)


def points_at_timesteps(timesteps: Floats, schedule: NoiseSchedule) -> Points:
    """Return the points at timesteps, with interpolated sigmas. The last sigma is 0."""
    sigmas = _training_sigmas(schedule)
    return Points(timesteps, np.append(np.interp(timesteps, np.arange(len(sigmas)), sigmas), 0.0))


def chosen_points(
    timesteps: Sequence[int] | None, sigmas: Sequence[float] | None, schedule: NoiseSchedule
) -> Points | None:
    """Return the points at a request's timesteps or sigmas [steps + 1], or None if it has neither.

    Timesteps of sigmas are interpolated in log(sigma) in float32, as in diffusers. Raises RequestRefused for a timestep
    that the model was not trained on.
    """
    if timesteps is not None:
        if timesteps[0] >= (count := schedule.num_train_timesteps):
            raise RequestRefused("timesteps", f"{timesteps[0]} is not 0 to {count - 1}, the timesteps of this model.")
        return points_at_timesteps(np.array(timesteps, dtype=np.float64), schedule)
    if sigmas is None:
        return None
    training = np.log(_training_sigmas(schedule).astype(np.float32))
    logs = np.log(np.maximum(np.array(sigmas[:-1]).astype(np.float32), np.float32(1e-10)))
    low = np.clip(np.searchsorted(training, logs, side="right") - 1, 0, len(training) - 2)
    weight = np.clip((training[low] - logs) / (training[low] - training[low + 1]), np.float32(0), np.float32(1))
    interpolated = np.asarray((1 - weight) * low + weight * (low + 1), dtype=np.float32)
    return Points(interpolated.astype(np.float64), np.array(sigmas))


def karras_points(schedule: NoiseSchedule, steps: int) -> Points:
    """Return Karras sigmas with rho = 7, for any spacing of the model. Timesteps are rounded, the sigmas are not."""
    sigmas = _training_sigmas(schedule)
    start = _karras(sigmas[-1], sigmas[0], 7, steps)
    timesteps = np.interp(np.log(start), np.log(sigmas), np.arange(len(sigmas))).round()
    return Points(timesteps, np.append(start, 0.0))


def edm_points(schedule: EdmSchedule, steps: int) -> Points:
    """Return Karras sigmas of a model in the EDM formulation, whose UNet reads 0.25 * ln(sigma) as the timestep."""
    start = _karras(schedule.sigma_max, schedule.sigma_min, schedule.rho, steps)
    start = start.astype(np.float32).astype(np.float64)
    timesteps = (0.25 * np.log(start)).astype(np.float32).astype(np.float64)
    return Points(timesteps, np.append(start, 0.0))


def _karras(sigma_max: float, sigma_min: float, rho: float, steps: int) -> Floats:
    """Return the sigmas of Karras et al. 2022, equation 5: equally spaced after the root of degree rho."""
    high, low = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    return np.asarray((high + np.linspace(0, 1, steps) * (low - high)) ** rho, dtype=np.float64)


def _training_sigmas(schedule: NoiseSchedule) -> Floats:
    """Return the sigma of each training timestep, float64 [num_train_timesteps]."""
    alphas = schedule.alphas_cumprod()
    if schedule.rescale_betas_zero_snr:
        alphas[-1] = 2**-24  # in place of 0, as in diffusers
    return np.sqrt((1 - alphas) / alphas)
