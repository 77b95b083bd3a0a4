"""Networks compiled one after the other in this process, or several side by side in processes of their own.

Compiling keeps one core busy for most of its time, whatever it compiles for. A process of its own loads the one network
that it compiles, so side by side takes that much more memory, the device's too. It ends with the build that started it,
also where that was killed.
"""

import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch

from engine_builder.backends.aot_inductor import compile as compiler
from engine_builder.backends.aot_inductor.compile import (
    Compiled,
    CompileError,
)
from engine_builder.networks.network import (
    ModelFolder,
    Network,
    Reader,
    load_network,
)
from model.engines import components
from model.errors import PreheatError
from model.loading.target import Target
from model.store.manifest import Bucket, Precision

_GRACE = 2.0  # seconds for a process to end by itself


@dataclass(frozen=True)
class Job:
    """One engine to be compiled, into the file `package`; `key` is the engine's."""

    key: str
    folder: ModelFolder
    component: str
    precision: Precision
    target: Target
    bucket: Bucket
    package: Path


@dataclass(frozen=True)
class Done:
    """What came of a job, and how long compiling took."""

    job: Job
    compiled: Compiled
    seconds: float


def default_processes(target: Target) -> int:
    """As many as a CPU has cores, four at most; one on a GPU, whose memory each process would take a part of, and where
    what the compiler times would be slower for what others do meanwhile."""
    return min(4, len(os.sched_getaffinity(0))) if target.device == "cpu" else 1


def compile_jobs(
    jobs: Sequence[Job], networks: dict[str, Network], processes: int, begun: Callable[[Job], None]
) -> Generator[Done, None, None]:
    """Compile `jobs`, at most `processes` at once, and give each when it is done. With one, or for one job, in this
    process, with `networks`, in the jobs' order; else the longest first. Raises CompileError, after which, as when it
    is closed, nothing goes on."""
    if processes > 1 and len(jobs) > 1:
        yield from _side_by_side(sorted(jobs, key=lambda job: job.component not in components.LOOPED), processes, begun)
        return
    for job in jobs:
        begun(job)
        yield _compile(job, networks[job.component])


def _compile(job: Job, network: Network) -> Done:
    began = time.perf_counter()
    compiled = compiler.compile_network(network, job.target, job.bucket, job.package)
    return Done(job, compiled, time.perf_counter() - began)


def _side_by_side(jobs: Sequence[Job], processes: int, begun: Callable[[Job], None]) -> Generator[Done, None, None]:
    waiting = deque(jobs)
    workers: dict[Connection, SpawnProcess] = {}
    busy: dict[Connection, Job] = {}
    processes = min(processes, len(jobs))
    threads = max(1, len(os.sched_getaffinity(0)) // processes)

    def hand_on(worker: Connection) -> None:
        busy[worker] = job = waiting.popleft()
        begun(job)
        with suppress(ConnectionError):  # of a process that has ended, which is met when its answer is awaited
            worker.send(job)

    try:
        for _ in range(processes):
            here, there = get_context("spawn").Pipe()
            workers[here] = get_context("spawn").Process(target=_work, args=(there, threads))
            workers[here].start()
            there.close()
            hand_on(here)
        while busy:
            for worker in wait(list(busy)):
                assert isinstance(worker, Connection)
                answer = _answer(worker, workers[worker], busy.pop(worker))
                if waiting:
                    hand_on(worker)
                yield answer
    finally:
        for worker, process in workers.items():
            worker.close()
            if worker in busy:
                process.terminate()
            process.join(_GRACE)
            if process.is_alive():
                process.kill()
                process.join()


def _answer(worker: Connection, process: SpawnProcess, job: Job) -> Done:
    try:
        answer: Done | Exception = worker.recv()
    except (EOFError, ConnectionError) as error:
        process.join()
        raise CompileError(
            f"The process that compiled the {job.component} ended with status {process.exitcode}; if memory was short, "
            "build with --jobs 1."
        ) from error
    if isinstance(answer, Exception):
        raise answer
    return answer


def _work(builder: Connection, threads: int) -> None:
    """Compile what comes through `builder` until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the build's, which ends this process
    threading.Thread(target=_end_with_the_build, daemon=True).start()
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        torch._inductor.config.compile_threads = threads
    reader = Reader()
    while True:
        try:
            job: Job = builder.recv()
        except EOFError:
            return
        answer: Done | Exception
        try:
            network = load_network(job.folder, job.component, job.precision, job.target.device, reader)
            answer = _compile(job, network)
        except PreheatError as error:
            answer = error
        except Exception:
            answer = CompileError(f"Compiling the {job.component} failed:\n{traceback.format_exc()}")
        try:
            builder.send(answer)
        except BrokenPipeError:
            return


def _end_with_the_build() -> None:
    build = parent_process()
    assert build is not None
    build.join()
    os._exit(1)
