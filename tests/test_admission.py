"""How many images join: what the two rules say at their edges."""

from collections.abc import Iterator

import pytest

from model.scheduling.admission import efficient_images, may_join, shortens_mean_latency

H200 = {1: 0.0308, 2: 0.059, 4: 0.115, 8: 0.227}  # seconds a step at 1024x1024


@pytest.mark.parametrize(
    "step_seconds, efficient",
    [
        (H200, 1),
        ({1: 0.10, 2: 0.17, 4: 0.34}, 2),
        ({1: 0.10, 2: 0.181}, 1),  # 9.5 % less an image
        ({1: 0.10, 2: 0.179}, 2),  # 10.5 %
        ({1: 0.10, 8: 0.10}, 8),
        ({1: 0.0265, 4: 0.0951}, 1),  # an H200 by branches: four cost 10.3 % less an image, but two as much as four
        ({1: 0.0265, 4: 0.0470}, 4),  # where two pay, too
        ({2: 0.10, 4: 0.17, 16: 0.33}, 4),
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


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("images, each, left", [(1, 2, 10), (1, 1, 9), (2, 2, 12), (4, 1, 7), (7, 2, 20)])
def test_who_is_brief_saves_more_than_it_costs(images: int, each: int, left: int, rows: int) -> None:
    """Counted out, a step taking as long as it has rows: `images` of `each` rows, with `left` steps to go."""

    def ends(joins_after: int, steps: int) -> int:
        """The moments at which they are done, added up."""
        now = together = 0
        for step in range(left + steps):
            now += images * each * (step < left) + rows * (joins_after <= step < joins_after + steps)
            together += now * (images * (step + 1 == left) + (step + 1 == joins_after + steps))
        return together

    for steps in range(1, left + 1):
        assert shortens_mean_latency(steps, rows, images, images * each, left) is (ends(0, steps) < ends(left, steps))
