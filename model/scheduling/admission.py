"""Decide how many images a loop admits at once.

Where two images take twice as long as one, admitting both delays the first and does not finish the second sooner. So an
image joins only if that saves seconds, together with those that wait behind it, or if its request is short. Once enough
wait to fill the loop, all are admitted: throughput then shortens the queue. All that this module uses of the device is
the duration of its steps.
"""

from collections.abc import Iterable
from typing import NamedTuple

MAX_TIME_RATIO = 0.9  # largest ratio of seconds, together to apart, that counts as an improvement


class Joining(NamedTuple):
    """The images that run and some of those that wait. Seconds of a step.

    together: of all of them. apart: of those that run, and of the others at the seconds per entry of steps that have as
    many entries as run now and are of their own kind.
    """

    together: float
    apart: float


def may_join(joining: Iterable[Joining], fills: bool) -> bool:
    """True if an image may join others that run.

    joining: with this image, with the next waiting one as well, and so on. fills: those that wait leave no room for
    another one.
    """
    return fills or any(one.together <= MAX_TIME_RATIO * one.apart for one in joining)


def shortens_mean_latency(steps: float, batch: int, images: int, running: int, steps_left: float) -> bool:
    """True if admitting a request now gives a lower mean completion time than waiting for a running image to finish.

    The request has `steps` steps and takes `batch` batch entries. `images` images run and take `running` entries. The
    first of them finishes after `steps_left` steps.

    Assumes that a step's time is proportional to its batch, and that all running images have as many steps left. A
    request that joins finishes after steps * (running + batch) and delays each other image by steps * batch. One that
    waits finishes after steps_left * running + steps * batch.
    """
    return steps * (running + images * batch) < steps_left * running
