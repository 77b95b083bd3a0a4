"""Decide how many images a loop admits at once.

Where two images take twice as long as one, admitting both delays the first and does not finish the second sooner. So an
image joins only if that saves a tenth of the seconds, together with the images behind it, or if its request is
short. Once enough wait to fill the loop, a hundredth is enough: throughput then shortens the queue. All that this
module uses of the device is the duration of its steps.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from model.denoising.cover import Kind, StepCosts, count_entries

MAX_TIME_RATIO = 0.9  # largest ratio of seconds, together to apart, that counts as an improvement
MAX_FULL_TIME_RATIO = 0.99  # once enough wait to fill the loop
Entries = tuple[Kind, int]
"""What an image needs of a step, and its batch entries."""


class Joining(NamedTuple):
    """The images that run and some of those that wait. Seconds of a step.

    together: of all of them. apart: of the images that run, and of the others at the seconds per entry of steps that
    have as many entries as run now and are of their own kind.
    """

    together: float
    apart: float


def joinings(costs: StepCosts, now: Sequence[Entries], waiting: Sequence[Entries]) -> Iterator[Joining]:
    """Yield the images `now`, which run, with the first of those that wait, with the first two, and so on."""
    running = sum(count for _, count in now)
    apart = costs.seconds(count_entries(now))
    for number, (kind, count) in enumerate(waiting, 1):
        as_many = running + (kind.paired and running % 2)
        apart += count * costs.seconds(((kind, as_many),)) / as_many
        yield Joining(costs.seconds(count_entries([*now, *waiting[:number]])), apart)


def may_join(joining: Iterable[Joining], fills: bool) -> bool:
    """True if an image may join others that run.

    joining: with this image, with the next waiting one as well, and so on. fills: those that wait leave no room for
    another one.
    """
    ratio = MAX_FULL_TIME_RATIO if fills else MAX_TIME_RATIO
    return any(one.together <= ratio * one.apart for one in joining)


def shortens_mean_latency(steps: float, batch: int, images: int, running: int, steps_left: float) -> bool:
    """True if admitting a request now gives a lower mean completion time than waiting for a running image to finish.

    The request has `steps` steps and takes `batch` batch entries. `images` images run and take `running` entries. The
    first of them finishes after `steps_left` steps.

    Assumes that a step's time is proportional to its batch, and that all running images have as many steps left. A
    request that joins finishes after steps * (running + batch) and delays each other image by steps * batch. One that
    waits finishes after steps_left * running + steps * batch.
    """
    return steps * (running + images * batch) < steps_left * running
