"""Compile networks one after the other in this process, or several at once in worker processes.

Compiling keeps one core busy most of the time, also for a GPU. Each worker process loads the network that it compiles,
so it takes memory for one network, also on the device. Workers end with the build that started them, even if it was
killed.
"""

import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch

from engine_builder.backends.aot_inductor import compile as compiler
from engine_builder.backends.aot_inductor.compile import CompiledNetwork
from engine_builder.backends.built import CompileError
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.networks.network import ModuleReader, Network, load_network
from engine_builder.quantization.quantize import quantize_layers
from engine_builder.worker_process import end_process, end_with_parent, kill_process
from model.errors import PreheatError
from model.loading.target import Target
from model.pipeline.components import find_component
from model.store.manifest import Bucket
from model.store.precision import FP8, Precision

_MAX_DEFAULT_PROCESSES = 4


@dataclass(frozen=True)
class CompileJob:
    """One engine to compile into the file `package`.

    key: the engine key. precision: of the network as it is loaded. clips: of the layers that are then quantized,
    to the precision `quantized`. lora_rank, text_chunks: see `load_network`.
    """

    key: str
    checkpoint: Checkpoint
    component: str
    precision: Precision
    target: Target
    bucket: Bucket
    package: Path
    clips: Mapping[str, float] = field(default_factory=dict)
    quantized: Precision = FP8
    lora_rank: int = 0
    text_chunks: int | None = 1


@dataclass(frozen=True)
class CompileResult:
    """The result of a job, and how many seconds compiling took."""

    job: CompileJob
    compiled: CompiledNetwork
    seconds: float


def default_processes(target: Target) -> int:
    """Return the default number of worker processes: the number of CPU cores, at most four; one on a GPU.

    On a GPU each process takes device memory, and concurrent processes distort the compiler's timings.
    """
    if target.device != "cpu":
        return 1
    return min(_MAX_DEFAULT_PROCESSES, len(os.sched_getaffinity(0)))


def compile_jobs(
    jobs: Sequence[CompileJob], networks: dict[str, Network], processes: int, on_start: Callable[[CompileJob], None]
) -> Generator[CompileResult, None, None]:
    """Compile `jobs`, at most `processes` at once, and yield each result when it is ready.

    With one process or one job, compile in this process with `networks`, in order. Otherwise start with the components
    that take longest. `on_start` is called before each job. Raises CompileError. No process remains after an error or
    when the generator is closed.
    """
    if processes > 1 and len(jobs) > 1:
        longest_first = sorted(jobs, key=lambda job: find_component(job.component).phase != "step")
        yield from _compile_in_processes(longest_first, processes, on_start)
        return
    for job in jobs:
        on_start(job)
        yield _compile(job, networks[job.component])


def _compile(job: CompileJob, network: Network) -> CompileResult:
    started = time.perf_counter()
    compiled = compiler.compile_network(network, job.target, job.bucket, job.package)
    return CompileResult(job, compiled, time.perf_counter() - started)


def _compile_in_processes(
    jobs: Sequence[CompileJob], processes: int, on_start: Callable[[CompileJob], None]
) -> Generator[CompileResult, None, None]:
    waiting = deque(jobs)
    workers: dict[Connection, SpawnProcess] = {}
    running: dict[Connection, CompileJob] = {}
    processes = min(processes, len(jobs))
    threads = max(1, len(os.sched_getaffinity(0)) // processes)

    def send_next(worker: Connection) -> None:
        running[worker] = job = waiting.popleft()
        on_start(job)
        with suppress(ConnectionError):  # the process has ended; `_receive` raises the error
            worker.send(job)

    torch.cuda.empty_cache()  # the processes need what PyTorch keeps of memory that was freed
    try:
        for _ in range(processes):
            builder_end, worker_end = get_context("spawn").Pipe()
            workers[builder_end] = get_context("spawn").Process(target=_run_worker, args=(worker_end, threads))
            workers[builder_end].start()
            worker_end.close()
            send_next(builder_end)
        while running:
            for worker in wait(list(running)):
                assert isinstance(worker, Connection)
                result = _receive(worker, workers[worker], running.pop(worker))
                if waiting:
                    send_next(worker)
                else:
                    worker.close()
                    end_process(workers[worker])  # the checks need the memory that it holds
                yield result
                torch.cuda.empty_cache()  # frees what the check used
    finally:
        for worker, process in workers.items():
            worker.close()
            if worker in running:
                kill_process(process)
            end_process(process)


def _receive(worker: Connection, process: SpawnProcess, job: CompileJob) -> CompileResult:
    try:
        result: CompileResult | Exception = worker.recv()
    except (EOFError, ConnectionError) as error:
        process.join()
        raise CompileError(
            f"The process that compiled the {job.component} ended with status {process.exitcode}.",
            "If memory was short, build with --jobs 1.",
        ) from error
    if isinstance(result, Exception):
        raise result
    return result


def _run_worker(builder: Connection, threads: int) -> None:
    """Compile the jobs that `builder` sends until it is closed."""
    end_with_parent()
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        torch._inductor.config.compile_threads = threads
    reader = ModuleReader()
    while True:
        try:
            job: CompileJob = builder.recv()
        except (EOFError, ConnectionError):
            return
        result: CompileResult | Exception
        try:
            network = load_network(
                job.checkpoint,
                job.component,
                job.precision,
                job.target.device,
                reader,
                lora_rank=job.lora_rank,
                text_chunks=job.text_chunks,
            )
            if job.clips:
                network = quantize_layers(network, job.clips, job.quantized)
            result = _compile(job, network)
        except PreheatError as error:
            result = error
        except Exception:
            result = CompileError(f"Compiling the {job.component} failed:\n{traceback.format_exc()}")
        with suppress(RuntimeError):  # of a GPU that failed: the builder gets that error
            torch.cuda.empty_cache()
        try:
            builder.send(result)
        except BrokenPipeError:
            return
