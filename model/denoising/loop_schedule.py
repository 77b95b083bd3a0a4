"""What a denoising loop runs: evaluations of the UNet, each with the steps of a sampler that follow from it.

A step of a sampler is linear in the latents, the denoised estimate of the step before, the prediction and noise (see
`model.denoising.samplers`). So are several steps one after the other, if the later ones replace the prediction by a sum
of kept ones. An evaluation is therefore two rows of coefficients over what the loop keeps of an image, and the loop
does not know how many steps it stands for.

This module uses no tensors, devices, guidance or generators.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from model.denoising.forecast import LEVELS, evaluated_steps
from model.denoising.noise_schedule import Floats
from model.denoising.samplers import COEFFICIENTS, SamplerSchedule
from model.errors import RequestRefused
from model.validation import Forecast

KEPT = 6
"""Predictions that a loop keeps of an image. That of evaluation i is at position i % KEPT."""
X, PREVIOUS, FIRST_KEPT, NOISE, STATE = 0, 1, 2, 2 + KEPT, 3 + KEPT
"""What a loop keeps of an image, by index: latents, the last denoised estimate, predictions, noise; their number."""
ROW_WIDTH = 1 + 2 * STATE + 2
"""Numbers of an evaluation on the device: c_in, the rows of x and of the estimate, two for noise on a known image."""

DEGREE = 4  # of the polynomial of a forecast
RIDGE = 0.1  # the penalty of its coefficients, except the constant one
BLEND = 0.5  # its share of a forecast


@dataclass(frozen=True, eq=False)
class LoopSchedule:
    """The evaluations of a denoiser for an image. The arrays are read-only. A schedule without evaluations is false.

    timesteps: float64 [evaluations], the UNet's input; each is exact in float32.
    c_in: float64 [evaluations], the factor of the latents in the UNet's input.
    rows: float64 [evaluations, 2, STATE]. The latents and the estimate after an evaluation are sums of what the loop
        keeps, once the prediction is kept as well.
    noising: float64 [evaluations, 2]. Before an evaluation, the latents of a noised image are its first entry * image +
        its second * N(0, 1). This is `add_noise` of diffusers' schedulers.
    draws_noise: bool [evaluations], true if the evaluation draws noise from the generator.
    step: int64 [evaluations + 1], the sampler's step of each evaluation, and the number of all steps.
    """

    timesteps: Floats
    c_in: Floats
    rows: Floats
    noising: Floats
    draws_noise: NDArray[np.bool_]
    step: NDArray[np.int64]

    def __post_init__(self) -> None:
        assert self.rows.shape == (len(self), 2, STATE) and len(self.step) == len(self) + 1
        for array in (self.timesteps, self.c_in, self.rows, self.noising, self.draws_noise, self.step):
            array.setflags(write=False)

    def __len__(self) -> int:
        return len(self.timesteps)


@lru_cache(maxsize=256)  # requests use the same few schedules
def loop_schedule(schedule: SamplerSchedule, forecast: Forecast = "off", breaks: tuple[int, ...] = ()) -> LoopSchedule:
    """Return the evaluations of a sampler's steps. `breaks`: see `model.denoising.forecast.evaluated_steps`."""
    steps = schedule.steps
    evaluated = [*range(steps)] if forecast == "off" else evaluated_steps(LEVELS[forecast], steps, breaks)
    rows = np.zeros((len(evaluated), 2, STATE))
    for number, (start, end) in enumerate(pairwise([*evaluated, steps])):
        kept = range(max(0, number + 1 - KEPT), number + 1)
        since = max((one for one in breaks if one <= start), default=0)
        row_x, row_previous = np.eye(STATE)[[X, PREVIOUS]]
        for step in range(start, end):
            _, a, b, x, denoised, previous, noise = schedule.coefficients[step]
            assert step == start or not schedule.draws_noise[step]
            prediction = np.zeros_like(row_x)
            if step == start:
                prediction[FIRST_KEPT + number % KEPT] = 1
            else:
                weights = forecast_weights([evaluated[one] for one in kept], step, steps, since)
                prediction[[FIRST_KEPT + one % KEPT for one in kept]] = weights
            estimate = a * row_x + b * prediction
            row_x = x * row_x + denoised * estimate + previous * row_previous
            row_x[NOISE] += noise
            row_previous = estimate
        rows[number] = row_x, row_previous
    chosen = np.array(evaluated, np.int64)
    c_in = schedule.coefficients[chosen, COEFFICIENTS.index("c_in")]
    ends = np.append(chosen, steps)
    noising, draws_noise = schedule.noising[chosen], schedule.draws_noise[chosen]
    return LoopSchedule(schedule.timesteps[chosen], c_in, rows, noising, draws_noise, ends)


def forecast_weights(kept: Sequence[int], step: int, steps: int, since: int = 0) -> Floats:
    """Return the weights of the predictions at the steps `kept`, ascending, which forecast that at `step` of `steps`.

    A forecast is the mean of a polynomial through the kept predictions and of the line through the last two. This is
    Spectrum's (arXiv 2603.01623) for guided predictions, as in stable-diffusion.cpp, but exact for a constant. The
    weights are 0 for predictions before `since`, the last break. At least two are kept since then.
    """
    at = np.array([one for one in kept if one >= since], np.float64)
    basis = np.polynomial.chebyshev.chebvander(2 * at / steps - 1, DEGREE)
    [here] = np.polynomial.chebyshev.chebvander(2 * step / steps - 1, DEGREE)
    penalty = RIDGE * np.diag(np.arange(DEGREE + 1) > 0)
    fitted = np.linalg.solve(basis.T @ basis + penalty, basis.T).T @ here
    ahead = (step - at[-1]) / (at[-1] - at[-2])
    line = np.zeros(len(at))
    line[-2:] = -ahead, 1 + ahead
    return np.append(np.zeros(len(kept) - len(at)), BLEND * fitted + (1 - BLEND) * line)


def device_rows(schedule: LoopSchedule, length: int) -> NDArray[np.float32]:
    """Return a schedule in the device's form, float32 [length, ROW_WIDTH].

    The last two numbers of an evaluation noise a known image as much as the next one expects, and not at all after the
    last one. A padded evaluation is the identity, for finite predictions and buffers. Raises RequestRefused for a
    schedule of more than `length`.
    """
    count = len(schedule)
    if count > length:
        raise RequestRefused("num_inference_steps", f"{count} is more than the {length} served.")
    padded = np.zeros(ROW_WIDTH, np.float32)
    padded[[0, 1 + X, 1 + STATE + X, -2]] = 1
    rows = np.tile(padded, (length, 1))
    rows[:count, 0] = schedule.c_in
    rows[:count, 1:-2] = schedule.rows.reshape(count, 2 * STATE)
    rows[: count - 1, -2:] = schedule.noising[1:]
    return rows
