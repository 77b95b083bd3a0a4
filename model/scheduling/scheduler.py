"""In-flight batching: one daemon thread that moves every accepted image on, one step at a time.

Between two steps images join the loops, leave them (finished, cancelled) and are decoded; so a newcomer waits for one
step, not for a batch. First come, first served: an image joins its loop as soon as there is room, the images of a
request one by one. Where more images at once would hardly pay, there is room for few, who are done the sooner for it,
and for those who are soon gone again, until as many are here as fit; then all of them join. Loops (sizes, base and
refiner) take turns of one step. Pixels are encoded in a few threads beside. What an image looks like does not depend on
its company.

Knows nothing of HTTP. Thread-safe where it says so; the rest belongs to the thread.
"""

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from model import metrics
from model.api.request import GenerationSettings
from model.denoising.loop import (
    Row,
    has_room,
    unet_rows,
)
from model.engines import components
from model.errors import BrokenImage, Overloaded, PreheatError, Unavailable
from model.pipeline.preview import (
    Preview,
    PreviewMap,
)
from model.pipeline.text_to_image import (
    Decoding,
    LoadedModel,
    base_rows,
    refiner_row,
    refiner_text,
)
from model.scheduling.admission import (
    is_brief,
    may_join,
)
from model.scheduling.job import (
    Finished,
    Job,
    Limits,
    Stepped,
)
from model.scheduling.output_workers import Encoders

logger = logging.getLogger("preheat")

_DRAWING_NICENESS = 5
_Key = tuple[str, int, int]  # a loop: component, height, width


@dataclass(frozen=True, eq=False)
class _Image:
    job: Job
    index: int
    component: str


@dataclass
class _Call:
    """Anything else that must run on the thread."""

    work: Callable[[], Any]
    result: "Future[Any]" = field(default_factory=Future)


