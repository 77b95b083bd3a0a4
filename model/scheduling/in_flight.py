"""The images in flight: those in loops, and those between two loops. Loops take turns of one step."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from model import metrics
from model.denoising.loop import ImageState, Loop, has_room
from model.pipeline.loaded_model import LoopKey
from model.pipeline.runner import Runner
from model.scheduling.job import Job


class ModelLoop(NamedTuple):
    """A loop of one of the models."""

    runner: Runner
    key: LoopKey

    @property
    def loop(self) -> Loop:
        """The loop, which is made at the first use. Raises the error of making it."""
        return self.runner.model.loop(*self.key)

    def prepare(self) -> None:
        """Make the loop, unless it exists. Raises the error of making it."""
        self.runner.model.loop(*self.key)

    @property
    def images(self) -> list[ImageState]:
        """The images in the loop. Does not make it."""
        loop = self.runner.model.loops.get(self.key)
        return [] if loop is None else loop.images

    @property
    def unet(self) -> str:
        return self.key[0]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.key[1:]


def first_loop(job: Job) -> ModelLoop:
    """Return the loop that a job's images join first."""
    return ModelLoop(job.runner, job.plan.first.loop)


class _Running(NamedTuple):
    """The job that an image in a loop belongs to, and that loop."""

    job: Job
    place: ModelLoop


class InFlight:
    """Used on the scheduler's thread."""

    def __init__(self) -> None:
        self._running: dict[ImageState, _Running] = {}  # the images in loops
        self._waiting: dict[ModelLoop, deque[tuple[Job, ImageState]]] = {}  # images between two loops
        self._loops: deque[ModelLoop] = deque()  # with images in them or waiting for them; the first is next
        self._counted: set[str] = set()  # the UNets whose images were counted last

    def __bool__(self) -> bool:
        """True if images are in loops or between two of them."""
        return bool(self._running) or any(self._waiting.values())

    @property
    def in_loops(self) -> bool:
        return bool(self._running)

    @property
    def jobs(self) -> set[Job]:
        between_loops = {job for waiting in self._waiting.values() for job, _ in waiting}
        return {running.job for running in self._running.values()} | between_loops

    def of(self, runner: Runner) -> bool:
        """True if images of this model are in loops or between two of them."""
        return any(job.runner is runner for job in self.jobs)

    @property
    def sizes(self) -> set[tuple[int, int]]:
        """The height and width of each loop in turn."""
        return {place.size for place in self._loops}

    def job_of(self, image: ImageState) -> Job:
        """Return the job of an image in a loop."""
        return self._running[image].job

    def start(self, place: ModelLoop, job: Job, image: ImageState) -> None:
        """Add an image to a loop with room for it."""
        place.loop.add(image)
        self._running[image] = _Running(job, place)
        self._take_turns(place)

    def wait(self, place: ModelLoop, job: Job, image: ImageState) -> None:
        """Keep an image until it may join a loop: until `take_waiting` returns it.

        Makes the loop now, because its error is one of this image's job.
        """
        place.prepare()
        self._waiting.setdefault(place, deque()).append((job, image))
        self._take_turns(place)

    def take_waiting(self) -> Iterator[tuple[ModelLoop, Job, ImageState]]:
        """Remove and return the images between two loops that may join now, in order of arrival in each loop.

        The caller starts each before it takes the next. A loop waits for the encoding of an image that joins. So an
        image joins once it is encoded, or if nothing else runs.
        """
        for place, waiting in self._waiting.items():
            while waiting and has_room(place.loop, waiting[0][1].now.slots):
                if self.in_loops and not waiting[0][1].inputs_ready:
                    break
                yield place, *waiting.popleft()

    def started_with(self, place: ModelLoop) -> tuple[dict[ImageState, Job], dict[ImageState, Job]]:
        """Return the running and the waiting images of a first loop, with their jobs.

        Running images may be in any loop of the model, if their first loop has the size of this one. Waiting images
        join this one.
        """
        running = {
            image: job
            for image, (job, _) in self._running.items()
            if (first := first_loop(job)).runner is place.runner and first.size == place.size
        }
        return running, {image: job for job, image in self._waiting.get(place, ())}

    @property
    def next_loop(self) -> ModelLoop | None:
        """The loop whose turn it is, or None if no image is in flight."""
        return self._loops[0] if self._loops else None

    def end_turn(self) -> None:
        """Let the next loop take its turn."""
        self._loops.rotate(-1)

    def leave(self, image: ImageState) -> None:
        """Forget an image that has left its loop."""
        del self._running[image]

    def remove(self, job: Job) -> None:
        """Remove the images of a job, also from their loops."""
        for image in [image for image, running in self._running.items() if running.job is job]:
            place = self._running.pop(image).place
            if image in place.images:  # not if an error followed its last step
                place.loop.remove(image)
        for waiting in self._waiting.values():
            for entry in [entry for entry in waiting if entry[0] is job]:
                waiting.remove(entry)
        self.drop_empty_loops()

    def drop_empty_loops(self) -> None:
        """End the turns of loops without images, and count the images of the others."""
        counts = dict.fromkeys(self._counted, 0)
        for place in self._loops:
            counts[place.unet] = counts.get(place.unet, 0) + len(place.images)
        for unet, count in counts.items():
            metrics.ACTIVE.labels(unet).set(count)
        self._counted = {unet for unet, count in counts.items() if count}
        self._loops = deque(place for place in self._loops if place.images or self._waiting.get(place))

    def _take_turns(self, place: ModelLoop) -> None:
        if place not in self._loops:
            self._loops.append(place)
