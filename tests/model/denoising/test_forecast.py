"""Schedules with forecasts: which steps are evaluated, and that an evaluation is the steps of a sampler one by one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.denoising.forecast import LEVELS, evaluated_steps
from model.denoising.loop_schedule import KEPT, NOISE, PREVIOUS, STATE, X, device_rows, forecast_weights, loop_schedule
from model.denoising.noise_schedule import NoiseSchedule
from model.denoising.sampler_specs import SPECS
from model.denoising.samplers import SamplerSchedule, sampler_schedule, skip_steps, split_schedule
from model.denoising.step import advance
from model.validation import Forecast

SHAPE = (1, 4, 3, 5)
NOISE_SCHEDULE = NoiseSchedule(
    num_train_timesteps=1000, beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear",
    prediction_type="epsilon", timestep_spacing="leading", steps_offset=1, set_alpha_to_one=False,
)  # fmt: skip
OFFERED = [(name, level) for name, spec in SPECS.items() for level in spec.forecasts]


@pytest.mark.parametrize(
    ("level", "counts"),
    [
        ("fast", {6: 6, 7: 6, 8: 7, 20: 12, 30: 16, 50: 22}),
        ("quality", {6: 6, 8: 7, 20: 15, 30: 21, 50: 33}),
    ],
)
def test_number_of_evaluations(level: str, counts: dict[int, int]) -> None:
    assert {steps: len(evaluated_steps(LEVELS[level], steps)) for steps in counts} == counts


def test_a_break_and_the_next_step_are_evaluated() -> None:
    plain, broken = (evaluated_steps(LEVELS["fast"], 30, breaks) for breaks in ((), (16,)))
    assert not {16, 17} <= set(plain) and {16, 17} <= set(broken)


@pytest.mark.parametrize("kept", [[0, 1], [3, 4, 6, 8, 10, 12]])
def test_a_constant_is_forecast_exactly(kept: list[int]) -> None:
    assert forecast_weights(kept, kept[-1] + 2, 30).sum() == pytest.approx(1)


def test_predictions_before_a_break_do_not_count() -> None:
    weights = forecast_weights([8, 10, 12, 16, 17], 18, 30, since=16)
    assert not weights[:3].any() and weights.sum() == pytest.approx(1)


def test_a_smooth_prediction_is_forecast_better_than_it_is_repeated() -> None:
    kept, values = [4, 6, 8, 10, 12], np.cos(np.linspace(0, 1, 30))
    assert abs(forecast_weights(kept, 13, 30) @ values[kept] - values[13]) < 0.5 * abs(values[12] - values[13])


def network(x: torch.Tensor, step: int) -> torch.Tensor:
    """A nonlinear function of each number."""
    return 0.9 * torch.tanh(1.3 * x + 0.1 * step) + 0.1 * x


def step_by_step(
    schedule: SamplerSchedule, level: str, breaks: tuple[int, ...], x: torch.Tensor, noise: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the latents and the last estimate of a plain loop over the sampler's steps, in float64."""
    evaluated = evaluated_steps(LEVELS[level], schedule.steps, breaks)
    previous, kept = torch.zeros_like(x), dict[int, torch.Tensor]()
    for step, (c_in, a, b, of_x, of_denoised, of_previous, of_noise) in enumerate(schedule.coefficients):
        if step in evaluated:
            kept = dict([*kept.items()][-(KEPT - 1) :]) | {step: network(c_in * x, step)}
            prediction = kept[step]
        else:
            since = max((one for one in breaks if one <= step), default=0)
            weights = forecast_weights([*kept], step, schedule.steps, since)
            prediction = sum(w * value for w, value in zip(weights, kept.values(), strict=True))  # type: ignore
        denoised = a * x + b * prediction
        x = of_x * x + of_denoised * denoised + of_previous * previous + of_noise * noise[step]
        previous = denoised
    return x, previous


@settings(max_examples=60, deadline=None)
@given(
    sampler=st.sampled_from(sorted({name for name, _ in OFFERED})),
    level=st.sampled_from(["quality", "fast"]),
    steps=st.integers(8, 40),
    skipped=st.integers(0, 6),
    breaks=st.sets(st.integers(1, 40), max_size=2),
    refiner=st.booleans(),
)
def test_evaluations_are_the_sampler_s_steps_one_by_one(
    sampler: str, level: Forecast, steps: int, skipped: int, breaks: set[int], refiner: bool
) -> None:
    schedule = skip_steps(sampler_schedule(sampler, steps, NOISE_SCHEDULE), skipped)
    if refiner:
        schedule = split_schedule(schedule, NOISE_SCHEDULE, 0.4)[1]
    at = tuple(sorted(one for one in breaks if one < schedule.steps))
    generator = torch.Generator().manual_seed(0)
    x, *noise = torch.randn((1 + schedule.steps, *SHAPE), generator=generator, dtype=torch.float64)
    expected = step_by_step(schedule, level, at, x, noise)

    evaluations = loop_schedule(schedule, level, at)
    rows = torch.from_numpy(device_rows(evaluations, len(evaluations) + 1)).double()
    state = torch.zeros((1, STATE, *SHAPE[1:]), dtype=torch.float64)
    state[:, X] = x
    for number, row in enumerate(rows):
        step = evaluations.step[number]
        if number < len(evaluations):
            state[:, NOISE] = noise[step]
        advance(state, network(row[0] * state[:, X], step), torch.tensor([number % KEPT]), row[1:-2].view(1, 2, STATE))
        if number == len(evaluations) - 1:
            torch.testing.assert_close(state[:, PREVIOUS], expected[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state[:, X], expected[0], rtol=1e-4, atol=1e-4)


def test_schedules_are_made_once() -> None:
    schedule = sampler_schedule("Euler", 30, NOISE_SCHEDULE)
    assert loop_schedule(schedule, "fast") is loop_schedule(schedule, "fast")
    assert loop_schedule(replace(schedule), "fast") is not loop_schedule(schedule, "fast")
    assert skip_steps(schedule, 3) is skip_steps(schedule, 3)