class Scheduler:
    """See the module. `submit`, `call`, `cancel`, `healthy` and `retry_after` are for any thread."""

    def __init__(self, model: LoadedModel, limits: Limits, on_device_failure: Callable[[], None]) -> None:
        """`on_device_failure` is called, once, where the device cannot be used any more by this process."""
        self.model = model
        self.limits = limits
        self._on_device_failure = on_device_failure
        self.preview_map: PreviewMap | None = None
        self._news = threading.Condition()  # guards the five below
        self._arrived: deque[Job | _Call] = deque()
        self._cancelled: deque[Job] = deque()
        self._queued = 0  # images
        self._failure: str | None = None
        self._closed = False
        self._waiting: list[Job] = []  # not all of whose images have joined, in order of arrival
        self._handed_over: dict[_Key, deque[tuple[_Image, Row]]] = {}  # from base to refiner
        self._images: dict[Row, _Image] = {}  # of the rows that are in a loop
        self._turns: deque[_Key] = deque()  # the loops that have rows; the first is next
        self._beat: float | None = None  # when the thread last began something; None while it waits
        self._seconds_per_image = 1.0
        self._last_image: float | None = None
        self._encoders = Encoders(self._count_image, self._failed_elsewhere)
        self._thread = threading.Thread(target=self._run, name="preheat-worker", daemon=True)
        self._thread.start()

    # -- for any thread -----------------------------------------------------------------------------------------------

    def submit(
        self,
        settings: GenerationSettings,
        listener: Callable[[Stepped | Finished], None] | None = None,
        preview_every: int = 0,
    ) -> Job:
        """Accept a request. Raises Overloaded where the queue has no room, Unavailable after a device failure."""
        count = settings.num_images
        with self._news:
            self._check(count)
            self._queued += count
        try:
            job = Job(self.model, settings, listener, preview_every)
        except BaseException:
            self._leave_queue(count)
            raise
        with self._news:
            job.ahead = self._queued - count
            self._arrived.append(job)
            self._news.notify()
        metrics.QUEUE.set(self._queued)
        return job

    def call(self, work: Callable[[], Any]) -> "Future[Any]":
        """Run `work` on the thread, between two steps."""
        call = _Call(work)
        with self._news:
            self._arrived.append(call)
            self._news.notify()
        return call.result

    def cancel(self, job: Job, error: PreheatError) -> None:
        """Answer a request with `error` now, and free what it holds before the next step. Nothing happens where it is
        answered already."""
        if not job.fail(error):
            return
        metrics.CANCELLATIONS.labels("running" if job.joined else "queued").inc()
        with self._news:
            self._cancelled.append(job)
            self._news.notify()

    def healthy(self) -> bool:
        """Whether the thread lives, the device works, and no step takes longer than `stuck_seconds`."""
        beat = self._beat
        stuck = beat is not None and time.monotonic() - beat > self.limits.stuck_seconds
        return self._thread.is_alive() and self._failure is None and not stuck

    def retry_after(self) -> int:
        """Seconds, 1 to 60, in which half of what is queued should be drawn."""
        return min(60, max(1, math.ceil(self._seconds_per_image * self._queued / 2)))

    def close(self) -> None:
        """End the thread after the step under way. Whatever is accepted is answered with Unavailable."""
        with self._news:
            self._closed = True
            self._failure = self._failure or "This server has ended."
            self._news.notify()
        self._thread.join()
        self._encoders.close()
        self._take_in()  # what has arrived since, also from the encoders
        for job in self._every_job():
            job.fail(Unavailable(self._failure))
            self._free(job)

    def _check(self, count: int) -> None:
        if self._failure is not None:
            raise Unavailable(self._failure)
        if self._queued + count > self.limits.max_queue:
            seconds = self.retry_after()
            raise Overloaded(
                f"{self._queued} images are waiting and this server queues {self.limits.max_queue}: ask again in "
                f"{seconds} s.",
                seconds,
            )

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self.model.device.type == "cpu":
            # What this thread and OpenMP's compute stands for a device's work; the threads that answer come first.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _DRAWING_NICENESS)
        with torch.inference_mode():
            while not self._closed:
                try:
                    self._take_in()
                    self._drop_cancelled()
                    self._join()
                    if self._turns:
                        self._step(self._turns[0])
                except Exception as error:
                    self._failed(self._every_job(), error)

    def _take_in(self) -> None:
        """What has arrived since; waits for it where there is nothing else to do."""
        with self._news:
            while not (self._arrived or self._cancelled or self._turns or self._waiting or self._closed):
                self._beat = None
                self._news.wait()
            arrived, self._arrived = self._arrived, deque()
        self._beat = time.monotonic()
        for one in arrived:
            if isinstance(one, Job):
                self._waiting.append(one)
                continue
            try:
                one.result.set_result(one.work())
            except BaseException as error:
                one.result.set_exception(error)

    def _drop_cancelled(self) -> None:
        with self._news:
            cancelled, self._cancelled = self._cancelled, deque()
        for job in cancelled:
            self._free(job)

    def _join(self) -> None:
        """Let images into the loops: those handed over first, for their way is half done, then in order of arrival."""
        for key, handed in self._handed_over.items():
            loop = self.model.loop(*key)
            while handed and has_room(loop, handed[0][1].unet_rows):
                image, row = handed.popleft()
                try:
                    self._enter(key, image, row)
                except Exception as error:
                    self._failed({image.job}, error)
        ahead, full = 0, set()
        for job in list(self._waiting):
            job.ahead = ahead
            ahead += job.settings.num_images - job.joined
            key = _base_key(job)
            if key in full:
                continue
            sizes = {key[1:] for key in self._turns}
            if key[1:] not in sizes and len(sizes) >= self.limits.sizes_at_once:
                break  # let in, whoever comes later could keep these sizes busy for ever
            try:
                self._join_job(job, key)
            except Exception as error:
                self._failed({job}, error)
            if not job.over and job.joined < job.settings.num_images:
                full.add(key)
        self._waiting = [job for job in self._waiting if not job.over and job.joined < job.settings.num_images]

    def _join_job(self, job: Job, key: _Key) -> None:
        """Let in as many images of a request as there is room for."""
        while job.joined < job.settings.num_images and self._may_join(job, key):
            if not job.rows:
                job.mark("queue")
                metrics.QUEUE_WAIT.observe(job.marks["queue"] - job.marks["accepted"])
                job.rows = base_rows(self.model, job.settings, job.tables[0])
                job.mark("text")
            image, row = _Image(job, job.joined, key[0]), job.rows[job.joined]
            job.ahead = 0
            job.joined += 1
            if job.joined == job.settings.num_images:
                job.rows = []  # with their texts
            self._leave_queue(1)
            if row.table.steps:
                self._enter(key, image, row)
            else:
                self._after_base(image, row)

    def _may_join(self, job: Job, key: _Key) -> bool:
        """Whether the base's loop of a size has room for one more. What the refiner has of it is under way as well; it
        is never held back there, for it has waited once. Nor are a request's further images once its first has joined:
        it is answered when all are done, and together they are done sooner."""
        loop, settings = self.model.loop(*key), job.settings
        there = {row: image for row, image in self._images.items() if _base_key(image.job) == key}
        under_way = unet_rows(list(there))
        of_size = [other for other in self._waiting if _base_key(other) == key]
        waiting = sum(other.unet_rows * (other.settings.num_images - other.joined) for other in of_size)
        left = min((_steps_left(image, row) for row, image in there.items()), default=0)
        welcome = (
            job.joined > 0
            or may_join(under_way, waiting, job.unet_rows, loop.efficient, loop.capacity)
            or is_brief(settings.num_inference_steps, job.unet_rows * settings.num_images, len(there), under_way, left)
        )
        return welcome and has_room(loop, job.unet_rows)

    def _enter(self, key: _Key, image: _Image, row: Row) -> None:
        self.model.loop(*key).join(row)
        self._images[row] = image
        if key not in self._turns:
            self._turns.append(key)

    def _leave_queue(self, images: int) -> None:
        with self._news:
            self._queued -= images
        metrics.QUEUE.set(self._queued)

    def _step(self, key: _Key) -> None:
        component, loop = key[0], self.model.loop(*key)
        rows = list(loop.rows)
        began = time.perf_counter()
        try:
            finished = loop.step()
        except Exception as error:
            self._failed({self._images[row].job for row in rows}, error)
            return
        metrics.STEP_SECONDS.labels(component).observe(time.perf_counter() - began)
        metrics.STEP_IMAGES.labels(component).observe(len(rows))
        metrics.STEPS.labels(component).inc()
        for row in rows:
            self._tell(key, row, row in finished)
        for image, row in [(self._images.pop(row), row) for row in finished]:
            if image.job.over:
                continue
            try:
                if component == components.UNET:
                    self._after_base(image, row)
                else:
                    self._after_refiner(image, row)
            except Exception as error:
                self._failed({image.job}, error)
        self._turns.rotate(-1)
        self._close_empty_loops()

    def _tell(self, key: _Key, row: Row, finished: bool) -> None:
        job = self._images[row].job
        job.done += 1
        if job.listener is None:
            return
        done = job.done
        if finished or not job.preview_every or row.step % job.preview_every or self.preview_map is None:
            job.tell(Stepped(done, job.steps))
            return
        preview = Preview(self.preview_map, self.model.loop(*key).latents(row))
        self._encoders.preview(job, done, preview)

    def _after_base(self, image: _Image, row: Row) -> None:
        job, rest = image.job, image.job.tables[1]
        job.mark("denoise")
        if not rest:
            self._decode(image, row)
            return
        if job.refiner_text is None:
            job.refiner_text = refiner_text(self.model, job.settings, rest)
        key = (components.REFINER_UNET, job.settings.height, job.settings.width)
        handed = self._handed_over.setdefault(key, deque())
        handed.append((_Image(job, image.index, key[0]), refiner_row(job.settings, rest, row, job.refiner_text)))
        if key not in self._turns:
            self._turns.append(key)

    def _after_refiner(self, image: _Image, row: Row) -> None:
        image.job.mark("refine")
        self._decode(image, row)

    def _decode(self, image: _Image, row: Row) -> None:
        self._encoders.picture(image.job, image.index, Decoding(self.model, row.latents))

    def _close_empty_loops(self) -> None:
        """Take loops without rows out of the turns."""
        for component in (components.UNET, components.REFINER_UNET):
            count = sum(len(self.model.loop(*key).rows) for key in self._turns if key[0] == component)
            metrics.ACTIVE.labels(component).set(count)
        self._turns = deque(key for key in self._turns if self.model.loop(*key).rows or self._handed_over.get(key))

    def _free(self, job: Job) -> None:
        """Take a request out of queue, loops and hand-over."""
        if job in self._waiting:
            self._waiting.remove(job)
        if job.joined < job.settings.num_images:
            self._leave_queue(job.settings.num_images - job.joined)
            job.joined = job.settings.num_images
        for row in [row for row, image in self._images.items() if image.job is job]:
            image = self._images.pop(row)
            self.model.loop(image.component, job.settings.height, job.settings.width).leave(row)
        for handed in self._handed_over.values():
            for entry in [entry for entry in handed if entry[0].job is job]:
                handed.remove(entry)
        self._close_empty_loops()

    def _every_job(self) -> set[Job]:
        handed = {image.job for waiting in self._handed_over.values() for image, _ in waiting}
        return {image.job for image in self._images.values()} | set(self._waiting) | handed

    def _failed(self, jobs: set[Job], error: Exception) -> None:
        """Something that was done for `jobs` raised: they fail, and all others where the device is what failed."""
        before = self._failure
        if not isinstance(error, BrokenImage):
            logger.error("A step of the worker failed.", exc_info=error)
            self._check_device(error)
        failure = None if self._failure is None else Unavailable(self._failure)
        for job in jobs if failure is None else jobs | self._every_job():
            job.fail(failure or error)
            self._free(job)
        if failure is not None and before is None:
            self._on_device_failure()

    def _check_device(self, error: Exception) -> None:
        """Ask a GPU whether it still answers: a CUDA error lasts until its process ends."""
        broken: Exception = error
        if self.model.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.model.device)
            except Exception as found:
                broken = found
        if isinstance(broken, torch.AcceleratorError):
            with self._news:
                said = str(broken).partition("\n")[0]
                self._failure = f"The GPU has failed ({said}); this server is being replaced."

    # -- for the encoding threads -------------------------------------------------------------------------------------

    def _count_image(self) -> None:
        metrics.IMAGES.inc()
        now, last = time.monotonic(), self._last_image
        self._last_image = now
        if last is not None and self._queued:
            self._seconds_per_image += 0.1 * (now - last - self._seconds_per_image)

    def _failed_elsewhere(self, job: Job, error: Exception) -> None:
        """Hand an error to the thread that owns the job."""
        self.call(lambda: None if job.over else self._failed({job}, error))


def _base_key(job: Job) -> _Key:
    return components.UNET, job.settings.height, job.settings.width


def _steps_left(image: _Image, row: Row) -> int:
    """Of an image in a loop, those of the refiner included."""
    refined = image.job.tables[1] if image.component == components.UNET else None
    return row.table.steps - row.step + (refined.steps if refined else 0)
