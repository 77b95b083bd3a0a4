"""The number of images that is efficient at once, and when images may join: the rules at their edges."""

import pytest

from model.scheduling.admission import efficient_images, may_join, shortens_mean_latency

H200 = {1: 0.0308, 2: 0.059, 4: 0.115, 8: 0.227}  # images -> seconds a step, at 1024x1024


def test_larger_batch_must_save_ten_percent_per_image() -> None:
    for step_seconds, efficient in (
        (H200, 1),
        ({1: 0.10, 2: 0.17, 4: 0.34}, 2),
        ({1: 0.10, 2: 0.181}, 1),  # 9.5 % less per image
        ({1: 0.10, 2: 0.179}, 2),  # 10.5 %
        ({1: 0.0265, 4: 0.0951}, 1),  # 10.3 % less per image for four; two take as long as four
        ({1: 0.0265, 4: 0.0470}, 4),  # two are efficient in the engine of four, too
        ({2: 0.10, 4: 0.17, 16: 0.33}, 4),
    ):
        assert efficient_images(step_seconds.items()) == efficient, step_seconds


def test_few_images_join_until_enough_wait_to_fill_the_loop() -> None:
    for running, waiting, needed, joins in (
        (0, 2, 2, True),
        (2, 2, 2, True),  # 4 entries are efficient
        (4, 10, 2, False),
        (4, 12, 2, True),  # 4 + 12 fill the capacity of 16
        (14, 2, 2, True),
        (18, 2, 2, True),
        (3, 1, 1, True),
        (3, 2, 2, False),  # 5 are not efficient
    ):
        assert may_join(running, waiting, needed, efficient=4, capacity=16) is joins, (running, waiting, needed)


@pytest.mark.parametrize("images, entries, steps_left, batch", [(1, 2, 10, 1), (2, 2, 12, 4), (7, 1, 9, 2)])
def test_mean_latency_rule_agrees_with_a_simulation(images: int, entries: int, steps_left: int, batch: int) -> None:
    """`images` run, of `entries` batch entries and `steps_left` steps each. A step takes one second per entry."""

    def total_completion_time(joins_after: int, steps: int) -> int:
        """Sum of the times at which all images finish, if the new one joins after `joins_after` steps."""
        now = total = 0
        last = joins_after + steps
        for step in range(steps_left + steps):
            now += images * entries * (step < steps_left) + batch * (joins_after <= step < last)
            total += now * (images * (step + 1 == steps_left) + (step + 1 == last))
        return total

    for steps in range(1, steps_left + 1):
        joins_now, waits = total_completion_time(0, steps), total_completion_time(steps_left, steps)
        assert shortens_mean_latency(steps, batch, images, images * entries, steps_left) is (joins_now < waits)
