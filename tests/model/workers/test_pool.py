"""The pool's decisions, with workers that a test scripts in place of processes."""

import itertools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from engine_builder.stores.local import WritableLocalStore
from model.cold_start import ColdStart
from model.errors import BrokenImage, Cancelled, EngineError, Overloaded, RequestRefused, Unavailable, WorkerFailed
from model.loading.served import Defaults, ServedModel, ServedRelease, SizeList
from model.scheduling.job import ImageEvent, StepEvent
from model.settings import Limits, Settings
from model.workers import supervisor
from model.workers.messages import (
    Cancel,
    Failed,
    Finished,
    FromWorker,
    LoadFailed,
    Planned,
    Progress,
    Ready,
    Status,
    Submit,
)
from model.workers.pool import MAX_ATTEMPTS, UNHEALTHY_STATUSES, WorkerPool
from model.workers.worker import PoolJob, Worker
from tests.support.adapter_model import put_adapter
from tests.support.scheduling import params
from tests.support.waiting import TIMEOUT_SECONDS, eventually

RELEASE = ServedRelease(
    ServedModel(64, 64, SizeList(((64, 64),)), False, Defaults()), "toy/1", "cpu", "aot_inductor", "CPU", ("Euler",)
)


class ScriptedWorker(Worker):
    """Has no process. A test answers what it is sent."""

    def __init__(self, number: int, pid: int) -> None:
        self.number, self.ready, self.jobs, self.reason = number, False, {}, ""
        self.moved, self.unhealthy, self.adapters = 0, 0, set[tuple[int, str]]()
        self.status, self.silent_seconds = Status(True, 0, 0, 1, {}), 0.0
        self.placed = {0}
        self.sent: list[Any] = []
        self._pid = pid
        self.exit_code = 70
        self._inbox: SimpleQueue[FromWorker | None] = SimpleQueue()

    @property
    def pid(self) -> int:
        return self._pid

    def send(self, message: object) -> None:
        self.sent.append(message)

    def answer(self, *messages: FromWorker) -> None:
        for message in messages:
            self._inbox.put(message)

    def load(self) -> None:
        self.answer(Ready([RELEASE], {"import": 1.0 + self.number}))

    def images(self, request: Submit, *indices: int) -> None:
        self.answer(*(Progress(request.number, ImageEvent(index, f"by {self.number}")) for index in indices))

    def end(self, exit_code: int = 70) -> None:
        self.exit_code = exit_code
        self._inbox.put(None)

    def messages(self) -> Iterator[FromWorker]:
        while (message := self._inbox.get()) is not None:
            yield message

    def kill(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.end()

    def kill_later(self, reason: str) -> None:
        self.reason = self.reason or reason

    def reap(self) -> int | None:
        return self.exit_code

    @property
    def requests(self) -> list[Submit]:
        return [message for message in self.sent if isinstance(message, Submit)]


class Scene:
    """A pool, and all of its workers in the order of their starts."""

    def __init__(self, size: int, **limits: Any) -> None:
        self.started: list[ScriptedWorker] = []
        pids = itertools.count(1)

        def start(number: int) -> Worker:
            self.started.append(ScriptedWorker(number, next(pids)))
            return self.started[-1]

        self.pool = WorkerPool(Settings(limits=Limits(**limits)), {}, size, 0, start)
        eventually(lambda: len(self.started) == size, "the start of the workers")
        self.workers = sorted(self.started, key=lambda worker: worker.number)

    def load(self) -> None:
        for worker in self.workers:
            worker.load()
        self.pool.wait_ready(ColdStart())

    def submit(self, **changes: object) -> PoolJob:
        return self.pool.submit(params(1, **changes), None, 0)


@pytest.fixture
def make() -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def make_scene(size: int = 2, **limits: Any) -> Scene:
        scenes.append(Scene(size, **limits))
        return scenes[-1]

    yield make_scene
    for scene in scenes:
        scene.pool.close()


@pytest.fixture
def scene(make: Callable[..., Scene]) -> Scene:
    """A pool of two workers that serve."""
    scene = make()
    scene.load()
    return scene


def error_of(job: PoolJob) -> BaseException | None:
    return job.result.exception(TIMEOUT_SECONDS)


def test_least_work_decides(scene: Scene) -> None:
    first, second = scene.workers
    scene.submit(num_images=4)
    for _ in range(3):
        scene.submit()
    assert [len(worker.requests) for worker in (first, second)] == [1, 3]


def test_a_request_goes_to_the_worker_that_has_its_release(scene: Scene) -> None:
    """Unless that one has more work left than the request and the load of the release would be."""
    first, second = scene.workers
    for worker, placed in ((first, (0,)), (second, (1,))):
        worker.answer(Status(True, 0, 0, 1, {}, placed))
    eventually(lambda: second.placed == {1}, "the status")
    for _ in range(3):
        scene.pool.submit(params(0), None, 0, model=1)
    assert [len(worker.requests) for worker in (first, second)] == [1, 2]
    scene.pool.submit(params(0), None, 0, model=0)
    assert [request.model for request in first.requests] == [1, 0]


def test_a_worker_is_sent_an_adapter_once(scene: Scene, tmp_path: Path) -> None:
    record = put_adapter(WritableLocalStore(tmp_path), "a", 1.0)
    for _ in range(4):
        scene.pool.submit(params(0), None, 0, adapters=[record])
    for worker in scene.workers:
        assert [request.adapters for request in worker.requests] == [(record,), ()]
    scene.workers[0].end()
    eventually(lambda: len(scene.workers[1].requests) == 4, "the requests of the other worker")
    assert [request.adapters for request in scene.workers[1].requests] == [(record,), (), (), ()]


def test_a_release_goes_to_one_worker(scene: Scene) -> None:
    """A worker has it from the first request for it, until a status says otherwise."""
    first, second = scene.workers

    def requested() -> list[int]:
        return [len(worker.requests) for worker in (first, second)]

    for _ in range(2):
        scene.pool.submit(params(0), None, 0, model=1)
    assert requested() == [2, 0]
    first.answer(Status(True, 0, 0, 1, {}, (0,)))  # it had not received the requests yet
    for request in first.requests:
        first.images(request, 0)
        first.answer(Finished(request.number, {}))
    eventually(lambda: not first.jobs, "the answers")
    assert first.placed == {0, 1}, "no status has come since"
    scene.pool.submit(params(0), None, 0, model=1)
    assert requested() == [3, 0]
    first.answer(Failed(first.requests[-1].number, BrokenImage("No load.")), Status(True, 9, 0, 1, {}, (0,)))
    eventually(lambda: first.placed == {0}, "the status after the failure")
    scene.pool.submit(params(0), None, 0, model=1)
    assert requested() == [3, 1]


def test_images_that_arrived_are_not_repeated(scene: Scene) -> None:
    first, second = scene.workers
    events: list[StepEvent | ImageEvent] = []
    job = scene.pool.submit(params(1, num_images=3), events.append, 2)
    [request] = first.requests
    assert (request.indices, request.preview_every, request.streams) == ((0, 1, 2), 2, True)
    first.answer(Planned(request.number, 12, 0, ["a warning"]))
    first.images(request, 1)
    first.end()
    eventually(lambda: bool(second.requests), "the request at the other worker")
    [repeated] = second.requests
    assert repeated.indices == (0, 2)
    second.answer(Planned(repeated.number, 8, 0, ["a warning"]), Progress(repeated.number, StepEvent(3, 8)))
    second.images(repeated, 2, 0)
    second.answer(Finished(repeated.number, {"denoise": 1.0}))
    result = job.result.result(TIMEOUT_SECONDS)
    assert result.images == ["by 1", "by 0", "by 1"]
    assert (result.warnings, result.timings) == (["a warning"], {"denoise": 1.0})
    assert StepEvent(4 + 3, 12) in events  # the four steps of the image that arrived count
    assert [event.index for event in events if isinstance(event, ImageEvent)] == [1, 2, 0]


def steps_of(events: list[StepEvent | ImageEvent]) -> list[tuple[int, int, str | None]]:
    return [(event.step, event.steps, event.preview) for event in events if isinstance(event, StepEvent)]


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "not planned"])
def test_steps_never_go_back_when_a_request_moves(planned: bool, make: Callable[..., Scene]) -> None:
    """Two of three images arrive, then the first worker ends. The second begins the third image again, and ends, too.
    The third worker reports steps that the first had not reached."""
    scene = make(3)
    scene.load()
    events: list[StepEvent | ImageEvent] = []
    job = scene.pool.submit(params(1, num_images=3), events.append, 1)

    def answer(worker: ScriptedWorker, steps: int, last: int, *finished: int) -> Submit:
        eventually(lambda: bool(worker.requests), "the request")
        [request] = worker.requests
        progress = (Progress(request.number, StepEvent(step, steps, f"{step}")) for step in range(1, last + 1))
        worker.answer(*([Planned(request.number, steps, 0, [])] if planned else ()), *progress)
        worker.images(request, *finished)
        return request

    first, second, third = scene.workers
    answer(first, 12, 10, 0, 2)
    first.end()
    answer(second, 4, 1)
    second.end()
    request = answer(third, 4, 4, 1)
    third.answer(Finished(request.number, {}))
    assert job.result.result(TIMEOUT_SECONDS).images == ["by 0", "by 2", "by 0"]
    assert steps_of(events) == [(step, 12, f"{step if step < 11 else step - 8}") for step in range(1, 13)]


