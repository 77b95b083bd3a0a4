"""A few threads beside the worker that make of pixels what is sent: previews, files as base64, a request's answer."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from model.images.encode import (
    broken_image,
    encode_base64,
)
from model.pipeline.preview import Preview
from model.pipeline.text_to_image import Decoding
from model.scheduling.job import (
    Drawn,
    Finished,
    Job,
    Stepped,
)

THREADS = max(2, min(8, (os.cpu_count() or 1) // 2))  # an image takes one some 10 ms; eight may end at once


class Encoders:
    """`picture` and `preview` are for any thread and return at once; what fails is handed to `failed`."""

    def __init__(self, drawn: Callable[[], None], failed: Callable[[Job, Exception], None]) -> None:
        """`drawn` is called after each picture, `failed` with what went wrong and whose it was; from these threads."""
        self._drawn = drawn
        self._failed = failed
        self._threads = ThreadPoolExecutor(THREADS, "preheat-encode")

    def picture(self, job: Job, index: int, decoding: Decoding) -> None:
        """Wait for image `index` of a request and encode it; the last of its images answers the request."""
        self._threads.submit(self._encode, job, index, decoding)

    def preview(self, job: Job, done: int, preview: Preview) -> None:
        """Tell the request's listener of `done` steps, with a small picture."""
        self._threads.submit(self._send_preview, job, done, preview)

    def close(self) -> None:
        """Return once all that was handed in is done."""
        self._threads.shutdown()

    def _encode(self, job: Job, index: int, decoding: Decoding) -> None:
        try:
            pixels = decoding.wait()
            with job.lock:
                job.mark("decode")
            if pixels is None:
                raise broken_image([index], job.settings.num_images)
            data = encode_base64(pixels, job.settings.output_format, job.settings.quality)
            job.tell(Finished(index, data))
            self._drawn()
            with job.lock:
                job.images[index] = data
                if len(job.images) == job.settings.num_images and not job.over:
                    job.mark("encode")
                    images = [job.images[index] for index in range(len(job.images))]
                    job.result.set_result(Drawn(images, job.timings(), job.warnings))
        except Exception as error:
            self._failed(job, error)

    def _send_preview(self, job: Job, done: int, preview: Preview) -> None:
        try:
            job.tell(Stepped(done, job.steps, preview.encode()))
        except Exception as error:
            self._failed(job, error)
