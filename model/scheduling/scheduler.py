"""In-flight batching: one daemon thread advances every accepted image, one step at a time.

Between two steps images join loops, leave them (finished, cancelled) and are decoded. So a new request waits for one
step and not for a batch. Images join in order of arrival as soon as their loop has room, each image of a request by
itself; `model.scheduling.joining` limits how many run at once, and `model.scheduling.weight_turns` decides which
have their weights. Loops (one for each model, UNet and size) take turns of one step; `model.scheduling.in_flight` keeps
their images. Each image's result is independent of the other images. This module decides; `model.pipeline.runner`
executes.

Other threads may call the methods that `Scheduler` lists. The rest runs on the scheduler's thread.
"""

import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from model import metrics
from model.denoising.loop import ImageState, Loop
from model.errors import AdapterError, BrokenImage, PreheatError, ReleaseNotLoaded, Unavailable
from model.images.pixels import Pixels
from model.pipeline.params import GenerationParams
from model.pipeline.preview import Preview
from model.pipeline.runner import Runner
from model.scheduling.comparison import ImageComparison
from model.scheduling.in_flight import InFlight, ModelLoop, first_loop
from model.scheduling.interface import check_queue
from model.scheduling.job import ImageEvent, Job, StepEvent
from model.scheduling.joining import one_more_may_join
from model.scheduling.output_workers import OutputWorkers
from model.scheduling.weight_slots import WeightSlots
from model.scheduling.weight_turns import WeightTurns
from model.settings import Limits
from model.store.adapter_record import AdapterRecord

logger = logging.getLogger("preheat")

_CPU_NICENESS = 5
IDLE_SECONDS = 1.0  # without work, after which the work of `when_idle` begins; a first request often follows readiness
OVERDUE_SECONDS = 60.0  # after which a server that is never idle interrupts requests for the work of `when_idle`
_INTERRUPTION_SECONDS = 1.0  # of such work, after which requests go on until it is overdue again


@dataclass
class _Call:
    """A function to run on the scheduler's thread."""

    work: Callable[[], Any]
    result: "Future[Any]" = field(default_factory=Future)