def test_device_failure_moves_all_requests_at_once(scene: Scene) -> None:
    first, second = scene.workers
    jobs = [scene.submit() for _ in range(4)]
    first.answer(
        Failed(first.requests[0].number, Unavailable("The GPU has failed (x); this server is being replaced."))
    )
    eventually(lambda: len(second.requests) == 4, "all requests at the other worker")
    assert not any(job.result.done() for job in jobs) and scene.pool.healthy()
    assert first.reason == "its device failed"  # its process is ended
    second.answer(
        Failed(second.requests[0].number, Unavailable("The GPU has failed (y); this server is being replaced."))
    )
    for job in jobs:
        assert isinstance(error_of(job), Unavailable) and "has failed (y)" in str(error_of(job))
    assert not scene.pool.healthy()
    with pytest.raises(Unavailable, match="has failed"):
        scene.submit()


@pytest.mark.parametrize("silent", [False, True])
def test_hanging_worker_is_ended(silent: bool, make: Callable[..., Scene]) -> None:
    scene = make(stuck_seconds=0.5 if silent else 100.0)
    first, second = scene.workers
    scene.load()
    scene.submit()
    second.silent_seconds = float("-inf")
    if not silent:
        first.answer(*[Status(False, 0, 0, 1, {})] * UNHEALTHY_STATUSES)
    eventually(lambda: bool(second.requests), "the request at the other worker")
    assert first.reason.endswith(f"no step ended within {scene.pool.limits.stuck_seconds:g} s")


