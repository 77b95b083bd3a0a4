"""The order in which images join the denoising loops, and how many of them run at once."""

import itertools
from typing import Any

import numpy as np
import pytest

from model.denoising.cover import Kind, Option, StepCosts
from model.denoising.eager_loop import EagerLoop
from model.errors import Overloaded
from model.pipeline import spec
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import GenerationParams
from model.pipeline.request_plan import RequestPlan
from model.scheduling.admission import Joining, joinings, may_join, shortens_mean_latency
from model.scheduling.scheduler import Scheduler
from model.settings import Limits
from tests.support.scheduling import HEIGHT, WIDTHS, Gate, params, paused, results
from tests.support.waiting import eventually


def test_new_request_joins_after_one_step(gate: Gate, scheduler: Scheduler) -> None:
    first = scheduler.submit(params(1))
    gate.run(1)
    second = scheduler.submit(params(2))
    gate.open()
    results(first, second)
    first_joint_step = [2 in seeds for seeds in gate.seeds].index(True)
    assert first_joint_step <= 2  # the second request misses the running step, and perhaps one that begins meanwhile
    assert gate.seeds[first_joint_step] == [1, 2]


def test_images_of_a_request_join_singly_in_order_of_arrival(gate: Gate, scheduler: Scheduler) -> None:
    jobs = [scheduler.submit(params(0)), scheduler.submit(params(10, num_images=3)), scheduler.submit(params(20))]
    gate.open()
    results(*jobs)
    assert gate.order == [0, 10, 11, 12, 20]
    assert max(len(seeds) for seeds in gate.seeds) == 2


def test_guided_and_unguided_images_fill_a_batch(gate: Gate, scheduler: Scheduler) -> None:
    scales = [1.0, 7.5, 1.0, 1.0]
    jobs = [scheduler.submit(params(seed, guidance_scale=scale)) for seed, scale in enumerate(scales)]
    gate.run(1)
    gate.open()
    results(*jobs)
    assert gate.seeds[1] == [0, 1, 2]  # four batch entries; the fourth image waits until the first is done
    assert gate.seeds.count([0, 1, 2]) >= 3
    assert all(len(seeds) <= 3 for seeds in gate.seeds)


def test_smaller_request_does_not_overtake(gate: Gate, scheduler: Scheduler) -> None:
    """The guidance of the first image ends after two steps, which frees one entry. The next in the queue needs two."""
    gate.limit_batch(capacity=3, efficient=3)
    with paused(scheduler):
        jobs = [scheduler.submit(params(0, guidance_end=0.5)), scheduler.submit(params(1))]
        jobs.append(scheduler.submit(params(2, guidance_scale=1.0)))
    gate.open()
    results(*jobs)
    assert gate.seeds == [[0], [0], [0, 1], [0, 1], [1, 2], [1, 2], [2], [2]]


@pytest.mark.parametrize(
    "changes, joins",
    [
        ({"num_inference_steps": 5}, True),
        ({"num_inference_steps": 6}, False),
        ({"num_inference_steps": 7, "guidance_scale": 1.0}, True),
        ({"num_inference_steps": 8, "guidance_scale": 1.0}, False),
        ({"num_inference_steps": 3, "num_images": 2}, True),
        ({"num_inference_steps": 4, "num_images": 2}, False),
    ],
)
def test_short_request_joins_beyond_the_efficient_number(
    changes: dict[str, Any], joins: bool, gate: Gate, scheduler: Scheduler
) -> None:
    gate.limit_batch(capacity=16, efficient=2)
    with paused(scheduler):
        jobs = [scheduler.submit(params(0, num_inference_steps=12)), scheduler.submit(params(10, **changes))]
    gate.open()
    results(*jobs)
    joint = [seeds for seeds in gate.seeds if {0, 10} <= set(seeds)]
    assert len(joint) == joins * changes["num_inference_steps"]


def test_all_join_once_enough_wait_to_fill_the_batch(gate: Gate, scheduler: Scheduler) -> None:
    gate.limit_batch(capacity=8, efficient=2)
    jobs = [scheduler.submit(params(seed)) for seed in range(3)]
    gate.run(1)
    jobs.append(scheduler.submit(params(3, num_images=2)))  # five images; the second step may have begun
    gate.run(1)
    gate.open()
    results(*jobs)
    full = gate.seeds.index([0, 1, 2, 3])
    assert gate.seeds[:full] in ([[0]], [[0], [0]])
    assert gate.seeds[4] == [1, 2, 3, 4]  # the first image is done, and the fifth takes its entries
    assert gate.seeds[-1] == [4] and len(gate.seeds) == 8  # the fifth did not wait for the other three


