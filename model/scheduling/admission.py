"""Decide how many images a loop admits at once, counted in batch entries of the UNet: two for a guided image, else one.

Where two images take twice as long as one, admitting both delays the first and does not finish the second sooner. So
few are admitted while few wait, unless they are short. Once enough wait to fill the largest batch, all are admitted:
throughput then shortens the queue. Knows nothing of the device except the duration of its steps.
"""

import math
from collections.abc import Iterable

MIN_SPEEDUP = 0.9  # a larger batch must lower the seconds per image to this share of what they were


def efficient_images(step_seconds: Iterable[tuple[int, float]]) -> int:
    """The largest number of images at once that still improves throughput.

    `step_seconds`: (images, seconds of their step, which fewer images take too), the fewest images first, at least one
    entry. It is read until an entry lowers the seconds per image by less than 10 %. An entry with more than twice the
    images must pay for twice as many: where no engine exists in between, those would take the larger one's time.
    """
    efficient, each = 0, math.inf
    for images, seconds in step_seconds:
        if efficient and seconds / min(images, 2 * efficient) > MIN_SPEEDUP * each:
            break
        efficient, each = images, seconds / images
    return efficient


def may_join(running: int, waiting: int, needed: int, efficient: int, capacity: int) -> bool:
    """True if an image that needs `needed` of the `waiting` batch entries may join a loop that has room for it.

    `running`: batch entries of the images of its size in the base's loop or already passed on to the refiner's.
    """
    return not running or running + needed <= efficient or running + waiting >= capacity


def shortens_mean_latency(steps: float, batch: int, images: int, running: int, left: float) -> bool:
    """True if admitting a request of so many `steps` and `batch` entries now gives a lower mean completion time than
    waiting for one of the `images` that run with `running` entries. `left`: steps until the first of them finishes.

    Assumes that a step's time is proportional to its batch, and that all running images have as many steps left. A
    request that joins finishes after steps * (running + batch) and delays each other image by steps * batch. One that
    waits finishes after left * running + steps * batch.
    """
    return steps * (running + images * batch) < left * running