def test_a_worker_that_stood_still_goes_on(make: Callable[..., Scene]) -> None:
    """As in a frozen container: it reports a step that took too long."""
    scene = make(1)
    scene.load()
    job = scene.submit()
    [worker] = scene.workers
    unhealthy = [Status(False, 0, 0, 1, {})] * (UNHEALTHY_STATUSES - 1)
    worker.answer(*unhealthy, Status(True, 0, 0, 1, {}), *unhealthy)
    worker.images(worker.requests[0], 0)
    worker.answer(Finished(worker.requests[0].number, {}))
    assert job.result.result(TIMEOUT_SECONDS).images and not worker.reason


def test_a_request_that_ends_its_workers_is_given_up(make: Callable[..., Scene]) -> None:
    scene = make(MAX_ATTEMPTS + 1)
    scene.load()
    job = scene.submit()
    for _ in range(MAX_ATTEMPTS):
        [holder] = [worker for worker in scene.workers if worker.jobs]
        holder.end()
        eventually(lambda holder=holder: not holder.jobs, "the end of the worker")
    assert "may be their cause" in str(error_of(job)) and scene.pool.healthy()


@pytest.mark.parametrize("error", [RequestRefused("prompt", "no."), BrokenImage("image 0 of 1"), RuntimeError("x")])
def test_error_of_a_request_is_its_answer(error: Exception, scene: Scene) -> None:
    job = scene.submit()
    worker = scene.workers[0]
    worker.answer(Failed(worker.requests[0].number, error))
    assert error_of(job) is error and job.planned.exception(TIMEOUT_SECONDS) is error
    assert not scene.workers[1].requests and not worker.jobs


def test_cancelled_request_is_stopped_and_not_moved(scene: Scene) -> None:
    first, second = scene.workers
    job = scene.submit()
    scene.pool.cancel(job, Cancelled("The client left."))
    assert isinstance(error_of(job), Cancelled)
    assert first.sent[-1] == Cancel(first.requests[0].number)
    first.end()
    eventually(lambda: not first.ready, "the end of the worker")
    assert not second.requests


def test_queue_is_that_of_all_workers(make: Callable[..., Scene]) -> None:
    scene = make(max_queue=8)
    scene.load()
    first, second = scene.workers
    for _ in range(2):
        scene.submit(num_images=4)
    with pytest.raises(Overloaded, match="8 images are waiting, and this server queues 8. Repeat the request in 7 s"):
        first.status = Status(True, 0, 0, 7, {})
        scene.submit()
    first.answer(Status(True, first.requests[0].number, 3, 7, {}))  # one of its images has joined a loop
    eventually(lambda: first.queued == 3, "the status")
    scene.submit()


