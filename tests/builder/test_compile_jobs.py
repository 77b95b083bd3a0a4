"""Compiling side by side: it gives what one after the other gives, says what went wrong, leaves no process behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine_builder.backends.aot_inductor.compile import (
    CompileError,
    dynamic_bucket,
)
from engine_builder.backends.aot_inductor.compile_jobs import (
    Job,
    compile_jobs,
)
from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan
from engine_builder.networks.network import (
    ModelFolder,
    ModelFolderError,
)
from model.store.store import Store
from tests.builder.test_build import engines_of, forget_drafts, forget_engine
from tests.conftest import REPOSITORY

TEXTS = ("text_encoder", "text_encoder_2")


@pytest.fixture
def jobs(toy_plan: BuildPlan, tmp_path: Path) -> list[Job]:
    """Two, of which neither has to come to an end."""
    return [
        Job(name, toy_plan.base, name, "fp32", toy_plan.target, dynamic_bucket(None), tmp_path / f"{name}.pt2")
        for name in TEXTS
    ]


def no_processes() -> bool:
    return multiprocessing.active_children() == []


def test_two_at_once_give_what_one_after_the_other_gives(store_copy: Store, toy_plan: BuildPlan) -> None:
    before = build(toy_plan, store_copy).draft
    forget_drafts(store_copy)
    for component in TEXTS:
        forget_engine(store_copy, before, component)
    reports: list[tuple[str, str, int, int]] = []
    at_once: list[int] = []

    def report(*said: object) -> None:
        reports.append(said)  # type: ignore[arg-type]
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


def test_what_cannot_be_loaded_is_said_as_it_is_without_side_by_side(jobs: list[Job], tmp_path: Path) -> None:
    lost = [replace(job, folder=ModelFolder(tmp_path / "nowhere")) for job in jobs]
    with pytest.raises(ModelFolderError, match="nowhere has no unet/config.json"):
        list(compile_jobs(lost, {}, 2, lambda job: None))
    assert no_processes()


def test_a_process_that_dies_is_no_silent_end(jobs: list[Job]) -> None:
    def kill(job: Job) -> None:
        [process] = multiprocessing.active_children()[-1:]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    with pytest.raises(CompileError, match="ended with status -9; if memory was short, build with --jobs 1"):
        list(compile_jobs(jobs, {}, 2, kill))
    assert no_processes()


def test_closing_ends_the_processes(jobs: list[Job]) -> None:
    class EnoughError(Exception):
        pass

    begun: list[str] = []

    def stop(job: Job) -> None:
        begun.append(job.component)
        if len(begun) == 2:
            raise EnoughError

    with pytest.raises(EnoughError):
        list(compile_jobs(jobs, {}, 2, stop))
    assert no_processes()


KILLED = """
import multiprocessing, sys
from pathlib import Path
from engine_builder.backends.aot_inductor.compile import build_target, dynamic_bucket
from engine_builder.backends.aot_inductor.compile_jobs import Job, compile_jobs
from engine_builder.networks import ModelFolder

def begun(job):
    print(multiprocessing.active_children()[-1].pid, flush=True)

if __name__ == "__main__":
    folder, target = ModelFolder(Path(sys.argv[1])), build_target()
    names = ("text_encoder", "text_encoder_2")
    jobs = [Job(name, folder, name, "fp32", target, dynamic_bucket(None), Path(name)) for name in names]
    list(compile_jobs(jobs, {}, 2, begun))
"""


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_processes_of_a_killed_build_do_not_go_on(tmp_path: Path) -> None:
    """They would wait for ever here: what they read first is a pipe that nothing is written to."""
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
        assert not any(ended(pid) for pid in pids)
        building.kill()
    try:
        for _ in range(600):
            if all(ended(pid) for pid in pids):
                return
            time.sleep(0.1)
        pytest.fail(f"{pids} go on a minute after the build was killed")
    finally:
        for pid in pids:
            if not ended(pid):
                os.kill(pid, signal.SIGKILL)
