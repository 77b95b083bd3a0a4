"""The estimate of a build's remaining time: plausible before the first engine, corrected by finished ones."""

from engine_builder.backends.aot_inductor.remaining_time import RemainingTime, expected_seconds
from model.pipeline.components import COMPONENTS


def test_counts_down_and_learns_from_finished_engines() -> None:
    now = 0.0
    remaining = RemainingTime(lambda: now)
    assert remaining.seconds() == 0
    remaining.plan({"unet": 60.0, "vae": 30.0, "text": 30.0}, 2)
    assert remaining.seconds() == 60, "the work is divided among processes"
    for key in ("unet", "vae"):
        remaining.mark_started(key)
    now = 10
    assert remaining.seconds() == 50
    now = 60  # twice as long as expected
    remaining.mark_finished("vae")
    remaining.mark_started("text")
    assert 30 < remaining.seconds() < 60  # the 30 s of the text encoder, times a factor between one and two
    now = 1000
    assert remaining.seconds() > 0, "late engines are not finished"
    for key in ("unet", "text"):
        remaining.mark_finished(key)
    assert remaining.seconds() == 0


def test_the_unet_is_expected_to_take_longest() -> None:
    for device in ("cpu", "cuda"):
        assert all(0 < expected_seconds(name, device) <= expected_seconds("unet", device) for name in COMPONENTS)
