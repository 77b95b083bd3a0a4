"""The estimate of a build's remaining time: plausible before the first engine, corrected by finished ones."""

import pytest

from engine_builder.backends.aot_inductor.remaining_time import RemainingTime, expected_seconds
from model.pipeline.spec import COMPONENTS


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def remaining(clock: Clock) -> RemainingTime:
    estimate = RemainingTime(clock)
    estimate.plan({"unet": 60.0, "vae": 30.0, "text": 30.0}, 2)
    return estimate


def test_divides_the_work_among_processes(remaining: RemainingTime) -> None:
    assert remaining.seconds() == 60.0
    for key in ("unet", "vae"):
        remaining.mark_started(key)
    assert remaining.seconds() == 60.0


def test_counts_down_while_engines_compile(remaining: RemainingTime, clock: Clock) -> None:
    for key in ("unet", "vae"):
        remaining.mark_started(key)
    clock.now = 10
    assert remaining.seconds() == 50.0


def test_a_slow_machine_raises_the_estimate(remaining: RemainingTime, clock: Clock) -> None:
    for key in ("unet", "vae"):
        remaining.mark_started(key)
    clock.now = 60  # twice as long as expected
    remaining.mark_finished("vae")
    remaining.mark_started("text")
    assert 30 < remaining.seconds() < 60  # the 30 s of the text encoder, times a factor between one and two


def test_a_late_engine_is_not_finished(remaining: RemainingTime, clock: Clock) -> None:
    remaining.mark_started("unet")
    clock.now = 1000
    assert remaining.seconds() > 0


def test_nothing_remains_without_engines(remaining: RemainingTime, clock: Clock) -> None:
    assert RemainingTime(clock).seconds() == 0
    for key in ("unet", "vae", "text"):
        remaining.mark_started(key)
        clock.now += 30
        remaining.mark_finished(key)
    assert remaining.seconds() == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("component", COMPONENTS)
def test_the_unet_is_expected_to_take_longest(component: str, device: str) -> None:
    assert 0 < expected_seconds(component, device) <= expected_seconds("unet", device)