def test_waiting_images_do_not_fill_the_batch_if_that_saves_nothing(gate: Gate, scheduler: Scheduler) -> None:
    gate.limit_batch(capacity=8, efficient=2, power=1)
    with paused(scheduler):
        jobs = [scheduler.submit(params(seed)) for seed in range(6)]
    gate.open()
    results(*jobs)
    assert all(len(seeds) == 1 for seeds in gate.seeds) and gate.order == [*range(6)]


def test_images_in_the_refiner_count_as_running(gate: Gate, scheduler: Scheduler) -> None:
    gate.limit_batch(capacity=8, efficient=2)
    jobs = [scheduler.submit(params(seed, use_refiner=True)) for seed in (0, 1)]
    gate.open()
    results(*jobs)
    unets = (spec.UNET, spec.UNET, spec.REFINER_UNET, spec.REFINER_UNET)
    assert [(step.unet, step.seeds) for step in gate.steps] == [(unet, [seed]) for seed in (0, 1) for unet in unets]


@pytest.mark.parametrize("waiting", [1, 2, 5])
def test_none_joins_while_more_images_run_than_a_loop_holds(gate: Gate, scheduler: Scheduler, waiting: int) -> None:
    """Two images in the refiner and one in the base fill more than one loop. Others that wait change nothing."""
    gate.limit_batch(capacity=4, efficient=4)
    refined = scheduler.submit(params(1, num_images=3, use_refiner=True, denoising_frac=0.3, num_inference_steps=40))
    gate.run(14)
    late = [scheduler.submit(params(10 + number, num_inference_steps=60)) for number in range(waiting)]
    gate.run(4)
    assert {seed for step in gate.steps for seed in step.seeds} == {1, 2, 3}
    gate.open()
    results(refined, *late)


