"""Decide whether one more image of a request joins a loop now, from the images in flight and the requests that wait."""

import itertools
from collections.abc import Iterable

from model.denoising.loop import slots
from model.denoising.step_plan import StepNeeds
from model.scheduling.admission import joinings, may_join, shortens_mean_latency
from model.scheduling.in_flight import InFlight, ModelLoop, first_loop
from model.scheduling.job import Job


def one_more_may_join(job: Job, place: ModelLoop, in_flight: InFlight, queue: Iterable[Job]) -> bool:
    """True if `place`, the first loop of a job, can admit one more image of it. `queue`: the jobs that wait.

    Admission is limited to what saves seconds, with two exceptions. Further images of an admitted
    job may join, because it is answered when all are done. So may images of short jobs. Images that have moved to a
    further loop, or that wait to join this one, count as running.
    """
    loop, needed = place.loop, job.plan.first_needs.slots
    running, joining = in_flight.started_with(place)
    running |= joining
    taken = slots([*loop.images, *joining])
    if taken + needed > loop.capacity and (joining or loop.images):
        return False
    if job.joined_count or not loop.costs.is_known:
        return True
    batch = slots(running)
    steps_left = min((owner.plan.evaluations_left(image) for image, owner in running.items()), default=0)
    if shortens_mean_latency(job.plan.evaluations, needed * job.num_images, len(running), batch, steps_left):
        return True
    same_loop = [
        other
        for other in queue
        if first_loop(other) == place and other.plan.adapters.merged == job.plan.adapters.merged
    ]
    same_loop.sort(key=lambda other: other is not job)
    waiting = [other.plan.first_needs for other in same_loop for _ in other.waiting_images]
    room = list(itertools.accumulate((one.slots for one in waiting), initial=batch))
    count = max(0, sum(one <= loop.capacity for one in room) - 1)  # with images in the refiner even none may fit
    now = [
        image.now if image in loop.images
        else owner.plan.first_needs if first_loop(owner) == place
        else StepNeeds(image.now.entries, image.now.slots)  # another UNet has other features
        for image, owner in running.items()
    ]  # fmt: skip
    if not now:
        return True
    of_now, of_waiting = ([(loop.kind(one), one.entries) for one in part] for part in (now, waiting[:count]))
    return may_join(joinings(loop.costs, of_now, of_waiting), room[-1] >= loop.capacity)
