"""Compile networks one after the other in this process, or several at once in worker processes.

Compiling keeps one core busy most of the time, also for a GPU. Each worker process loads the network that it compiles,
so it takes memory for one network, also on the device. Workers end with the build that started them, even if it was
killed. torch's compiler forks processes with threads, which rarely blocks them for ever (a build on an H200). So a job
whose processes use no CPU is started again once.
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
from engine_builder.worker_process import cpu_seconds, end_process, end_with_parent, kill_process
from model.errors import PreheatError
from model.loading.target import Target
from model.pipeline.components import find_component
from model.store.manifest import Bucket
from model.store.precision import FP8, Precision

_MAX_DEFAULT_PROCESSES = 4
_POLL_SECONDS = 10.0
_BLOCKED_SECONDS = 180.0  # without CPU time; compiling, and timing kernels on a GPU, use a core
_IDLE_CPU_SECONDS = 1.0  # which background threads use meanwhile


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


@dataclass
class _Running:
    """A job in a worker process, and when its processes last used the CPU."""

    job: CompileJob
    process: SpawnProcess
    cpu_seconds: float = 0.0
    active_at: float = field(default_factory=time.monotonic)

    def is_blocked(self) -> bool:
        used = cpu_seconds(self.process)
        if abs(used - self.cpu_seconds) >= _IDLE_CPU_SECONDS:
            self.cpu_seconds, self.active_at = used, time.monotonic()
        return time.monotonic() - self.active_at >= _BLOCKED_SECONDS


OnStart = Callable[[CompileJob, bool], None]


def default_processes(target: Target) -> int:
    """Return the default number of worker processes: the number of CPU cores, at most four; one on a GPU.

    On a GPU each process takes device memory, and concurrent processes distort the compiler's timings.
    """
    if target.device != "cpu":
        return 1
    return min(_MAX_DEFAULT_PROCESSES, len(os.sched_getaffinity(0)))


def compile_jobs(
    jobs: Sequence[CompileJob], networks: dict[str, Network], processes: int, on_start: OnStart
) -> Generator[CompileResult, None, None]:
    """Compile `jobs`, at most `processes` at once, and yield each result when it is ready.

    With one process or one job, compile in this process with `networks`, in order. Otherwise start with the components
    that take longest. `on_start` is called before each job, with True if its processes blocked and it is started again.
    Raises CompileError, also if they block again. No process remains after an error or when the generator is closed.
    """
    if processes > 1 and len(jobs) > 1:
        longest_first = sorted(jobs, key=lambda job: find_component(job.component).phase != "step")
        yield from _compile_in_processes(longest_first, processes, on_start)
        return
    for job in jobs:
        on_start(job, False)
        yield _compile(job, networks[job.component])


def _compile(job: CompileJob, network: Network) -> CompileResult:
    started = time.perf_counter()
    compiled = compiler.compile_network(network, job.target, job.bucket, job.package)
    return CompileResult(job, compiled, time.perf_counter() - started)


def _compile_in_processes(
    jobs: Sequence[CompileJob], processes: int, on_start: OnStart
) -> Generator[CompileResult, None, None]:
    waiting = deque(jobs)
    restarted = set[str]()
    workers: dict[Connection, SpawnProcess] = {}
    running: dict[Connection, _Running] = {}
    processes = min(processes, len(jobs))
    threads = max(1, len(os.sched_getaffinity(0)) // processes)

    def start_worker() -> None:
        builder_end, worker_end = get_context("spawn").Pipe()
        workers[builder_end] = get_context("spawn").Process(target=_run_worker, args=(worker_end, threads))
        workers[builder_end].start()
        worker_end.close()
        send_next(builder_end)

    def send_next(worker: Connection) -> None:
        running[worker] = _Running(waiting.popleft(), workers[worker])
        on_start(running[worker].job, running[worker].job.key in restarted)
        with suppress(ConnectionError):  # the process has ended; `_receive` raises the error
            worker.send(running[worker].job)

    torch.cuda.empty_cache()  # the processes need what PyTorch keeps of memory that was freed
    try:
        for _ in range(processes):
            start_worker()
        while running:
            for worker in wait(list(running), _POLL_SECONDS):
                assert isinstance(worker, Connection)
                result = _receive(worker, running.pop(worker))
                if waiting:
                    send_next(worker)
                else:
                    worker.close()
                    end_process(workers[worker])  # the checks need the memory that it holds
                yield result
                torch.cuda.empty_cache()  # frees what the check used
            for worker in [worker for worker, one in running.items() if one.is_blocked() and not worker.poll()]:
                job = running[worker].job
                if job.key in restarted:
                    raise CompileError(
                        f"Compiling the {job.component} blocked twice: its processes used no CPU for "
                        f"{_BLOCKED_SECONDS:.0f} s.",
                        "Build with fewer --jobs; what is compiled already is kept.",
                    )
                restarted.add(job.key)
                kill_process(workers[worker])
                worker.close()
                del running[worker]
                waiting.appendleft(job)
                start_worker()
    finally:
        for worker, process in workers.items():
            worker.close()
            if worker in running:
                kill_process(process)
            end_process(process)


def _receive(worker: Connection, running: _Running) -> CompileResult:
    try:
        result: CompileResult | Exception = worker.recv()
    except (EOFError, ConnectionError) as error:
        running.process.join()
        raise CompileError(
            f"The process that compiled the {running.job.component} ended with status {running.process.exitcode}.",
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
        except (PreheatError, torch.OutOfMemoryError) as error:
            result = error
        except Exception:
            result = CompileError(f"Compiling the {job.component} failed:\n{traceback.format_exc()}")
        with suppress(RuntimeError):  # of a GPU that failed: the builder gets that error
            torch.cuda.empty_cache()
        try:
            builder.send(result)
        except BrokenPipeError:
            return
