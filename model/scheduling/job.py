"""An accepted request on its way: what it asks, how far it is, who wants to know, and its answer to come."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import Any

from model.api.request import (
    MAX_IMAGES,
    GenerationSettings,
)
from model.denoising.loop import (
    Conditioning,
    Row,
)
from model.errors import ManifestError
from model.pipeline.text_to_image import (
    LoadedModel,
    is_guided,
    request_tables,
    request_warnings,
)

_STAGES = ("queue", "text", "denoise", "refine", "decode", "encode")


@dataclass(frozen=True)
class Limits:
    """What a server takes on: `model_metadata.preheat.limits` of the deployment's config."""

    max_queue: int = 64
    """Images accepted and in no loop yet; what does not fit is refused at once."""
    deadline_seconds: float = 300.0
    """From acceptance to the answer."""
    stuck_seconds: float = 120.0
    """A step that takes longer means that the device hangs."""
    sizes_at_once: int = 4
    """Sizes whose loops take turns; a further size waits until one of them is done."""

    @classmethod
    def from_config(cls, entries: Mapping[str, Any]) -> "Limits":
        """Raises ManifestError naming the entry that is unknown or not a number above zero."""
        known = {field.name: field.type for field in fields(cls)}
        for name, value in entries.items():
            whole = type(value) is int
            if name not in known or not (whole or (type(value) is float and known[name] is float)) or not value > 0:
                raise ManifestError(
                    f"config: limits.{name} is {value!r:.50}; the limits are {', '.join(known)}, numbers above zero "
                    "(max_queue and sizes_at_once whole): mend model_metadata.preheat.limits in config.yaml."
                )
        if entries.get("max_queue", MAX_IMAGES) < MAX_IMAGES:
            raise ManifestError(
                f"config: limits.max_queue is {entries['max_queue']}, and one request may ask for {MAX_IMAGES} images: "
                "mend model_metadata.preheat.limits in config.yaml."
            )
        return cls(**entries)


@dataclass(frozen=True)
class Drawn:
    """A request's pictures as base64, milliseconds by stage, and what was not done to the letter."""

    images: list[str]
    timings: dict[str, float]
    warnings: list[str]


@dataclass(frozen=True)
class Stepped:
    """`step` of `steps` steps of a request are done, counted over all of its images. `preview`: base64 of a JPEG."""

    step: int
    steps: int
    preview: str | None = None


@dataclass(frozen=True)
class Finished:
    """Image `index` of a request, base64 of its file."""

    index: int
    data: str


class Job:
    """An accepted request. `result` is for any thread, and so is `listener`, which several call."""

    def __init__(
        self,
        model: LoadedModel,
        settings: GenerationSettings,
        listener: Callable[[Stepped | Finished], None] | None,
        preview_every: int,
    ) -> None:
        self.result: Future[Drawn] = Future()
        self.ahead = 0
        """Images that were before it in the queue when last counted; 0 once its first has joined a loop."""
        self.settings = settings
        self.listener = listener
        self.preview_every = preview_every
        self.tables = request_tables(model, settings)
        self.unet_rows = 2 if is_guided(model, settings, False) else 1  # of each of its images, at first
        self.warnings = request_warnings(model, settings, self.tables[1])
        self.rows: list[Row] = []  # of the base, from text encoding on
        self.refiner_text: tuple[Conditioning, Conditioning | None] | None = None
        self.joined = 0  # images, in order
        self.done = 0  # steps, of all images
        self.images: dict[int, str] = {}
        self.marks = {"accepted": time.perf_counter()}
        self.lock = threading.Lock()  # for images and marks, which the encoding threads write

    @property
    def steps(self) -> int:
        """Of all images, base and refiner."""
        return self.settings.num_inference_steps * self.settings.num_images

    @property
    def over(self) -> bool:
        return self.result.done()

    def fail(self, error: Exception) -> bool:
        """Answer with `error`; false where it is answered already."""
        with self.lock:
            if self.over:
                return False
            self.result.set_exception(error)
            return True

    def mark(self, stage: str) -> None:
        self.marks[stage] = time.perf_counter()

    def timings(self) -> dict[str, float]:
        """Milliseconds from the end of one stage, for the last of the images, to the end of the next."""
        last, timings = self.marks["accepted"], {}
        for stage in _STAGES:
            if stage in self.marks:
                timings[stage] = (self.marks[stage] - last) * 1000
                last = self.marks[stage]
        return timings

    def tell(self, event: Stepped | Finished) -> None:
        if self.listener is not None:
            self.listener(event)
