"""How many images join: what the two rules say at their edges."""

from collections.abc import Iterator

import pytest

from model.admission import efficient_images, may_join

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
    "under_way, waiting, joins",
    [
        (0, 1, True),
        (1, 1, True),  # two run efficiently
        (2, 1, False),
        (2, 5, False),
        (2, 6, True),  # eight are here, and eight fit
        (7, 1, True),
        (6, 1, False),  # a loop that was full runs empty where few are left
        (9, 1, True),
    ],
)
def test_few_join_until_as_many_are_here_as_fit(under_way: int, waiting: int, joins: bool) -> None:
    assert may_join(under_way, waiting, efficient=2, capacity=8) is joins