@pytest.mark.parametrize("loads", [True, False], ids=["served", "was loading"])
def test_killed_workers_are_started_again_without_long_pauses(loads: bool, make: Callable[..., Scene]) -> None:
    """A pause that doubles each time would take longer than `eventually` waits for a start."""
    scene = make(1)
    scene.load()
    for kills in range(1, 6):
        if loads:
            scene.started[-1].load()
            eventually(scene.pool.healthy, "a worker that serves")
        scene.started[-1].end(-signal.SIGKILL)
        eventually(lambda kills=kills: len(scene.started) == kills + 1, "another start", 5)
        with pytest.raises(Unavailable, match="being started again"):
            scene.submit()
    scene.started[-1].load()
    eventually(scene.pool.healthy, "a worker that serves")
    scene.submit()
    assert len(scene.started[-1].requests) == 1


def test_one_worker_that_loads_suffices(make: Callable[..., Scene]) -> None:
    scene, cold_start = make(3), ColdStart()
    scene.workers[0].end()
    for worker in scene.workers[1:]:
        worker.load()
    assert scene.pool.wait_ready(cold_start) == [RELEASE]
    assert cold_start.phases == {"import": 3.0}  # of the slowest


def test_a_worker_that_loads_late_counts_as_loaded(make: Callable[..., Scene]) -> None:
    """The first one fails, is started again and loads, before the second one fails."""
    scene = make()
    first, second = scene.workers
    first.answer(LoadFailed(EngineError("broken", "")))
    first.end()
    eventually(lambda: len(scene.started) == 3, "the second process of the first worker")
    scene.started[2].load()
    eventually(scene.pool.healthy, "a worker that serves")
    second.end()
    assert scene.pool.wait_ready(ColdStart()) == [RELEASE]


def test_one_worker_that_hangs_in_its_load_stops_nothing(
    make: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "MORE_SECONDS", 0.2)
    scene = make()
    scene.workers[1].load()
    assert scene.pool.wait_ready(ColdStart()) == [RELEASE]


def test_a_worker_that_cannot_be_started_is_tried_again() -> None:
    started: list[ScriptedWorker] = []
    errors = [NotImplementedError("of a mapping"), None]

    def start(number: int) -> Worker:
        if (error := errors.pop(0)) is not None:
            raise error
        started.append(ScriptedWorker(number, 1))
        return started[-1]

    pool = WorkerPool(Settings(), {}, 1, 0, start)
    eventually(lambda: bool(started), "the second start")
    started[0].load()
    eventually(pool.healthy, "a worker that serves")
    pool.close()


def test_a_kill_during_the_load_is_no_failed_load(make: Callable[..., Scene]) -> None:
    scene = make()
    for worker in scene.workers:
        worker.end(-signal.SIGKILL)
    eventually(lambda: len(scene.started) == 4, "both workers again")
    scene.started[2].load()
    scene.started[3].load()
    assert scene.pool.wait_ready(ColdStart()) == [RELEASE]


def test_load_fails_with_the_error_of_a_worker(make: Callable[..., Scene]) -> None:
    scene = make()
    for worker in scene.workers:
        worker.answer(LoadFailed(EngineError(f"of {worker.number}")))
        worker.end()
    with pytest.raises(EngineError, match="of 0"):
        scene.pool.wait_ready(ColdStart())


@pytest.mark.parametrize(("kills", "exit_code"), [(0, 70), (4, -signal.SIGKILL)], ids=["ended", "killed repeatedly"])
def test_load_fails_if_all_processes_end(kills: int, exit_code: int, make: Callable[..., Scene]) -> None:
    """Repeated kills are like those of a kernel that is out of memory."""
    scene = make(1)
    scene.started[0].end(exit_code)
    for number in range(1, kills):
        eventually(lambda number=number: len(scene.started) == number + 1, "another start")
        scene.started[-1].end(exit_code)
    words = f"Worker 0 of 1 did not load the release: its process ended with exit code {int(exit_code)}"
    with pytest.raises(WorkerFailed, match=words):
        scene.pool.wait_ready(ColdStart())


def test_closed_pool_answers_all_requests(scene: Scene) -> None:
    job = scene.submit()
    scene.pool.close()
    assert isinstance(error_of(job), Unavailable)
    assert not scene.pool.healthy()
