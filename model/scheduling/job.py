"""An accepted request: its parameters, its progress, its listener and its future result."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass

from model.pipeline.plan import RequestPlan


@dataclass(frozen=True)
class GenerationResult:
    """A request's images as base64 of their files, milliseconds by stage, and warnings.

    flagged: for each image whether the safety checker flagged it; None: it was not checked.
    """

    images: list[str]
    flagged: list[bool | None]
    timings: dict[str, float]
    warnings: list[str]


@dataclass(frozen=True)
class StepEvent:
    """Progress: `step` of `steps` steps are done, of all images of a request. `preview`: base64 of a JPEG."""

    step: int
    steps: int
    preview: str | None = None


@dataclass(frozen=True)
class ImageEvent:
    """Image `index` of a request is finished: base64 of its file. `flagged`: see `GenerationResult`."""

    index: int
    data: str
    flagged: bool | None = None


class Job:
    """An accepted request. Any thread may call its methods, read its attributes and use `result`.

    Once the scheduler has accepted the job, only the scheduler's thread changes the public attributes.
    """

    def __init__(
        self,
        plan: RequestPlan,
        listener: Callable[[StepEvent | ImageEvent], None] | None,
        preview_every: int,
    ) -> None:
        """`listener` is called on the threads that emit events. `preview_every`: steps between previews; 0: none."""
        self.result: Future[GenerationResult] = Future()
        self.images_ahead = 0
        """Images that wait before this job's, when last counted; 0 after its first image has joined a loop."""
        self.plan = plan
        self.params = plan.params
        self.listener = listener
        self.preview_every = preview_every
        self.accepted_at = time.monotonic()
        self.waiting_images = deque(plan.images())  # those that have not joined a loop, in order
        self.steps_done = 0  # of all images
        self._lock = threading.Lock()  # guards the next four: the scheduler and the output workers change them
        self._last_event = time.perf_counter()
        self._seconds: dict[str, float] = {}  # by stage
        self._encoded_images: dict[int, ImageEvent] = {}
        self._warnings: dict[int, str] = {}  # by image

    @property
    def steps(self) -> int:
        """Steps of all images, on all UNets and in all passes."""
        return self.plan.steps * self.params.num_images

    @property
    def joined_count(self) -> int:
        """The number of images that have joined a loop."""
        return self.params.num_images - len(self.waiting_images)

    @property
    def done(self) -> bool:
        """True once `result` is set, to images or to an error."""
        return self.result.done()

    def fail(self, error: Exception) -> bool:
        """Answer with `error`. Return False if the request was answered before."""
        # Without the lock, because the callbacks of `result` run here and may call any method.
        try:
            self.result.set_exception(error)
        except InvalidStateError:
            return False
        return True

    def add_encoded_image(self, image: ImageEvent, warning: str | None = None) -> None:
        """Store a finished image, and a warning for the result. The last image sets `result`, unless it is set."""
        with self._lock:
            self._encoded_images[image.index] = image
            if warning is not None:
                self._warnings[image.index] = warning
            if len(self._encoded_images) < self.params.num_images:
                return
        self.end_stage("encode")
        images = [self._encoded_images[index] for index in range(self.params.num_images)]
        warnings = [*self.plan.warnings, *(text for _, text in sorted(self._warnings.items()))]
        data, flagged = [image.data for image in images], [image.flagged for image in images]
        with suppress(InvalidStateError):  # `fail` was called before
            self.result.set_result(GenerationResult(data, flagged, self.timings(), warnings))

    def end_stage(self, stage: str) -> None:
        """Record that an image has finished a stage now. The time since the last such event counts for this stage."""
        with self._lock:
            now = time.perf_counter()
            self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._last_event
            self._last_event = now

    def seconds_queued(self) -> float:
        """Return the seconds from acceptance to the end of the stage "queue", which must have ended."""
        with self._lock:
            return self._seconds["queue"]

    def timings(self) -> dict[str, float]:
        """Return the milliseconds of each stage, summed over passes and images. Together they are the time so far."""
        with self._lock:
            return {stage: seconds * 1000 for stage, seconds in self._seconds.items()}

    def emit(self, event: StepEvent | ImageEvent) -> None:
        """Call the listener, if there is one."""
        if self.listener is not None:
            self.listener(event)
