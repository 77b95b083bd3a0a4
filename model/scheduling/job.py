"""An accepted request: its parameters, its progress, its listener and its future result."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model.pipeline.encoded_once import EncodedOnce

if TYPE_CHECKING:  # a process without engines needs the results and events before torch is imported
    from model.denoising.loop import ImageState
    from model.pipeline.request_plan import RequestPlan
    from model.pipeline.runner import Runner


@dataclass(frozen=True)
class GenerationResult:
    """A request's images as base64 of their files, milliseconds by stage, and warnings.

    flagged: for each image whether the safety checker flagged it; None: it was not checked.
    evaluations: how often the UNet was evaluated for each image.
    """

    images: list[str]
    flagged: list[bool | None]
    timings: dict[str, float]
    warnings: list[str]
    evaluations: int


@dataclass(frozen=True)
class StepEvent:
    """Progress: `step` of `steps` steps are done, of all images of a request.

    preview: base64 of a JPEG of the image `index`. Both are None in most events.
    """

    step: int
    steps: int
    preview: str | None = None
    index: int | None = None


@dataclass(frozen=True)
class ImageEvent:
    """Image `index` of a request is finished: base64 of its file. `flagged`: see `GenerationResult`.

    warning, evaluations (see `GenerationResult`): for the result, not for the listener.
    """

    index: int
    data: str
    flagged: bool | None = None
    warning: str | None = None
    evaluations: int = 0


def assemble(images: Mapping[int, ImageEvent], timings: dict[str, float], warnings: Sequence[str]) -> GenerationResult:
    """Return the result of a request from its images by index. `warnings`: those of the whole request."""
    ordered = [image for _, image in sorted(images.items())]
    of_images = [image.warning for image in ordered if image.warning is not None]
    return GenerationResult(
        [image.data for image in ordered],
        [image.flagged for image in ordered],
        timings,
        [*warnings, *of_images],
        max(image.evaluations for image in ordered),
    )


class Job:
    """An accepted request. Any thread may call its methods, read its attributes and use `result`.

    Once the scheduler has accepted the job, only the scheduler's thread changes the public attributes.
    """

    def __init__(
        self,
        runner: "Runner",
        plan: "RequestPlan",
        listener: Callable[[StepEvent | ImageEvent], None] | None,
        preview_every: int,
        indices: Collection[int] | None = None,
    ) -> None:
        """`runner`: of the model that generates the images. `listener` is called on the threads that emit events.

        preview_every: steps between previews; 0: none. indices: the images of the request to generate; None: all.
        """
        self.runner = runner
        self.result: Future[GenerationResult] = Future()
        self.planned: Future[None] = Future()
        self.planned.set_result(None)
        self.images_ahead = 0
        """Images that wait before this job's, when last counted; 0 after its first image has joined a loop."""
        self.plan = plan
        self.params = plan.params
        self.listener = listener
        self.preview_every = preview_every
        self.accepted_at = time.monotonic()
        images = [image for image in plan.images() if indices is None or image.index in indices]
        self.num_images = len(images)
        self.encoded = EncodedOnce(image.index for image in images)  # used on the scheduler's thread only
        self.waiting_images = deque(images)  # those that have not joined a loop, in order
        self.steps_done = 0  # of all images
        self._previews_due: dict[int, int] = {}  # by index of an image
        self.outputs: dict[int, deque[Callable[[], None]]] = {}  # unfinished ones of each image; see `OutputWorkers`
        self._reporting = threading.Lock()  # guards the next one, and the order of events
        self._steps_reported = 0
        self._lock = threading.Lock()  # guards the next three: the scheduler and the output workers change them
        self._last_event = time.perf_counter()
        self._seconds: dict[str, float] = {}  # by stage
        self._encoded_images: dict[int, ImageEvent] = {}

    @property
    def steps(self) -> int:
        """Steps of all images, on all UNets and in all passes."""
        return self.plan.steps * self.num_images

    @property
    def joined_count(self) -> int:
        """The number of images that have joined a loop."""
        return self.num_images - len(self.waiting_images)

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

    def add_encoded_image(self, image: ImageEvent) -> None:
        """Store a finished image. The last image sets `result`, unless it is set."""
        with self._lock:
            self._encoded_images[image.index] = image
            if len(self._encoded_images) < self.num_images:
                return
        self.end_stage("encode")
        with suppress(InvalidStateError):  # `fail` was called before
            self.result.set_result(assemble(self._encoded_images, self.timings(), self.plan.warnings))

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

    def takes_preview(self, image: "ImageState") -> bool:
        """True once for each `preview_every` steps of an image, on all UNets and in all passes.

        It is called after each step but the last one in a loop, which leaves no latents for a preview. One that is due
        then follows the next step.
        """
        if not self.preview_every:
            return False
        due = self.plan.steps_done(image) // self.preview_every
        before, self._previews_due[image.index] = self._previews_due.get(image.index, 0), due
        return due > before

    def report_step(self, done: int, preview: str | None = None, index: int | None = None) -> None:
        """Emit that `done` steps of all images are done. `preview`: of the image `index`, if there is one.

        Steps may have been reported while a preview was encoded. It then has the number of the last one, so that
        progress never goes back.
        """
        with self._reporting:
            self._steps_reported = max(self._steps_reported, done)
            self._emit(StepEvent(self._steps_reported, self.steps, preview, index))

    def report_image(self, image: ImageEvent) -> None:
        """Emit a finished image."""
        with self._reporting:
            self._emit(image)

    def _emit(self, event: StepEvent | ImageEvent) -> None:
        if self.listener is not None:
            self.listener(event)