class Scheduler:
    """Other threads may use what precedes `_run`."""

    def __init__(
        self,
        runners: Sequence[Runner],
        limits: Limits,
        on_device_failure: Callable[[], None],
        comparison: ImageComparison | None = None,
        prepare: Callable[[], None] | None = None,
        slots: WeightSlots | None = None,
    ) -> None:
        """Start the thread. `on_device_failure` is called once, when this process can no longer use the device.

        `runners`: of each model, on one device. `comparison`: compares images with fp16 while there is no other work.
        `prepare`: the first work of the thread, the warm-up. `slots`: of the runners; None: the weights of all are on
        the device.
        """
        self.runners = tuple(runners)
        self.limits = limits
        self._device = runners[0].model.device
        self._on_device_failure = on_device_failure
        self.comparison = comparison
        self._wakeup = threading.Condition()  # guards the next eight attributes
        self._idle_work: Iterator[None] | None = None
        self._idle_work_since = 0.0  # by time.monotonic(): its arrival, or its last interruption of requests
        self._inbox: deque[Job | _Call] = deque()
        self._cancelled: deque[Job] = deque()
        self._queued_images = 0
        self._failure: str | None = None
        self._accepted: weakref.WeakSet[Job] = weakref.WeakSet()
        self._closed = False
        self._waiting: list[Job] = []  # jobs with images that have not joined, in order of arrival
        self._in_flight = InFlight()
        # By time.monotonic(): when the thread last started work (None while it waits), and when an image was finished.
        self._last_progress: float | None = None
        self._last_image: float | None = None
        self._seconds_per_image = 1.0  # moving average
        self._turns = WeightTurns(self.runners, slots, limits.lora_turn_seconds, self._wake)
        self._workers = OutputWorkers(self._count_image, self._fail_from_worker)
        self._prepared = self.call(prepare or (lambda: None))
        self._thread = threading.Thread(target=self._run, name="preheat-worker", daemon=True)
        self._thread.start()

    # -- for any thread -----------------------------------------------------------------------------------------------

    def wait_ready(self) -> None:
        """Wait until `prepare` has ended. An error of it closes the scheduler and is raised."""
        try:
            self._prepared.result()
        except BaseException:
            self.close()
            raise

    def submit(
        self,
        params: GenerationParams,
        listener: Callable[[StepEvent | ImageEvent], None] | None = None,
        preview_every: int = 0,
        model: int = 0,
        adapters: Sequence[AdapterRecord] = (),
        indices: Collection[int] | None = None,
    ) -> Job:
        """Accept a request. `model`: the index of its runner. `indices`: the images of it to generate; None: all.

        `adapters`: see `JobScheduler`.

        Raises Overloaded if the queue has no room, Unavailable after a device failure, RequestRefused for a request
        that cannot be planned.
        """
        count = params.num_images if indices is None else len(indices)
        with self._wakeup:
            self.check_acceptable(count)
            self._queued_images += count
        try:
            runner = self.runners[model]
            if adapters and runner.model.adapters is not None:
                runner.model.adapters.add(adapters)
            job = Job(runner, runner.plan(params), listener, preview_every, indices)
        except BaseException:
            self._leave_queue(count)
            raise
        with self._wakeup:
            job.images_ahead = self._queued_images - count
            self._accepted.add(job)
            self._inbox.append(job)
            metrics.QUEUE.set(self._queued_images)
            self._wakeup.notify()
            failure = self._failure
        if failure is not None:  # since the check above; the thread may hang
            job.fail(Unavailable(failure))
        return job

    def call(self, work: Callable[[], Any]) -> "Future[Any]":
        """Run `work` on the scheduler's thread, between two steps."""
        call = _Call(work)
        with self._wakeup:
            self._inbox.append(call)
            self._wakeup.notify()
        return call.result

    def when_idle(self, work: Iterator[None]) -> None:
        """Advance `work` on the scheduler's thread after `IDLE_SECONDS` without other work, until it ends.

        A request that arrives meanwhile waits until `work` yields. If the work has not ended after `OVERDUE_SECONDS`,
        no image is admitted until those in flight are finished, and the work then advances for about a second. This
        repeats every `OVERDUE_SECONDS`. An error ends the work and is logged.
        """
        with self._wakeup:
            self._idle_work = work
            self._idle_work_since = time.monotonic()
            self._wakeup.notify()

    def cancel(self, job: Job, error: PreheatError) -> None:
        """Answer a request with `error` now, and free its resources before the next step. Does nothing if it was
        answered before."""
        if not job.fail(error):
            return
        metrics.CANCELLATIONS.labels("running" if job.joined_count else "queued").inc()
        with self._wakeup:
            self._cancelled.append(job)
            self._wakeup.notify()

    def healthy(self) -> bool:
        """True while the thread lives, the device works, and no step takes longer than `stuck_seconds`."""
        last = self._last_progress
        stuck = last is not None and time.monotonic() - last > self.limits.stuck_seconds
        return self._thread.is_alive() and self._failure is None and not stuck

    @property
    def is_closed(self) -> bool:
        """True once `close` was called."""
        return self._closed

    @property
    def adapters_on_device(self) -> frozenset[str]:
        """The adapters whose factors are on the device. Any thread may read it."""
        return self._turns.adapters_on_device

    @property
    def placed(self) -> tuple[int, ...]:
        """The indices of the releases whose weights are on the device or will be. Any thread may read it."""
        return self._turns.placed

    @property
    def queued_images(self) -> int:
        """Accepted images that wait for a loop."""
        return self._queued_images

    def retry_after(self) -> int:
        """Return the seconds, 1 to 60, in which half of the queue should be finished."""
        return min(60, max(1, math.ceil(self._seconds_per_image * self._queued_images / 2)))

    def abandon(self, reason: str) -> None:
        """Answer all requests with Unavailable from now on, also while a step hangs, and report a device failure."""
        with self._wakeup:
            is_first = self._failure is None
            self._failure = self._failure or reason
            accepted = list(self._accepted)
        for job in accepted:
            job.fail(Unavailable(reason))
        if is_first:
            self._on_device_failure()

    def close(self) -> None:
        """End the thread after the current step. All accepted requests are answered with Unavailable."""
        with self._wakeup:
            self._closed = True
            self._failure = self._failure or "This server has ended."
            self._wakeup.notify()
        self._thread.join()
        self._workers.close()
        self._turns.close()
        self._drain_inbox()  # jobs and calls that arrived meanwhile, also from the workers
        for job in self._unfinished_jobs():
            job.fail(Unavailable(self._failure))
            self._free(job)

    def check_acceptable(self, count: int) -> None:
        """Raise Unavailable after a failure, Overloaded if the queue has no room for `count` images."""
        if self._failure is not None:
            raise Unavailable(self._failure)
        check_queue(self._queued_images, count, self.limits.max_queue, self.retry_after)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._device.type == "cpu":
            # On a CPU this thread and OpenMP's are the device; threads that answer requests have priority.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _CPU_NICENESS)
        with torch.inference_mode():
            while not self._closed:
                try:
                    self._drain_inbox()
                    self._drop_cancelled()
                    if self._idle_work_overdue() and not self._in_flight:
                        self._advance_overdue_work()
                    self._admit()
                    if (place := self._in_flight.next_loop) is not None:
                        self._step(place)
                except Exception as error:
                    self._fail_all(error)

    def _drain_inbox(self) -> None:
        """Queue new jobs and run calls. Wait for them if there is nothing else to do, with work of `when_idle`."""
        with self._wakeup:
            began: float | None = None  # by time.monotonic(), of being idle
            while not (self._inbox or self._cancelled or self._in_flight or self._closed or self._can_admit()):
                began = time.monotonic() if began is None else began
                self._last_progress = None
                work = self._work_while_idle()
                if work is None:
                    self._wakeup.wait()
                elif (pause := began + IDLE_SECONDS - time.monotonic()) > 0:
                    self._wakeup.wait(pause)
                else:
                    self._advance_idle_work(work)
            inbox, self._inbox = self._inbox, deque()
        if began is not None:  # no image took the time since the last one
            self._last_image = None
        self._last_progress = time.monotonic()
        for item in inbox:
            if isinstance(item, Job):
                self._waiting.append(item)
                if self.comparison is not None:
                    self.comparison.end()
                continue
            try:
                item.result.set_result(item.work())
            except BaseException as error:
                item.result.set_exception(error)

    def _work_while_idle(self) -> Iterator[None] | None:
        """Return the work of `when_idle`, or else the comparison of an image. None: there is no such work.

        It waits for the load of a release, which would lengthen the steps that it measures.
        """
        if self._turns.is_loading:
            return None
        if self._idle_work is not None or self.comparison is None:
            return self._idle_work
        if self._waiting:  # for adapters or releases that are being loaded
            return None
        return self.comparison.work

    def _can_admit(self) -> bool:
        """True if a load can go on, or if a job waits for more than a load: of its adapters or of its release."""
        return self._turns.has_work or not all(self._turns.blocked(job.runner) for job in self._waiting)

    def _advance_idle_work(self, work: Iterator[None]) -> None:
        """Run one part of the work of `when_idle`, or of a comparison. Called with the lock, which is released
        meanwhile."""
        self._last_progress = time.monotonic()
        self._wakeup.release()
        try:
            next(work)
        except StopIteration:
            self._end_idle_work(work)
        except Exception as error:
            self._end_idle_work(work)
            self._fail(set(), error)
        finally:
            self._wakeup.acquire()

    def _end_idle_work(self, work: Iterator[None]) -> None:
        if work is self._idle_work:
            self._idle_work = None
        elif self.comparison is not None:
            self.comparison.end()

    def _idle_work_overdue(self) -> bool:
        is_due = time.monotonic() >= self._idle_work_since + OVERDUE_SECONDS
        return self._idle_work is not None and is_due and not self._turns.is_loading

    def _advance_overdue_work(self) -> None:
        """Run parts of the work of `when_idle` for about `_INTERRUPTION_SECONDS`. No image may be in flight."""
        end = time.monotonic() + _INTERRUPTION_SECONDS
        with self._wakeup:
            while self._idle_work is not None and not self._closed and time.monotonic() < end:
                self._advance_idle_work(self._idle_work)
            self._idle_work_since = time.monotonic()

    def _drop_cancelled(self) -> None:
        with self._wakeup:
            cancelled, self._cancelled = self._cancelled, deque()
        for job in cancelled:
            self._free(job)

    def _admit(self) -> None:
        """Add images to loops: first those between two loops, which are half done, then those of the queue in order of
        arrival."""
        for place, job, image in self._in_flight.take_waiting():
            try:
                self._in_flight.start(place, job, image)
            except Exception as error:
                self._fail({job}, error)
        if self._idle_work_overdue():
            return
        for failed, cause in self._turns.update(self._waiting, self._in_flight.of):
            self._fail(set() if failed is None else {failed}, cause)
        images_ahead, full_loops = 0, set[ModelLoop]()
        for job in list(self._waiting):
            job.images_ahead = images_ahead
            images_ahead += len(job.waiting_images)
            place = first_loop(job)
            if place in full_loops or not self._turns.admits(job):
                continue
            sizes = self._in_flight.sizes
            if place.size not in sizes and len(sizes) >= self.limits.sizes_at_once:
                break  # a new size waits for a free size slot, in order of arrival: later jobs could starve it
            try:
                self._admit_job(job, place)
            except Exception as error:
                self._fail({job}, error)
            if not job.done and job.waiting_images:
                full_loops.add(place)
        self._waiting = [job for job in self._waiting if not job.done and job.waiting_images]

    def _admit_job(self, job: Job, place: ModelLoop) -> None:
        """Add as many images of a job as may join."""
        while job.waiting_images and one_more_may_join(job, place, self._in_flight, self._waiting):
            is_first = not job.joined_count
            if is_first:
                job.end_stage("queue")
                metrics.QUEUE_WAIT.observe(job.seconds_queued())
            key = job.runner.advance(job.plan, job.waiting_images[0], job.encoded)
            if is_first:
                job.end_stage(job.runner.stages[0].timing)
            image = job.waiting_images.popleft()
            job.images_ahead = 0
            self._leave_queue(1)
            if key is None:
                self._workers.submit_image(job, image)
            elif self._in_flight.in_loops and not image.inputs_ready:
                self._in_flight.wait(ModelLoop(job.runner, key), job, image)
            else:
                self._in_flight.start(ModelLoop(job.runner, key), job, image)

    def _leave_queue(self, images: int) -> None:
        with self._wakeup:
            self._queued_images -= images
            metrics.QUEUE.set(self._queued_images)

    def _step(self, place: ModelLoop) -> None:
        component, loop = place.unet, place.loop
        jobs = {image: self._in_flight.job_of(image) for image in loop.images}
        if not jobs:  # all of its images are still being encoded
            self._in_flight.end_turn()
            return
        began = time.perf_counter()
        try:
            finished = loop.step()
        except Exception as error:
            self._fail(set(jobs.values()), error)
            return
        metrics.STEP_SECONDS.labels(component).observe(time.perf_counter() - began)
        metrics.STEP_IMAGES.labels(component).observe(len(jobs))
        metrics.STEPS.labels(component).inc()
        for image in finished:
            self._in_flight.leave(image)
        for image, job in jobs.items():
            if job.done:
                continue
            try:
                self._emit_progress(loop, job, image, image in finished)
                if image in finished:
                    self._finish_loop(job, image)
            except Exception as error:
                self._fail({job}, error)
        self._in_flight.end_turn()
        self._in_flight.drop_empty_loops()

    def _emit_progress(self, loop: Loop, job: Job, image: ImageState, finished: bool) -> None:
        job.steps_done += image.plan.steps_of(image.step - 1)
        if job.listener is None:
            return
        done = job.steps_done
        preview_map = job.runner.preview_map
        if finished or preview_map is None or not job.takes_preview(image):
            job.report_step(done)
            return
        preview = Preview(preview_map, loop.latents(image))
        self._workers.submit_preview(job, done, image.index, preview)

    def _finish_loop(self, job: Job, image: ImageState) -> None:
        """Pass an image whose steps in a loop are done to its next loop, or to the output workers."""
        job.end_stage(job.runner.current_timing(image))
        key = job.runner.advance(job.plan, image, job.encoded)
        if key is None:
            self._workers.submit_image(job, image)
            return
        self._in_flight.wait(ModelLoop(job.runner, key), job, image)

    def _free(self, job: Job) -> None:
        """Remove a job from the queue, its images in flight, and what was encoded for them."""
        if job in self._waiting:
            self._waiting.remove(job)
        if job.waiting_images:
            self._leave_queue(len(job.waiting_images))
            job.waiting_images.clear()
        self._in_flight.remove(job)
        job.encoded.clear()

    def _unfinished_jobs(self) -> set[Job]:
        return self._in_flight.jobs | set(self._waiting)

    def _fail(self, jobs: set[Job], error: Exception) -> None:
        """Fail `jobs` with an error of their work. If the device has failed, fail all other jobs too."""
        before = self._failure
        if not isinstance(error, BrokenImage | AdapterError | ReleaseNotLoaded):
            logger.error("A step of the scheduler failed.", exc_info=error)
            self._check_device(error)
        failure = None if self._failure is None else Unavailable(self._failure)
        for job in jobs if failure is None else jobs | self._unfinished_jobs():
            job.fail(failure or error)
            self._free(job)
        if failure is not None and before is None:
            self._on_device_failure()

    def _fail_all(self, error: Exception) -> None:
        """Fail all jobs with an error that no job's work has caused. If that fails too, this server has failed."""
        try:
            self._fail(self._unfinished_jobs(), error)
        except Exception:
            if self._failure is None:
                logger.exception("The scheduler failed.")
            self.abandon("The scheduler has failed; this server is being replaced.")
            with self._wakeup:
                self._wakeup.wait(IDLE_SECONDS)  # the next try fails, too

    def _check_device(self, error: Exception) -> None:
        """Set `_failure` if the GPU has failed: a CUDA error lasts until its process ends."""
        cause: Exception = error
        if self._device.type == "cuda":
            try:
                torch.cuda.synchronize(self._device)
            except Exception as device_error:
                cause = device_error
        if isinstance(cause, torch.AcceleratorError):
            with self._wakeup:
                reason = str(cause).partition("\n")[0]
                self._failure = f"The GPU has failed ({reason}); this server is being replaced."

    def _wake(self) -> None:
        """Let the thread, which may wait for weights, decide again. Any thread may call it."""
        self.call(lambda: None)

    # -- callbacks of the output workers ------------------------------------------------------------------------------

    def _count_image(self, job: Job, index: int, pixels: Pixels) -> None:
        metrics.IMAGES.labels(job.params.task).inc()
        metrics.IMAGE_EVALUATIONS.observe(job.plan.evaluations)
        comparison = self.comparison if self.comparison and self.comparison.model is job.runner.model else None
        if comparison is not None and comparison.offer(job.params, index, pixels):
            with self._wakeup:
                self._wakeup.notify()
        now, last = time.monotonic(), self._last_image
        self._last_image = now
        if last is not None and self._queued_images:
            self._seconds_per_image += 0.1 * (now - last - self._seconds_per_image)

    def _fail_from_worker(self, job: Job, error: Exception) -> None:
        """Fail a job on the scheduler's thread, which owns it."""
        self.call(lambda: None if job.done else self._fail({job}, error))
