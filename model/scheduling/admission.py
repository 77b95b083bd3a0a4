"""Decide how many images a loop admits at once.

Where two images take twice as long as one, admitting both delays the first and does not finish the second sooner. So an
image joins only if it leads to fewer seconds per batch entry, together with those that wait behind it, or if its
request is short. Once enough wait to fill the loop, all are admitted: throughput then shortens the queue. All that this
module uses of the device is the duration of its steps.
"""

from collections.abc import Iterable
from typing import NamedTuple

MAX_TIME_RATIO = 0.9  # largest ratio of seconds per entry, more entries to fewer, that counts as an improvement


class Step(NamedTuple):
    """A step with its batch entries and its duration in seconds."""

    entries: int
    seconds: float


def may_join(now: Step, later: Iterable[Step], fills: bool) -> bool:
    """True if an image may join a loop that has room for it.

    now: of the images of its size that run, in the base's loop or passed on to the refiner's. later: with this image as
    well, with the next waiting one, and so on. fills: those that wait leave no room for another one.
    """
    if not now.entries or fills:
        return True
    most = MAX_TIME_RATIO * now.seconds / now.entries
    return any(step.seconds <= most * step.entries for step in later)


def shortens_mean_latency(steps: float, batch: int, images: int, running: int, steps_left: float) -> bool:
    """True if admitting a request now gives a lower mean completion time than waiting for a running image to finish.

    The request has `steps` steps and takes `batch` batch entries. `images` images run and take `running` entries. The
    first of them finishes after `steps_left` steps.

    Assumes that a step's time is proportional to its batch, and that all running images have as many steps left. A
    request that joins finishes after steps * (running + batch) and delays each other image by steps * batch. One that
    waits finishes after steps_left * running + steps * batch.
    """
    return steps * (running + images * batch) < steps_left * running
