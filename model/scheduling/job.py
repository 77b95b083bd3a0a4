"""An accepted request: its parameters, its progress, its listener and its future result."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from model.denoising.loop import ImageState
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import GenerationParams
from model.pipeline.prompt import CfgConditioning, is_guided
from model.pipeline.text_to_image import request_schedules, request_warnings

_STAGES = ("queue", "text", "denoise", "refine", "decode", "encode")


@dataclass(frozen=True)
class GenerationResult:
    """A request's images as base64, milliseconds by stage, and warnings."""

    images: list[str]
    timings: dict[str, float]
    warnings: list[str]


@dataclass(frozen=True)
class StepEvent:
    """`step` of `steps` steps of a request are done, counted over all of its images. `preview`: base64 of a JPEG."""

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
        model: LoadedModel,
        params: GenerationParams,
        listener: Callable[[StepEvent | ImageEvent], None] | None,
        preview_every: int,
    ) -> None:
        self.result: Future[GenerationResult] = Future()
        self.queue_position = 0
        """Images before it in the queue when last counted; 0 after its first image has joined a loop."""
        self.params = params
        self.listener = listener
        self.preview_every = preview_every
        self.base_schedule, self.refiner_schedule = request_schedules(model, params)
        self.unet_batch = 2 if is_guided(model, params, False) else 1  # of each of its images, in the first step
        self.warnings = request_warnings(model, params, self.refiner_schedule)
        self.images: list[ImageState] = []  # of the base, from text encoding until all have joined
        self.refiner_conditioning: CfgConditioning | None = None
        self.joined = 0  # images that have joined a loop, in order
        self.steps_done = 0  # of all images
        self.files: dict[int, str] = {}
        self.timestamps = {"accepted": time.perf_counter()}
        self.lock = threading.Lock()  # guards files and timestamps, which the output workers write

    @property
    def steps(self) -> int:
        """Steps of all images, base and refiner."""
        return self.params.num_inference_steps * self.params.num_images

    @property
    def done(self) -> bool:
        return self.result.done()

    def fail(self, error: Exception) -> bool:
        """Answer with `error`. Returns False if the request was answered before."""
        with self.lock:
            if self.done:
                return False
            self.result.set_exception(error)
            return True

    def end_stage(self, stage: str) -> None:
        self.timestamps[stage] = time.perf_counter()

    def timings(self) -> dict[str, float]:
        """Milliseconds from the end of one stage, for the last of the images, to the end of the next."""
        last, timings = self.timestamps["accepted"], {}
        for stage in _STAGES:
            if stage in self.timestamps:
                timings[stage] = (self.timestamps[stage] - last) * 1000
                last = self.timestamps[stage]
        return timings

    def emit(self, event: StepEvent | ImageEvent) -> None:
        if self.listener is not None:
            self.listener(event)
