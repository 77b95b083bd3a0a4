"""The server's side of one worker: its process, its connection, and the requests that it has."""

import os
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace

from model.child_process import shut_down, start_connected_child, visible_gpu
from model.denoising.forecast import evaluation_count
from model.errors import WorkerFailed
from model.pipeline.params import GenerationParams
from model.scheduling.interface import Listener
from model.scheduling.job import GenerationResult, ImageEvent, StepEvent, assemble
from model.settings import Settings
from model.store.adapter_record import AdapterRecord
from model.workers.channel import Sender
from model.workers.messages import FromWorker, Start, Status

EXIT_SECONDS = 10.0  # in which a killed process ends, unless a driver holds it


@dataclass(eq=False)
class PoolJob:
    """A request that workers generate. Implements `RequestJob`. The pool's lock guards what is not a future."""

    params: GenerationParams
    listener: Listener | None
    preview_every: int
    model: int = 0
    adapters: Sequence[AdapterRecord] = ()
    result: "Future[GenerationResult]" = field(default_factory=Future)
    planned: "Future[None]" = field(default_factory=Future)
    steps: int = 0
    images_ahead: int = 0
    attempts: int = 0  # workers that have had it
    images: dict[int, ImageEvent] = field(default_factory=dict)  # those that have arrived, by index
    warnings: list[str] = field(default_factory=list)
    _given: int = 0  # images that the last worker was given
    _steps_done: int = 0  # of the last event
    _steps_held: int = 0  # of the last event before the request went to another worker

    @property
    def missing(self) -> tuple[int, ...]:
        """The indices of the images that have not arrived."""
        return tuple(index for index in range(self.params.num_images) if index not in self.images)

    @property
    def work(self) -> int:
        """A measure of what is left to do: evaluations of images, by their pixels."""
        params = self.params
        evaluations = evaluation_count(params.used_forecast, params.num_inference_steps)
        return len(self.missing) * evaluations * params.width * params.height

    def give(self) -> tuple[int, ...]:
        """Count another worker, and return the indices of the images that it must generate."""
        self.attempts += 1
        self._given = len(self.missing)
        self._steps_held = self._steps_done
        return self.missing

    def plan(self, steps: int) -> None:
        """Set the request's steps from `steps`, of the images that a worker was given. Later calls change nothing."""
        self.steps = self.steps or steps * self.params.num_images // self._given
        with suppress(InvalidStateError):
            self.planned.set_result(None)

    def progress(self, event: StepEvent) -> StepEvent | None:
        """Return a worker's event as one of the whole request. None: an earlier worker has reported that step.

        Images that the worker was not given count as done. At another worker, unfinished images begin again. Neither
        steps nor previews are reported until the request is further than before, so that progress never goes back.
        """
        self.plan(event.steps)
        done = self.steps - event.steps + event.step
        if done <= self._steps_held:
            return None
        self._steps_done = done
        return replace(event, step=done, steps=self.steps)

    def finish(self, timings: dict[str, float]) -> None:
        """Answer with the images, which must all have arrived, unless the request was answered before."""
        with suppress(InvalidStateError):
            self.planned.set_result(None)
        with suppress(InvalidStateError):
            self.result.set_result(assemble(self.images, timings, self.warnings))

    def fail(self, error: Exception) -> bool:
        """Answer with `error`. Return False if the request was answered before."""
        try:
            self.result.set_exception(error)
        except InvalidStateError:
            return False
        with suppress(InvalidStateError):
            self.planned.set_exception(error)
        return True


class Worker:
    """One process. Its constructor starts it, and raises OSError if that fails."""

    def __init__(
        self, number: int, settings: Settings, secrets: Mapping[str, str], variables: Mapping[str, str]
    ) -> None:
        """`number`: from 0. `variables`: see `worker_variables`."""
        self.number = number
        self._process, self._connection = start_connected_child("model.workers.process.main", variables)
        self._sender = Sender(self._connection)
        self.send(Start(settings, dict(secrets)))
        self.ready = False
        self.jobs: dict[int, PoolJob] = {}  # by number
        self.status = Status(True, 0, 0, 1, {})  # the last one
        self.adapters: set[tuple[int, str]] = set()  # those that it was sent, by release
        self.placed = {0}  # `placed` of the last status, and the releases of later requests
        self.silent_seconds = 0.0  # since the last message
        self.unhealthy = 0  # statuses in a row that say so
        self.reason = ""  # why it was ended
        self.moved = 0  # requests that went to other workers

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def work(self) -> int:
        """What is left to do; see `PoolJob.work`."""
        return sum(job.work for job in self.jobs.values())

    @property
    def queued(self) -> int:
        """Images that wait for a loop, or are not known to have joined one."""
        unseen = [job for number, job in self.jobs.items() if number > self.status.seen]
        return self.status.queued + sum(len(job.missing) for job in unseen)

    def send(self, message: object) -> None:
        """Send a message. Returns at once."""
        self._sender.send(message)

    def messages(self) -> Iterator[FromWorker]:
        """Yield the worker's messages until its connection ends."""
        with suppress(EOFError, OSError):
            while True:
                message: FromWorker = self._connection.recv()
                self.silent_seconds = 0.0
                yield message

    def kill(self, reason: str) -> None:
        """End the process and its connection. `messages` then ends, even if the process cannot be killed."""
        self.reason = self.reason or reason
        self._process.kill()
        with suppress(OSError):
            shut_down(self._connection)

    def kill_later(self, reason: str) -> None:
        """End the process unless it ends by itself soon."""
        self.reason = self.reason or reason
        timer = threading.Timer(EXIT_SECONDS, self.kill, [reason])
        timer.daemon = True
        timer.start()

    def reap(self) -> int | None:
        """Wait for the end of the process after the end of its connection. Returns its exit code, None if it hangs."""
        if self._sender.close():
            self._connection.close()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(EXIT_SECONDS)
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(EXIT_SECONDS)
        return None


def worker_variables(number: int, workers: int, settings: Settings, gpus: int) -> dict[str, str]:
    """Return the environment variables of a worker: its GPUs, or on a CPU its share of the cores.

    gpus: those that this process sees, 0 for a CPU.
    """
    if gpus:
        first = number * settings.gpus_per_image
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(
                visible_gpu(gpu, gpus) for gpu in range(first, first + settings.gpus_per_image)
            )
        }
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    cores = len(os.sched_getaffinity(0))
    return {"OMP_NUM_THREADS": str(max(1, cores // (workers * settings.gpus_per_image)))}


def load_error(number: int, workers: int, code: int | None) -> WorkerFailed:
    """Return the error of a worker whose process ended during its load."""
    ending = "does not end" if code is None else f"ended with exit code {code}"
    return WorkerFailed(f"Worker {number} of {workers} did not load the release: its process {ending}.")
