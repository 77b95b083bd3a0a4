"""How many images join: what the two rules say at their edges."""

from collections.abc import Iterator

import pytest

from model.admission import efficient_images, fits, may_join

H200 = {1: 0.0308, 2: 0.059, 4: 0.115, 8: 0.227}  # seconds a step at 1024x1024


@pytest.mark.parametrize(
    "step_seconds, efficient",
    [
        (H200, 1),
        ({1: 0.10, 2: 0.17, 4: 0.34}, 2),
        ({1: 0.10, 2: 0.181}, 1),  # 9.5 % less an image
        ({1: 0.10, 2: 0.179}, 2),  # 10.5 %
        ({1: 0.10, 8: 0.10}, 8),
        ({4: 0.10}, 4),
    ],
)
def test_more_are_efficient_as_long_as_each_is_a_tenth_sooner_done(
    step_seconds: dict[int, float], efficient: int
) -> None:
    assert efficient_images(step_seconds.items()) == efficient


def test_nothing_is_measured_past_what_does_not_pay() -> None:
    measured = []

    def measure() -> Iterator[tuple[int, float]]:
        for images, seconds in H200.items():
            measured.append(images)
            yield images, seconds

    efficient_images(measure())
    assert measured == [1, 2]


@pytest.mark.parametrize(
    "under_way, waiting, needed, joins",
    [
        (0, 2, 2, True),
        (2, 2, 2, True),  # four rows run efficiently
        (4, 2, 2, False),
        (4, 10, 2, False),
        (4, 12, 2, True),  # sixteen are here, and sixteen fit
        (14, 2, 2, True),
        (12, 2, 2, False),  # a loop that was full runs empty where few are left
        (18, 2, 2, True),
        (3, 1, 1, True),
        (3, 2, 2, False),  # it would be five
        (3, 13, 2, True),
    ],
)
def test_few_join_until_as_many_are_here_as_fit(under_way: int, waiting: int, needed: int, joins: bool) -> None:
    assert may_join(under_way, waiting, needed, efficient=4, capacity=16) is joins


@pytest.mark.parametrize("taken, needed, fit", [(0, 2, True), (1, 1, True), (1, 2, False), (2, 1, False)])
def test_rows_are_filled_to_the_last_and_an_image_alone_always_fits(taken: int, needed: int, fit: bool) -> None:
    assert fits(taken, needed, most=2) is fit
    assert fits(taken, needed, most=1) is not taken