def test_an_image_whose_entries_share_no_call_with_those_that_run_waits(
    gate: Gate, scheduler: Scheduler, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together they take as long as apart. That its entries take less time each is no gain."""
    gate.limit_batch(capacity=8, efficient=1)
    loop = model.loop(spec.UNET, HEIGHT, WIDTHS[1])
    seconds = {True: 0.026, False: 0.014}
    options = [Option(1 - exact, frozenset(), exact, False, 1) for exact in seconds]
    monkeypatch.setattr(loop, "costs", StepCosts(options))
    loop.costs.replace({one: seconds[one.exact] for one in options})
    monkeypatch.setattr(loop, "kind", lambda needs: Kind(frozenset(), exact=needs.guided))
    with paused(scheduler):
        jobs = [scheduler.submit(params(0)), scheduler.submit(params(1, guidance_scale=1.0))]
    gate.open()
    results(*jobs)
    assert [0, 1] not in gate.seeds


def test_an_image_that_starts_in_the_refiner_ignores_what_others_need_of_the_base(
    gate: Gate, scheduler: Scheduler, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.limit_batch(capacity=8, efficient=1)
    base = model.loop(spec.UNET, HEIGHT, WIDTHS[1])
    assert isinstance(base, EagerLoop)
    monkeypatch.setitem(vars(base._denoiser), "kind", lambda needs: Kind(frozenset(), paired=needs.guided))
    plan_request = scheduler.runners[0].plan

    def plan(asked: GenerationParams) -> RequestPlan:
        plan = plan_request(asked)
        if asked.seed == 0:
            first = plan.first.step_plan
            vars(first).update(needs=(frozenset({"lora"}),) * first.steps)
        return plan

    monkeypatch.setattr(scheduler.runners[0], "plan", plan)
    levels = np.zeros((HEIGHT, WIDTHS[1], 3), np.uint8)
    refined = params(1, use_refiner=True, image=levels, strength=0.25, num_inference_steps=12, denoising_frac=0.5)
    with paused(scheduler):
        jobs = [scheduler.submit(params(0, num_inference_steps=3)), scheduler.submit(refined)]
    gate.open()
    results(*jobs)


def test_sizes_alternate_step_by_step(gate: Gate, scheduler: Scheduler) -> None:
    jobs = [scheduler.submit(params(seed, width=width)) for seed, width in enumerate((64, 64, 96, 96, 64))]
    gate.open()
    results(*jobs)
    widths = [step.width for step in gate.steps]
    last = {width: len(widths) - 1 - widths[::-1].index(width) for width in (64, 96)}
    both = widths[widths.index(96) : min(last.values()) + 1]
    assert len(both) >= 7 and all(one != next_one for one, next_one in itertools.pairwise(both))


def test_images_ahead_do_not_include_running_images(gate: Gate, scheduler: Scheduler) -> None:
    with paused(scheduler):
        jobs = [scheduler.submit(params(seed)) for seed in range(4)]  # two run, two wait
    gate.run(1)
    eventually(lambda: [job.images_ahead for job in jobs] == [0, 0, 0, 1], "positions after the first step")
    small = scheduler.submit(params(4, width=64))
    gate.run(1)
    eventually(lambda: small.joined_count == 1, "the image of another size joins")
    assert (small.images_ahead, jobs[3].images_ahead) == (0, 1)


@pytest.mark.parametrize("limits", [Limits(max_queue=64, sizes_at_once=1)])
def test_later_requests_do_not_overtake_a_waiting_size(gate: Gate, scheduler: Scheduler) -> None:
    jobs = [scheduler.submit(params(0))]
    eventually(lambda: jobs[0].joined_count == 1, "the first image joins")
    jobs.append(scheduler.submit(params(1, width=64)))
    jobs += [scheduler.submit(params(seed)) for seed in range(2, 6)]
    gate.open()
    results(*jobs)
    assert gate.order == [0, 1, 2, 3, 4, 5]


def test_refuses_images_that_exceed_the_queue(gate: Gate, scheduler: Scheduler) -> None:
    with paused(scheduler):
        jobs = [scheduler.submit(params(seed)) for seed in (1, 2)]
    gate.run(1)  # both have left the queue
    jobs.append(scheduler.submit(params(3, num_images=8)))
    with pytest.raises(Overloaded, match="8 images are waiting, and this server queues 8") as refused:
        scheduler.submit(params(4))
    assert 1 <= refused.value.retry_after <= 60
    gate.open()
    results(*jobs)
    results(scheduler.submit(params(4, num_images=8)))  # all places in the queue are free again


H200 = {1: 0.0308, 2: 0.059, 4: 0.115, 8: 0.227}  # images -> seconds a step, at 1024x1024


@pytest.mark.parametrize(
    ("step_seconds", "running", "waiting", "joins"),
    [
        (H200, 1, 1, False),
        (H200, 1, 6, False),
        (H200, 1, 7, True),  # they fill the loop, and save 8 %
        (H200, 4, 4, True),
        (H200, 7, 1, False),  # interpolated, 1 % less per image
        ({1: 0.02, 8: 0.16}, 1, 20, False),
        ({1: 0.02, 8: 0.169}, 1, 20, False),
        ({1: 0.02, 4: 0.078, 8: 0.17}, 1, 20, True),  # the first four save 2.5 %
        ({1: 0.02, 4: 0.078, 8: 0.17}, 4, 20, False),
        ({1: 0.10, 2: 0.17, 4: 0.34}, 1, 1, True),
        ({1: 0.10, 2: 0.17, 4: 0.34}, 2, 1, False),
        ({1: 0.10, 2: 0.17, 4: 0.34}, 2, 2, False),  # they fill the loop, and save nothing
        ({1: 0.10, 2: 0.181, 3: 0.3, 4: 1}, 1, 1, False),  # 9.5 % less per image
        ({1: 0.10, 2: 0.179, 3: 0.3, 4: 1}, 1, 1, True),  # 10.5 %
        ({1: 0.1, 2: 0.2, 3: 0.21, 4: 1}, 1, 1, False),
        ({1: 0.1, 2: 0.2, 3: 0.21, 4: 1}, 1, 2, True),  # the next one makes both worth their time
    ],
)
def test_more_entries_must_save_ten_percent_of_each(
    step_seconds: dict[int, float], running: int, waiting: int, joins: bool
) -> None:
    capacity = max(step_seconds)
    seconds = np.interp(range(capacity + 1), [*step_seconds], [*step_seconds.values()])
    joining = [
        Joining(float(seconds[count]), float(count * seconds[running] / running))
        for count in range(running + 1, min(running + waiting, capacity) + 1)
    ]
    assert may_join(joining, running + waiting >= capacity) is joins


def test_joinings_compare_with_steps_of_the_own_kind() -> None:
    control = frozenset({"control"})
    plain = {Option(0, frozenset(), True, False, batch): cost for batch, cost in ((1, 0.10), (2, 0.18), (4, 0.30))}
    with_control = {Option(1, control, True, False, batch): cost for batch, cost in ((1, 0.20), (2, 0.32), (4, 0.40))}
    costs = StepCosts([*plain, *with_control])
    costs.replace(plain | with_control)
    found = [*joinings(costs, [(Kind(frozenset()), 2)], [(Kind(frozenset()), 1), (Kind(control), 1)])]
    assert found == [
        pytest.approx((0.28, 0.18 + 0.09)),  # calls of 2 and 1 take 0.28 s, one of 4 takes 0.30 s
        pytest.approx((0.40, 0.18 + 0.09 + 0.16)),  # all in one call of 4 with ControlNets
    ]


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
