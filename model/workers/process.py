"""The process of a worker: it loads the releases on its own GPUs, and generates the images that the server asks for.

It ends when the server ends. After a failure of its device it ends with exit code 70.
"""

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from model.child_process import FAILED_EXIT_CODE, end_with_parent
from model.cold_start import ColdStart, seconds_since_process_start
from model.errors import Cancelled, PreheatError
from model.loading import preload_torch
from model.scheduling.job import ImageEvent, StepEvent
from model.settings import Settings
from model.store.store import open_store
from model.workers.channel import Sender
from model.workers.messages import (
    Cancel,
    Failed,
    Finished,
    LoadFailed,
    Logged,
    Planned,
    Progress,
    Ready,
    Samples,
    Start,
    Status,
    Submit,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

    from model.scheduling.job import GenerationResult, Job
    from model.scheduling.scheduler import Scheduler

UNLIMITED_IMAGES = 2**31  # the server limits the queue
STATUS_SECONDS = 0.1
METRICS_SECONDS = 1.0
_FLUSH_SECONDS = 1.0  # for the last messages of a process that ends

logger = logging.getLogger("preheat")


def main(connection_number: int) -> None:
    """Run a worker. `connection_number`: the file descriptor of the connection to the server."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a group; the server handles them
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    preload_torch.start(lambda gpus: True)
    connection = Connection(connection_number)
    sender = Sender(connection)
    logging.basicConfig(level=logging.INFO, handlers=[_LogSender(sender)])
    try:
        start: Start = connection.recv()
        scheduler = _load(start.settings, start.secrets, sender)
        Worker(scheduler, sender).serve(connection)
    except (EOFError, OSError):
        os._exit(0)  # the server has ended


def _load(settings: Settings, secrets: Mapping[str, str], sender: Sender) -> "Scheduler":
    """Load the releases and report them. If that fails, report the error and end the process."""
    limits = settings.limits.model_copy(update={"max_queue": UNLIMITED_IMAGES})
    settings = settings.model_copy(update={"limits": limits})
    cold_start = ColdStart()
    gc.disable()  # garbage collection costs a tenth of the load and frees almost nothing
    try:
        preload_torch.import_torch()
        from model.serving import end_failed_process, start_server

        cold_start.record("import", seconds_since_process_start())
        open_own = partial(open_store, settings.required("store"), settings.store_options(secrets))
        loaded, scheduler = start_server(settings, secrets, open_own, cold_start, end_failed_process)
    except Exception as error:
        if not isinstance(error, PreheatError):
            logger.exception("A worker could not load the release.")
        sender.send(LoadFailed(sendable(error)))
        time.sleep(_FLUSH_SECONDS)
        os._exit(FAILED_EXIT_CODE)
    gc.enable()
    sender.send(Ready([one.summary for one in loaded], cold_start.phases))
    return scheduler


class Worker:
    """Serves the requests of one connection on a scheduler."""

    def __init__(self, scheduler: "Scheduler", sender: Sender) -> None:
        self._scheduler = scheduler
        self._sender = sender
        self._lock = threading.Lock()  # guards the next two
        self._jobs: dict[int, Job] = {}
        self._seen = 0

    def serve(self, connection: Connection) -> None:
        """Handle messages until the connection ends. Raises EOFError or OSError then."""
        threading.Thread(target=self._report, name="preheat-status", daemon=True).start()
        while True:
            message: Submit | Cancel = connection.recv()
            if isinstance(message, Submit):
                self._submit(message)
            elif (job := self._jobs.get(message.number)) is not None:
                self._scheduler.cancel(job, Cancelled("The request was answered."))

    def _submit(self, request: Submit) -> None:
        listener = partial(self._emit, request.number, request.streams)
        try:
            job = self._scheduler.submit(
                request.params, listener, request.preview_every, request.model, request.adapters, request.indices
            )
        except Exception as error:
            self._sender.send(Failed(request.number, sendable(error)))
        else:
            self._sender.send(Planned(request.number, job.steps, job.images_ahead, job.plan.warnings))
            with self._lock:
                self._jobs[request.number] = job
            job.result.add_done_callback(partial(self._finish, request.number))
        with self._lock:
            self._seen = request.number

    def _emit(self, number: int, streams: bool, event: StepEvent | ImageEvent) -> None:
        if streams or isinstance(event, ImageEvent):
            self._sender.send(Progress(number, event))

    def _finish(self, number: int, result: "Future[GenerationResult]") -> None:
        with self._lock:
            del self._jobs[number]
        error = result.exception()
        if error is None:
            self._sender.send(Finished(number, result.result().timings))
        else:
            self._sender.send(Failed(number, sendable(error)))

    def _report(self) -> None:
        """Send a status at intervals, now and then with the metrics."""
        from model.workers.merged_metrics import snapshot

        sent = 0.0
        while True:
            with self._lock:
                seen = self._seen
                ahead = {number: job.images_ahead for number, job in self._jobs.items()}
            counters: dict[str, Samples] = {}
            gauges: dict[str, Samples] = {}
            if time.monotonic() > sent + METRICS_SECONDS:
                counters, gauges = snapshot()
                sent = time.monotonic()
            scheduler = self._scheduler
            health, queued, retry = scheduler.healthy(), scheduler.queued_images, scheduler.retry_after()
            placed, adapters = scheduler.placed, scheduler.adapters_on_device
            self._sender.send(Status(health, seen, queued, retry, ahead, placed, adapters, counters, gauges))
            time.sleep(STATUS_SECONDS)


def sendable(error: BaseException) -> Exception:
    """Return an error that another process can restore: its own class only if it is one of model/."""
    return error if isinstance(error, PreheatError) else RuntimeError(f"{type(error).__name__}: {error}")


class _LogSender(logging.Handler):
    """Passes the log to the server, which writes it in its own format."""

    def __init__(self, sender: Sender) -> None:
        super().__init__()
        self._sender = sender

    def emit(self, record: logging.LogRecord) -> None:
        self._sender.send(Logged(record.levelno, self.format(record)))
