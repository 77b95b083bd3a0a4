"""Decide how many images a loop admits at once, counted in batch entries of the UNet: two for a guided image, else one.

Where two images take twice as long as one, admitting both delays the first and does not finish the second sooner. So
while few images wait, few are admitted, except those of short requests. Once enough wait to fill the largest batch, all
are admitted: throughput then shortens the queue. All that this module uses of the device is the duration of its steps.
"""

import math
from collections.abc import Iterable

MAX_TIME_RATIO = 0.9  # largest ratio of seconds per image, larger batch to smaller, that counts as an improvement


def efficient_images(step_seconds: Iterable[tuple[int, float]]) -> int:
    """Return the largest number of images at once that still improves throughput.

    `step_seconds`: pairs of images and the seconds of a step of as many, the fewest images first, at least one pair. It
    is read until a pair lowers the seconds per image by less than 10 %. A pair with more than twice the images of the
    pair before counts as twice as many. No engine exists in between, so twice as many images take its time too.
    """
    efficient, seconds_per_image = 0, math.inf
    for images, seconds in step_seconds:
        if efficient and seconds / min(images, 2 * efficient) > MAX_TIME_RATIO * seconds_per_image:
            break
        efficient, seconds_per_image = images, seconds / images
    return efficient


def may_join(running: int, waiting: int, needed: int, efficient: int, capacity: int) -> bool:
    """True if an image may join a loop that has room for it.

    All are counted in batch entries. `needed`: those of the image. `waiting`: those of all waiting images of its size,
    this one included. `running`: those of the images of its size in the base's loop or passed on to the refiner's.
    """
    return not running or running + needed <= efficient or running + waiting >= capacity


def shortens_mean_latency(steps: float, batch: int, images: int, running: int, steps_left: float) -> bool:
    """True if admitting a request now gives a lower mean completion time than waiting for a running image to finish.

    The request has `steps` steps and takes `batch` batch entries. `images` images run and take `running` entries. The
    first of them finishes after `steps_left` steps.

    Assumes that a step's time is proportional to its batch, and that all running images have as many steps left. A
    request that joins finishes after steps * (running + batch) and delays each other image by steps * batch. One that
    waits finishes after steps_left * running + steps * batch.
    """
    return steps * (running + images * batch) < steps_left * running
