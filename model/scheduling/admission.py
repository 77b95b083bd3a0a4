"""How many images a loop lets in at once, counted in the rows that they take: two while an image is guided, else one.
Knows of a device only how long its steps take.

Where two images take twice as long as one, both in the loop are done when the second would have been, and the first
waited for nothing. So few are let in while few are here, unless they are soon gone again; once there are as many as
fit, all of them: throughput is what shortens the queue then.
"""

import math
from collections.abc import Iterable

_PAYS = 0.9  # of the seconds an image took before: what they must fall to for more at once to pay


def efficient_images(step_seconds: Iterable[tuple[int, float]]) -> int:
    """The fewest images at once beyond which twice as many slow each other down and are hardly sooner done.

    `step_seconds`: (images, seconds of their step, which fewer take as well), the fewest images first, at least one
    entry. It is read until an entry does not lower the seconds per image by 10 %, also for twice as many as before
    where it is of more: where engines for those are missing, they would take a much larger one's time.
    """
    efficient, each = 0, math.inf
    for images, seconds in step_seconds:
        if efficient and seconds / min(images, 2 * efficient) > _PAYS * each:
            break
        efficient, each = images, seconds / images
    return efficient


def may_join(under_way: int, waiting: int, needed: int, efficient: int, capacity: int) -> bool:
    """Whether an image that takes `needed` of the rows that wait may join a loop that has room for it. All are rows.
    `under_way`: of the images of its size that are in the loop, or have gone on from it to the refiner's."""
    return fits(under_way, needed, efficient) or under_way + waiting >= capacity


def is_brief(steps: float, rows: int, images: int, under_way: int, left: float) -> bool:
    """Whether all are sooner done, on the average, if a request of so many `steps` and `rows` joins the `images` under
    way, which take `under_way` rows, than if it waits for them. `left`: steps until the first of them is gone.

    Where a step takes as long as it has rows, and all have as many left: the request that joins is done after
    steps * (under_way + rows), and each of the others steps * rows later; the one that waits after left * under_way +
    steps * rows.
    """
    return steps * (under_way + images * rows) < left * under_way


def fits(taken: int, needed: int, most: int) -> bool:
    """Whether `needed` rows go with those `taken`. Where none are, any do: an image may take more than there are, and
    then its step runs in several calls."""
    return not taken or taken + needed <= most
