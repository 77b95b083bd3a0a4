"""Compilation in several processes: readable errors, no process left behind. test_build.py has the results."""

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_builder.backends.aot_inductor import compile_jobs as module
from engine_builder.backends.aot_inductor.compile import dynamic_bucket
from engine_builder.backends.aot_inductor.compile_jobs import CompileJob, compile_jobs
from engine_builder.backends.built import CompileError
from engine_builder.building.build_plan import BuildPlan
from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from model.store.precision import FP32
from tests.support.repository import REPOSITORY

SMALL = ("unet_text", "unet_time")  # the components that compile fastest


@pytest.fixture
def jobs(toy_plan: BuildPlan, tmp_path: Path) -> list[CompileJob]:
    """Two compile jobs."""
    return [
        CompileJob(name, toy_plan.base, name, FP32, toy_plan.target, dynamic_bucket(None), tmp_path / f"{name}.pt2")
        for name in SMALL
    ]


@dataclass(frozen=True)
class BlockingCheckpoint(Checkpoint):
    """A checkpoint that blocks the first `blocks` processes that read it."""

    marks: Path = Path()
    blocks: int = 0

    def config(self, *arguments: Any) -> Any:
        (self.marks / f"read-by-{os.getpid()}").touch()
        if len([*self.marks.glob("read-by-*")]) <= self.blocks:
            threading.Event().wait()
        return super().config(*arguments)


class FullMemoryCheckpoint(Checkpoint):
    """A checkpoint whose network does not fit into the GPU's memory."""

    def config(self, *arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")


def no_processes() -> bool:
    return multiprocessing.active_children() == []


def test_load_error_of_a_process_is_raised(jobs: list[CompileJob], tmp_path: Path) -> None:
    missing = [replace(job, checkpoint=Checkpoint(tmp_path / "nowhere")) for job in jobs]
    with pytest.raises(CheckpointError, match="nowhere has no unet/config.json"):
        list(compile_jobs(missing, {}, 2, lambda job, again: None))
    assert no_processes()


def test_full_memory_of_a_process_is_no_error_of_the_compiler(jobs: list[CompileJob]) -> None:
    full = [replace(job, checkpoint=FullMemoryCheckpoint(job.checkpoint.root)) for job in jobs]
    with pytest.raises(torch.OutOfMemoryError):  # `preheat` prints it without a traceback
        list(compile_jobs(full, {}, 2, lambda job, again: None))
    assert no_processes()


def test_reports_a_killed_process(jobs: list[CompileJob]) -> None:
    def kill(job: CompileJob, again: bool) -> None:
        [process] = multiprocessing.active_children()[-1:]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    with pytest.raises(CompileError, match="ended with status -9. If memory was short, build with --jobs 1"):
        list(compile_jobs(jobs, {}, 2, kill))
    assert no_processes()


def test_processes_end_with_the_generator(jobs: list[CompileJob]) -> None:
    class StopError(Exception):
        pass

    started: list[str] = []

    def stop(job: CompileJob, again: bool) -> None:
        started.append(job.component)
        if len(started) == 2:
            raise StopError

    with pytest.raises(StopError):
        list(compile_jobs(jobs, {}, 2, stop))
    assert no_processes()


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_job_whose_processes_block_is_started_again_once(
    blocks: int, jobs: list[CompileJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose compiler never answers: it waits, in a network that the first `blocks` processes cannot read."""
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.2)
    monkeypatch.setattr(module, "_BLOCKED_SECONDS", 6.0)
    monkeypatch.setattr(module, "_IDLE_CPU_SECONDS", 0.05)
    blocking = replace(jobs[0], checkpoint=BlockingCheckpoint(jobs[0].checkpoint.root, marks=tmp_path, blocks=blocks))
    started: list[tuple[str, bool]] = []
    results = compile_jobs([blocking, jobs[1]], {}, 2, lambda job, again: started.append((job.component, again)))
    if blocks == 2:
        with pytest.raises(CompileError, match="unet_text blocked twice: its processes used no CPU"):
            list(results)
    else:
        assert {result.job.component for result in results} == {*SMALL}
    assert started == [("unet_text", False), ("unet_time", False), ("unet_text", True)]
    assert no_processes()


@pytest.mark.full
def test_a_process_ends_when_no_job_is_left_for_it(jobs: list[CompileJob]) -> None:
    """So what it holds of the device's memory is free while other engines are compiled or checked."""
    results = compile_jobs(jobs, {}, 2, lambda job, again: None)
    next(results)
    deadline = time.monotonic() + 30
    while len(multiprocessing.active_children()) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(multiprocessing.active_children()) == 1
    assert len(list(results)) == 1
    assert no_processes()


BUILD = """
import os, signal
from dataclasses import dataclass
from pathlib import Path
from engine_builder.backends.aot_inductor.compile import build_target, dynamic_bucket
from engine_builder.backends.aot_inductor.compile_jobs import CompileJob, compile_jobs
from engine_builder.checkpoints.folder import Checkpoint
from model.store.precision import FP32


@dataclass(frozen=True)
class BlockingCheckpoint(Checkpoint):
    def config(self, *_):
        print(os.getpid(), flush=True)
        signal.pause()


if __name__ == "__main__":
    checkpoint, target, bucket = BlockingCheckpoint(Path("nowhere")), build_target(), dynamic_bucket(None)
    names = ("unet_text", "unet_time")
    jobs = [CompileJob(name, checkpoint, name, FP32, target, bucket, Path(name)) for name in names]
    list(compile_jobs(jobs, {}, 2, lambda job, again: None))
"""


def has_ended(process: int, seconds: float = 0) -> bool:
    """Return True if the process of a file descriptor ends within `seconds`."""
    return bool(select.select([process], [], [], seconds)[0])


def test_processes_end_with_a_killed_build(tmp_path: Path) -> None:
    """They would block forever. Each prints its process id before it does."""
    script = tmp_path / "build.py"
    script.write_text(BUILD)
    building = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with building:
        assert building.stdout is not None
        processes = [os.pidfd_open(int(building.stdout.readline())) for _ in range(2)]
        building.kill()
    try:
        assert all(has_ended(process, seconds=60) for process in processes)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)
