"""Compiling in several processes: same results as in one, readable errors, no process left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine_builder.backends.aot_inductor.compile import CompileError, dynamic_bucket
from engine_builder.backends.aot_inductor.compile_jobs import CompileJob, compile_jobs
from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan
from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from engine_builder.stores.store import WritableStore
from model.store.precision import FP32
from tests.builder.test_build import engines_of, forget_drafts, forget_engine
from tests.conftest import REPOSITORY

TEXTS = ("text_encoder", "text_encoder_2")


@pytest.fixture
def jobs(toy_plan: BuildPlan, tmp_path: Path) -> list[CompileJob]:
    """Two jobs; tests end before they do."""
    return [
        CompileJob(name, toy_plan.base, name, FP32, toy_plan.target, dynamic_bucket(None), tmp_path / f"{name}.pt2")
        for name in TEXTS
    ]


def no_processes() -> bool:
    return multiprocessing.active_children() == []


def test_two_processes_compile_the_same_engines(store_copy: WritableStore, toy_plan: BuildPlan) -> None:
    before = build(toy_plan, store_copy).draft
    forget_drafts(store_copy)
    for component in TEXTS:
        forget_engine(store_copy, before, component)
    reports: list[tuple[str, str, int, int]] = []
    at_once: list[int] = []

    def report(*progress: object) -> None:
        reports.append(progress)  # type: ignore[arg-type]
        at_once.append(len(multiprocessing.active_children()))

    result = build(toy_plan, store_copy, report, processes=2)
    assert sorted(result.compiled) == sorted(TEXTS)
    assert {name: key for name, (key, *_) in engines_of(result.draft).items()} == {
        name: key for name, (key, *_) in engines_of(before).items()
    }
    assert [component for component, doing, *_ in reports if doing == "compiling"] == list(TEXTS)
    done = [number for *_, number, _ in reports]
    assert done == sorted(done) and max(at_once) == 2
    assert no_processes()


def test_load_error_passes_through_the_process(jobs: list[CompileJob], tmp_path: Path) -> None:
    lost = [replace(job, checkpoint=Checkpoint(tmp_path / "nowhere")) for job in jobs]
    with pytest.raises(CheckpointError, match="nowhere has no text_encoder(_2)?/config.json"):
        list(compile_jobs(lost, {}, 2, lambda job: None))
    assert no_processes()


def test_reports_a_killed_process(jobs: list[CompileJob]) -> None:
    def kill(job: CompileJob) -> None:
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

    def stop(job: CompileJob) -> None:
        started.append(job.component)
        if len(started) == 2:
            raise StopError

    with pytest.raises(StopError):
        list(compile_jobs(jobs, {}, 2, stop))
    assert no_processes()


KILLED = """
import multiprocessing, sys
from pathlib import Path
from engine_builder.backends.aot_inductor.compile import build_target, dynamic_bucket
from engine_builder.backends.aot_inductor.compile_jobs import CompileJob, compile_jobs
from engine_builder.checkpoints.folder import Checkpoint
from model.store.precision import FP32

def on_start(job):
    print(multiprocessing.active_children()[-1].pid, flush=True)

if __name__ == "__main__":
    checkpoint, target = Checkpoint(Path(sys.argv[1])), build_target()
    names = ("text_encoder", "text_encoder_2")
    jobs = [CompileJob(name, checkpoint, name, FP32, target, dynamic_bucket(None), Path(name)) for name in names]
    list(compile_jobs(jobs, {}, 2, on_start))
"""


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_processes_end_with_a_killed_build(tmp_path: Path) -> None:
    """Otherwise they wait forever: the first file they read is a pipe without a writer."""
    (tmp_path / "unet").mkdir()
    os.mkfifo(tmp_path / "unet" / "config.json")
    script = tmp_path / "build.py"
    script.write_text(KILLED)
    building = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with building:
        assert building.stdout is not None
        pids = [int(building.stdout.readline()) for _ in range(2)]
        assert not any(has_ended(pid) for pid in pids)
        building.kill()
    try:
        for _ in range(600):
            if all(has_ended(pid) for pid in pids):
                return
            time.sleep(0.1)
        pytest.fail(f"{pids} still run a minute after the build was killed")
    finally:
        for pid in pids:
            if not has_ended(pid):
                os.kill(pid, signal.SIGKILL)
