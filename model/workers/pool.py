"""Several workers behind one scheduler: each is a process with its own GPUs, which loads and generates by itself.

The pool limits the queue and gives each request to the worker with the least work left. If a worker ends, hangs or
reports a failure of its device, its requests go to other workers, without the images that have arrived. The worker is
started again in the background. While none is left, requests are answered with Unavailable.

This module imports no torch, so that workers can be started before that import.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from model.cold_start import ColdStart
from model.errors import PreheatError, Unavailable
from model.loading.served import ServedRelease
from model.pipeline.params import GenerationParams
from model.scheduling.interface import Listener, check_queue
from model.scheduling.job import ImageEvent, StepEvent
from model.settings import Settings, plain_secrets
from model.store.adapter_record import AdapterRecord
from model.workers.messages import (
    Cancel,
    Failed,
    Finished,
    Logged,
    Planned,
    Progress,
    Status,
    Submit,
    WhileServing,
)
from model.workers.supervisor import LOAD_SECONDS, Events, Supervisor
from model.workers.worker import PoolJob, Worker, worker_variables

if TYPE_CHECKING:
    from model.workers.merged_metrics import AddedMetrics

logger = logging.getLogger("preheat")

MAX_ATTEMPTS = 3  # workers that a request is given to: it may itself be what ends them
# A worker that stood still, as in a frozen container, reports a step that took too long, and then goes on.
UNHEALTHY_STATUSES = 20  # in a row, ten a second, after which a worker is ended
_WATCH_SECONDS = 0.2
_REPEATED = "The processes that had this request have ended, so it may be their cause."
_NONE_LEFT = "All processes that generate images have ended; they are being started again."


class WorkerPool:
    """Implements `JobScheduler`. Constructing it starts the workers. Any thread may call it."""

    def __init__(
        self,
        settings: Settings,
        secrets: Mapping[str, str],
        workers: int,
        gpus: int,
        start: Callable[[int], Worker] | None = None,
    ) -> None:
        """`gpus`: those that this process sees, 0 for a CPU. `start`: starts a worker; may raise OSError."""
        self.limits = settings.limits
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()  # guards the next three, the workers' jobs and the jobs
        self._failure = _NONE_LEFT  # the last reason why a worker ended
        self._last_given: dict[int, int] = {}  # the number of the last request of each worker
        self._workers: dict[int, Worker] = {}
        self._metrics: AddedMetrics | None = None
        self._closed = threading.Event()
        start = start or partial(_start_worker, settings, plain_secrets(secrets), workers, gpus)
        events = Events(self._add, self._begin, self._receive, self._end)
        self._supervisor = Supervisor(workers, start, events, self._closed)
        threading.Thread(target=self._watch, name="preheat-watch", daemon=True).start()

    def wait_ready(self, cold_start: ColdStart) -> list[ServedRelease]:
        """See `Supervisor.wait_ready`. Records the phases of the slowest worker."""
        loaded = self._supervisor.wait_ready()
        slowest = max(loaded, key=lambda ready: sum(ready.phases.values()))
        for phase, seconds in slowest.phases.items():
            cold_start.record(phase, seconds)
        return loaded[0].releases

    def add_metrics(self) -> None:
        """Add the metrics of the workers to those of this process. Imports torch."""
        from model.workers.merged_metrics import AddedMetrics

        self._metrics = AddedMetrics()
        self._metrics.install()

    # -- JobScheduler -------------------------------------------------------------------------------------------------

    def submit(
        self,
        params: GenerationParams,
        listener: Listener | None,
        preview_every: int,
        model: int = 0,
        adapters: Sequence[AdapterRecord] = (),
    ) -> PoolJob:
        """See `JobScheduler`. What only a worker can refuse is the error of the job."""
        with self._lock:
            self.check_acceptable(params.num_images)
            job = PoolJob(params, listener, preview_every, model, adapters)
            self._give(job)
        return job

    def check_acceptable(self, count: int) -> None:
        with self._lock:
            serving = self._serving()
            if not serving:
                raise Unavailable(self._failure)
            check_queue(sum(worker.queued for worker in serving), count, self.limits.max_queue, self.retry_after)

    def retry_after(self) -> int:
        """Return the seconds, 1 to 60, in which half of the queue should be finished."""
        with self._lock:
            return max((worker.status.retry_after for worker in self._serving()), default=1)

    def cancel(self, job: PoolJob, error: PreheatError) -> None:
        if not job.fail(error):
            return
        with self._lock:
            for worker in self._workers.values():
                for number in [number for number, given in worker.jobs.items() if given is job]:
                    del worker.jobs[number]
                    worker.send(Cancel(number))

    def healthy(self) -> bool:
        """True if at least one worker serves."""
        with self._lock:
            return bool(self._serving())

    @property
    def adapters_on_device(self) -> frozenset[str]:
        """The adapters whose factors are on the device of some worker."""
        with self._lock:
            return frozenset().union(*(worker.status.adapters for worker in self._serving()))

    def close(self) -> None:
        """End the workers. All accepted requests are answered with Unavailable."""
        self._closed.set()
        with self._lock:
            self._failure = "This server has ended."
            workers = list(self._workers.values())
        for worker in workers:
            worker.kill("the server ended")
            self._retire(worker)
        self._supervisor.join()
        if self._metrics is not None:
            self._metrics.remove()
            self._metrics = None

    # -- requests -----------------------------------------------------------------------------------------------------

    def _serving(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.ready]

    def _give(self, job: PoolJob) -> bool:
        """Give a request's missing images to the worker with the least work. Return False if none is left.

        The load of a release that a worker lacks counts as much as the request. A worker has a release from the first
        request for it until a status says otherwise. Among equal workers one that has the release is chosen, and then
        the one that was given a request the longest time ago. Called with the lock.
        """
        serving = self._serving()
        if not serving or job.attempts >= MAX_ATTEMPTS:
            return False

        def cost(worker: Worker) -> tuple[int, int, int]:
            load = 0 if job.model in worker.placed else job.work
            return worker.work + load, load, self._last_given.get(worker.number, 0)

        worker = min(serving, key=cost)
        number = next(self._numbers)
        self._last_given[worker.number] = number
        worker.jobs[number] = job
        new = tuple(record for record in job.adapters if (job.model, record.name) not in worker.adapters)
        worker.adapters |= {(job.model, record.name) for record in new}
        worker.placed.add(job.model)
        streams = job.listener is not None
        worker.send(Submit(number, job.model, job.params, job.give(), streams, job.preview_every, new))
        return True

    def _retire(self, worker: Worker) -> None:
        """Give a worker no further requests, and its own to others."""
        unavailable: list[PoolJob] = []
        with self._lock:
            worker.ready = False
            jobs, worker.jobs = list(worker.jobs.values()), {}
            complete = [job for job in jobs if not job.missing]
            for job in jobs:
                if job.missing and not job.result.done():
                    if self._give(job):
                        worker.moved += 1
                    else:
                        unavailable.append(job)
            reason = self._failure if not self._serving() else _REPEATED
        for job in complete:  # outside the lock: callbacks of results run here
            job.finish({})
        for job in unavailable:
            job.fail(Unavailable(reason))

    def _receive(self, worker: Worker, message: WhileServing) -> None:
        """Handle a message of a worker."""
        if isinstance(message, Status):
            self._take_status(worker, message)
            return
        if isinstance(message, Logged):
            logger.log(message.level, message.text)
            return
        with self._lock:
            job = worker.jobs.get(message.number)
            if job is None:  # it was answered
                return
            if isinstance(message, Finished | Failed) and not _is_unavailable(message):
                del worker.jobs[message.number]
            if isinstance(message, Planned):
                job.warnings, job.images_ahead = message.warnings, message.images_ahead
                job.plan(message.steps)
            if isinstance(message, Progress):  # with the lock: an event must not arrive after one of another worker
                self._emit(job, message.event)
        if isinstance(message, Finished):
            job.finish(message.timings)
        elif isinstance(message, Failed) and _is_unavailable(message):
            with self._lock:
                self._failure = str(message.error)
            worker.kill_later("its device failed")
            self._retire(worker)
        elif isinstance(message, Failed):
            job.fail(message.error)

    def _emit(self, job: PoolJob, event: StepEvent | ImageEvent) -> None:
        """Store an image, and call the listener. Called with the lock."""
        if isinstance(event, ImageEvent):
            job.images[event.index] = event
        reported = job.progress(event) if isinstance(event, StepEvent) else event
        if reported is None or job.listener is None or job.result.done():
            return
        try:
            job.listener(reported)
        except Exception:  # of this request only
            logger.exception("An event cannot be sent.")

    def _take_status(self, worker: Worker, status: Status) -> None:
        with self._lock:
            worker.status = status
            worker.placed = {*status.placed, *(job.model for job in worker.jobs.values())}
            for number, ahead in status.images_ahead.items():
                if number in worker.jobs:
                    worker.jobs[number].images_ahead = ahead
        if self._metrics is not None and (status.counters or status.gauges):
            self._metrics.update(worker.number, status.counters, status.gauges)
        worker.unhealthy = 0 if status.healthy else worker.unhealthy + 1
        if worker.ready and worker.unhealthy >= UNHEALTHY_STATUSES:
            self._retire_hanging(worker, "its device failed, or ")

    def _retire_hanging(self, worker: Worker, cause: str = "") -> None:
        worker.kill(f"{cause}no step ended within {self.limits.stuck_seconds:g} s")
        self._retire(worker)

    # -- the life of the workers --------------------------------------------------------------------------------------

    def _add(self, worker: Worker) -> None:
        with self._lock:
            self._workers[worker.number] = worker

    def _begin(self, worker: Worker) -> None:
        with self._lock:
            worker.ready = True
            self._failure = _NONE_LEFT

    def _end(self, worker: Worker) -> None:
        self._retire(worker)
        if self._metrics is not None:
            self._metrics.end(worker.number)

    def _watch(self) -> None:
        """End workers that are silent for too long. A time in which this process itself stood still does not count."""
        while not self._closed.wait(_WATCH_SECONDS):
            with self._lock:
                workers = list(self._workers.values())
            for worker in workers:
                worker.silent_seconds += _WATCH_SECONDS
                if worker.ready and worker.silent_seconds > self.limits.stuck_seconds:
                    self._retire_hanging(worker)
                elif not worker.ready and worker.silent_seconds > LOAD_SECONDS:
                    worker.kill(f"it did not load the release within {LOAD_SECONDS:g} s")


def _start_worker(settings: Settings, secrets: Mapping[str, str], workers: int, gpus: int, number: int) -> Worker:
    return Worker(number, settings, secrets, worker_variables(number, workers, settings, gpus))


def _is_unavailable(message: object) -> bool:
    return isinstance(message, Failed) and isinstance(message.error, Unavailable)
