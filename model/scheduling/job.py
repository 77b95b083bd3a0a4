"""An accepted request: its parameters, its progress, its listener and its future result."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise

from model.pipeline.plan import RequestPlan


@dataclass(frozen=True)
class GenerationResult:
    """A request's images as base64, milliseconds by stage, and warnings."""

    images: list[str]
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
    """Image `index` of a request is finished: base64 of its file."""

    index: int
    data: str


class Job:
    """An accepted request. Any thread may use `result` and call `emit`; the rest belongs to the scheduler's thread."""

    def __init__(
        self,
        plan: RequestPlan,
        listener: Callable[[StepEvent | ImageEvent], None] | None,
        preview_every: int,
    ) -> None:
        self.result: Future[GenerationResult] = Future()
        self.queue_position = 0
        """Images that wait before this job's, when last counted; 0 after its first image has joined a loop."""
        self.plan = plan
        self.params = plan.params
        self.listener = listener
        self.preview_every = preview_every
        self.images = deque(plan.images())  # those that have not joined a loop, in order
        self.steps_done = 0  # of all images
        self.files: dict[int, str] = {}
        self.timestamps = {"accepted": time.perf_counter()}
        self.lock = threading.Lock()  # guards files and timestamps, which the output workers write

    @property
    def steps(self) -> int:
        """Steps of all images, base and refiner."""
        return self.params.num_inference_steps * self.params.num_images

    @property
    def joined(self) -> int:
        """Images that have joined a loop."""
        return self.params.num_images - len(self.images)

    @property
    def done(self) -> bool:
        return self.result.done()

    def fail(self, error: Exception) -> bool:
        """Answer with `error`. Return False if the request was answered before."""
        with self.lock:
            if self.done:
                return False
            self.result.set_exception(error)
            return True

    def end_stage(self, stage: str) -> None:
        self.timestamps[stage] = time.perf_counter()

    def timings(self) -> dict[str, float]:
        """Return the milliseconds of each stage. A stage ends when the last image has finished it."""
        return {stage: (end - began) * 1000 for (_, began), (stage, end) in pairwise(self.timestamps.items())}

    def emit(self, event: StepEvent | ImageEvent) -> None:
        if self.listener is not None:
            self.listener(event)
