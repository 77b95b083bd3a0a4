"""The images in flight: those in loops, and those between two loops. Loops take turns of one step."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from model import metrics
from model.denoising.loop import ImageState, has_room
from model.pipeline.components import unets
from model.pipeline.loaded_model import LoadedModel, LoopKey
from model.scheduling.job import Job


class _Running(NamedTuple):
    """The job that an image in a loop belongs to, and that loop."""

    job: Job
    loop: LoopKey


class InFlight:
    """Used on the scheduler's thread."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._unets = [spec.name for spec in unets(model.components)]
        self._running: dict[ImageState, _Running] = {}  # the images in loops
        self._waiting: dict[LoopKey, deque[tuple[Job, ImageState]]] = {}  # images between two loops
        self._loops: deque[LoopKey] = deque()  # with images in them or waiting for them; the first is next

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

    @property
    def sizes(self) -> set[tuple[int, int]]:
        """The height and width of each loop in turn."""
        return {key[1:] for key in self._loops}

    def job_of(self, image: ImageState) -> Job:
        """Return the job of an image in a loop."""
        return self._running[image].job

    def start(self, key: LoopKey, job: Job, image: ImageState) -> None:
        """Add an image to a loop with room for it."""
        self._model.loop(*key).add(image)
        self._running[image] = _Running(job, key)
        self._take_turns(key)

    def wait(self, key: LoopKey, job: Job, image: ImageState) -> None:
        """Keep an image until it may join a loop: until `take_waiting` returns it."""
        self._waiting.setdefault(key, deque()).append((job, image))
        self._take_turns(key)

    def take_waiting(self) -> Iterator[tuple[LoopKey, Job, ImageState]]:
        """Remove and return the images between two loops that may join now, in order of arrival in each loop.

        The caller starts each before it takes the next. A loop waits for the encoding of an image that joins. So an
        image joins once it is encoded, or if nothing else runs.
        """
        for key, waiting in self._waiting.items():
            loop = self._model.loop(*key)
            while waiting and has_room(loop, waiting[0][1].now.slots):
                if self.in_loops and not waiting[0][1].inputs_ready:
                    break
                yield key, *waiting.popleft()

    def started_with(self, key: LoopKey) -> tuple[dict[ImageState, Job], dict[ImageState, Job]]:
        """Return the running and the waiting images of a first loop, with their jobs.

        Running images may be in any loop, if their first loop has the size of this one. Waiting images join this one.
        """
        running = {image: job for image, (job, _) in self._running.items() if job.plan.first.loop[1:] == key[1:]}
        return running, {image: job for job, image in self._waiting.get(key, ())}

    @property
    def next_loop(self) -> LoopKey | None:
        """The loop whose turn it is, or None if no image is in flight."""
        return self._loops[0] if self._loops else None

    def end_turn(self) -> None:
        """Let the next loop take its turn."""
        self._loops.rotate(-1)

    def leave(self, image: ImageState) -> Job:
        """Forget an image that has left its loop. Returns its job."""
        return self._running.pop(image).job

    def remove(self, job: Job) -> None:
        """Remove the images of a job, also from their loops."""
        for image in [image for image, running in self._running.items() if running.job is job]:
            loop = self._model.loop(*self._running.pop(image).loop)
            if image in loop.images:  # not if an error followed its last step
                loop.remove(image)
        for waiting in self._waiting.values():
            for entry in [entry for entry in waiting if entry[0] is job]:
                waiting.remove(entry)
        self.drop_empty_loops()

    def drop_empty_loops(self) -> None:
        """End the turns of loops without images, and count the images of the others."""
        for unet in self._unets:
            count = sum(len(self._model.loop(*key).images) for key in self._loops if key[0] == unet)
            metrics.ACTIVE.labels(unet).set(count)
        self._loops = deque(key for key in self._loops if self._model.loop(*key).images or self._waiting.get(key))

    def _take_turns(self, key: LoopKey) -> None:
        if key not in self._loops:
            self._loops.append(key)
