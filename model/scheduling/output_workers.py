"""Threads that encode previews and finished images, and set a request's result after its last image."""

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from model import metrics
from model.denoising.loop import ImageState
from model.images.encode import encode_base64
from model.images.metadata import metadata_text
from model.images.pending import PendingImage
from model.images.pixels import Pixels
from model.images.postprocess import color_match, composite, union, upscale
from model.pipeline.overflow import CHECKS, broken_images
from model.pipeline.params import GenerationParams
from model.pipeline.preview import Preview
from model.scheduling.job import ImageEvent, Job

_BLANKED = "images.{index}: the safety checker flagged this image, and it was replaced by a black one."
THREADS = max(2, min(8, (os.cpu_count() or 1) // 2))  # encoding takes about 10 ms; eight images may finish at once


class OutputWorkers:
    """The previews and the file of one image are encoded in the order in which they were submitted.

    `submit_image` and `submit_preview` return at once. One thread may call them.
    """

    def __init__(
        self,
        on_image: Callable[[Job, int, Pixels], None],
        on_failure: Callable[[Job, Exception], None],
    ) -> None:
        """`on_image` is called after each image with its job, its index and its decoded pixels, `on_failure` with a job
        and its error.

        Both run on these threads.
        """
        self._on_image = on_image
        self._on_failure = on_failure
        self._threads = ThreadPoolExecutor(THREADS, "preheat-encode")
        self._lock = threading.Lock()  # guards the outputs of jobs

    def submit_image(self, job: Job, image: ImageState) -> None:
        """Wait for an image whose stages are finished, and encode it. The last one of a job sets its result."""
        assert image.pixels is not None
        self._submit(job, image.index, partial(self._encode, job, image.index, image.pixels))

    def submit_preview(self, job: Job, steps_done: int, index: int, preview: Preview) -> None:
        """Encode a preview of image `index`, and emit a step event with it."""
        self._submit(job, index, partial(self._send_preview, job, steps_done, index, preview))

    def close(self) -> None:
        """Return after all submitted work is done."""
        self._threads.shutdown()

    def _submit(self, job: Job, index: int, work: Callable[[], None]) -> None:
        """Run `work` after the other work of this image. It raises nothing."""
        with self._lock:
            waiting = job.outputs.setdefault(index, deque())
            waiting.append(work)
            if len(waiting) == 1:  # else the thread that runs the first one goes on with it
                self._threads.submit(self._run, waiting)

    def _run(self, waiting: deque[Callable[[], None]]) -> None:
        while waiting:
            waiting[0]()
            with self._lock:
                waiting.popleft()
                if not waiting:
                    return

    def _encode(self, job: Job, index: int, pending: PendingImage) -> None:
        try:
            pixels = pending.wait()
            job.end_stage("decode")
            if pixels is None:
                raise broken_images(job.plan, [index], job.params.num_images, CHECKS[pending.failed_check()])
            params, flagged, warning = job.params, pending.flagged(), None
            finished = finish(pixels, params)
            if flagged:
                metrics.FLAGGED_IMAGES.inc()
                if job.runner.model.blanks_flagged:
                    finished, warning = np.zeros_like(finished), _BLANKED.format(index=index)
            text = "" if params.metadata is None else metadata_text(params.metadata, params.seeds[index])
            data = encode_base64(finished, params.output_format, params.quality, text)
            image = ImageEvent(index, data, flagged, warning, job.plan.evaluations)
            job.report_image(image)
            self._on_image(job, index, pixels)
            job.add_encoded_image(image)
        except Exception as error:
            self._on_failure(job, error)

    def _send_preview(self, job: Job, steps_done: int, index: int, preview: Preview) -> None:
        try:
            job.report_step(steps_done, preview.encode(), index)
        except Exception as error:
            self._on_failure(job, error)


def finish(pixels: Pixels, params: GenerationParams) -> Pixels:
    """Return uint8 [upscale * height, upscale * width, 3]: colours matched, then blended with the input, then enlarged.

    `pixels`: uint8 [height, width, 3]. The first two use the union of all masks, and need them.
    """
    if params.masks and (params.color_match or params.composite):
        assert params.image is not None
        mask = union([mask.levels for mask in params.masks])
        if params.color_match:
            pixels = color_match(pixels, params.image, mask)
        if params.composite:
            pixels = composite(pixels, params.image, mask)
    return upscale(pixels, params.upscale)
