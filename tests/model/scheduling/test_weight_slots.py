"""More releases than slots for their weights: which of them are on the device, and when."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy

import pytest
import torch

from model.engines.engine import EngineSet
from model.errors import CorruptBlob, EngineError, OutOfDeviceMemory, ReleaseNotLoaded, StoreError, Unavailable
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.runner import Runner
from model.scheduling.job import Job
from model.scheduling.scheduler import Scheduler
from model.scheduling.weight_slots import Slot, WeightSlots
from model.settings import Limits
from model.weights.slot import WeightSlot
from tests.support.linear_networks import Stub, linear_model
from tests.support.scheduling import params, paused, results
from tests.support.waiting import TIMEOUT_SECONDS, eventually

KEY = ("unet", "fp32", "plain")


class WeightedStub(Stub):
    """A UNet with one weight, which shifts the noise."""

    weight: torch.Tensor

    def outputs(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        outputs = super().outputs(inputs)
        return {name: tensor + self.weight for name, tensor in outputs.items()}


def weighted_model(weight: float) -> LoadedModel:
    model = linear_model()
    stub = WeightedStub("unet", model.engines["unet"].signature)
    stub.weight = torch.tensor(weight)
    model.engines["unet"] = EngineSet([stub])
    return model


def weight_of(model: LoadedModel) -> torch.Tensor:
    stub = model.engines["unet"].engines[0]
    assert isinstance(stub, WeightedStub)
    return stub.weight


def slot_of(model: LoadedModel) -> Slot:
    return Slot(copy(model), WeightSlot({KEY: {"weight": weight_of(model)}}, {}), None)


class Loader:
    """Implements `SlotLoader`. `room`: further slots that can be opened. `fails`: errors of loads, by release.

    `may_fetch`: lets fetches of a release end. `fetch_fails`: errors of fetches, by release.

    `part`: runs in each part of the work that precedes the first request of a release; True: it was the last part.
    """

    def __init__(self, count: int, room: int) -> None:
        self.models = [weighted_model(0.01 * (number + 1)) for number in range(count)]
        self.runners = [Runner(self.models[0])]
        self.runners += [Runner(self.models[0].sharing()) for _ in range(1, count)]
        self.room = room
        self.fails: dict[int, Exception] = {}
        self.loads: list[tuple[str, int]] = []
        self.begun: list[tuple[int, bool]] = []
        self.may_fetch = [threading.Event() for _ in range(count)]
        for event in self.may_fetch:
            event.set()
        self.fetch_fails: dict[int, Exception] = {}
        self.fetches: list[int] = []
        self.stopped = threading.Event()
        self.slots: WeightSlots
        self.part: Callable[[], bool] = lambda: True
        self.may_end = threading.Event()
        self.may_end.set()

    def name(self, index: int) -> str:
        return f"style/{index}"

    def has_room(self) -> bool:
        return self.room > 0

    def fetch(self, index: int) -> None:
        self.fetches.append(index)
        assert self.may_fetch[index].wait(TIMEOUT_SECONDS)
        if index in self.fetch_fails:
            raise self.fetch_fails[index]

    def open(self, index: int) -> Slot:
        self._load("open", index)
        self.room -= 1
        return slot_of(weighted_model(0.01 * (index + 1)))

    def fill(self, index: int, slot: Slot) -> None:
        slot.weights.tensors[KEY]["weight"].fill_(torch.nan)  # whoever reads it meanwhile makes a broken image
        self._load("fill", index)
        slot.weights.tensors[KEY]["weight"].fill_(0.01 * (index + 1))

    def stop(self) -> None:
        self.stopped.set()

    def begin(self, index: int, is_new: bool) -> Iterator[None]:
        while not self.part():
            yield
        self.begun.append((index, is_new))

    def _load(self, kind: str, index: int) -> None:
        self.loads.append((kind, index))
        eventually(lambda: self.may_end.is_set() or self.stopped.is_set(), "the end of the load")
        if self.stopped.is_set():
            raise Unavailable("The load was stopped.")
        if index in self.fails:
            raise self.fails[index]


@contextmanager
def serving(loader: Loader, turn_seconds: float = 0.0, unasked: bool = False, **limits: float) -> Iterator[Scheduler]:
    slots = loader.slots = WeightSlots(loader.runners, loader, slot_of(loader.models[0]), turn_seconds=turn_seconds)
    scheduler = Scheduler(loader.runners, Limits(max_queue=1000, **limits), lambda: None, slots=slots)
    if unasked:
        scheduler.call(slots.open_unasked)
    try:
        yield scheduler
    finally:
        scheduler.close()
        for event in loader.may_fetch:
            event.set()


def alone(index: int, seed: int) -> list[str]:
    scheduler = Scheduler([Runner(weighted_model(0.01 * (index + 1)))], Limits(), lambda: None)
    [result] = results(scheduler.submit(params(seed)))
    scheduler.close()
    return result.images


@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_images_are_those_of_their_own_release(room: int) -> None:
    loader, generator = Loader(4, room), random.Random(room)
    asked = [(generator.randrange(4), seed) for seed in range(30)]
    expected = {index: [alone(index, seed) for seed in range(30)] for index in range(4)}
    assert len({tuple(images[0]) for images in expected.values()}) == 4
    with serving(loader) as scheduler:
        jobs = [scheduler.submit(params(seed), model=index) for index, seed in asked]
        found = results(*jobs)
    for result, (index, seed) in zip(found, asked, strict=True):
        assert result.images == expected[index][seed]
    assert [kind for kind, _ in loader.loads].count("open") == room
    assert all(is_new == (kind == "open") for (kind, _), (_, is_new) in zip(loader.loads, loader.begun, strict=True))


def test_opens_slots_for_all_releases_that_fit_without_requests() -> None:
    loader = Loader(4, room=2)
    with serving(loader, unasked=True) as scheduler:
        eventually(lambda: loader.slots.resident == (0, 1, 2), "two new slots")
        results(scheduler.submit(params(0), model=3))
        assert loader.loads == [("open", 1), ("open", 2), ("fill", 3)]


def test_fills_the_slot_that_was_used_the_longest_time_ago() -> None:
    loader = Loader(4, room=2)
    with serving(loader) as scheduler:
        for index in (1, 2, 0, 1, 3):
            results(scheduler.submit(params(index), model=index))
        assert loader.loads[-1] == ("fill", 3)
        assert set(loader.slots.resident) == {0, 1, 3}


def test_other_releases_go_on_during_a_load() -> None:
    loader = Loader(3, room=1)
    with serving(loader) as scheduler:
        results(scheduler.submit(params(0), model=1))
        loader.may_end.clear()
        waiting = scheduler.submit(params(1), model=2)
        eventually(lambda: loader.loads[-1] == ("fill", 2), "the load")
        [left] = loader.slots.resident
        results(*(scheduler.submit(params(seed), model=left) for seed in range(5)))
        assert not waiting.done
        loader.may_end.set()
        assert results(waiting)[0].images == alone(2, 1)


def test_no_slot_is_given_up_before_the_weights_are_fetched() -> None:
    loader = Loader(3, room=0)
    loader.may_fetch[1].clear()
    with serving(loader) as scheduler:
        waiting = scheduler.submit(params(1), model=1)
        eventually(lambda: loader.fetches == [1], "the fetch")
        for seed in range(5):
            [result] = results(scheduler.submit(params(seed), model=0))
            assert result.images == alone(0, seed) and loader.slots.resident == (0,) and not loader.loads
            assert set(scheduler.placed) == {0, 1}
        assert results(scheduler.submit(params(2), model=2))[0].images == alone(2, 2), "delayed by another's fetch"
        assert not waiting.done
        loader.may_fetch[1].set()
        assert results(waiting)[0].images == alone(1, 1)
        assert loader.fetches == [1, 2] and loader.loads == [("fill", 2), ("fill", 1)]


def test_a_failed_fetch_leaves_the_slots_as_they_are() -> None:
    loader = Loader(2, room=0)
    loader.fetch_fails[1] = StoreError("The bucket does not answer.")
    with serving(loader) as scheduler:
        with paused(scheduler):
            failing = [scheduler.submit(params(seed), model=1) for seed in range(3)]
            other = scheduler.submit(params(4), model=0)
        for job in failing:
            with pytest.raises(ReleaseNotLoaded, match="style/1 cannot be loaded. The bucket does not answer."):
                job.result.result(TIMEOUT_SECONDS)
        assert results(other)[0].images == alone(0, 4)
        assert loader.slots.resident == (0,) and not loader.loads
        loader.fetch_fails.clear()
        assert results(scheduler.submit(params(5), model=1))[0].images == alone(1, 5)


def test_a_failed_fetch_without_a_request_is_not_repeated() -> None:
    loader = Loader(3, room=2)
    loader.fetch_fails[1] = StoreError("The bucket does not answer.")
    with serving(loader, unasked=True) as scheduler:
        eventually(lambda: loader.slots.resident == (0, 2), "the slot of the other release")
        results(scheduler.submit(params(0), model=0))
        assert loader.fetches == [1, 2]


def test_images_go_on_during_the_warm_up_of_a_slot() -> None:
    """It takes longer than a step may take."""
    loader, may_end, parts = Loader(2, room=1), threading.Event(), list[float]()

    def part() -> bool:
        time.sleep(0.02)
        parts.append(time.monotonic())
        return may_end.is_set()

    loader.part = part
    with serving(loader, stuck_seconds=1) as scheduler:
        waiting = scheduler.submit(params(1), model=1)
        eventually(lambda: len(parts) > 3, "the warm-up goes on without another request")
        for seed in range(10):
            before, [result] = len(parts), results(scheduler.submit(params(seed), model=0))
            assert result.images == alone(0, seed) and len(parts) > before
            assert loader.slots.resident == (0,) and set(scheduler.placed) == {0, 1} and not waiting.done
        eventually(lambda: parts[-1] - parts[0] > 1.5, "a warm-up of some length")
        assert scheduler.healthy()
        may_end.set()
        assert results(waiting)[0].images == alone(1, 1)
        assert (loader.slots.resident, loader.begun) == ((0, 1), [(1, True)])


def test_a_failed_warm_up_leaves_the_other_slots() -> None:
    loader, parts = Loader(2, room=1), itertools.count()

    def part() -> bool:
        if next(parts) == 3:
            raise OutOfDeviceMemory("No memory.")
        return False

    loader.part = part
    with serving(loader) as scheduler:
        waiting = scheduler.submit(params(1), model=1)
        eventually(lambda: loader.loads[-1:] == [("fill", 1)], "the release in the slot that exists")
        loader.part = lambda: True
        assert results(waiting, scheduler.submit(params(2), model=0))[0].images == alone(1, 1)


def test_a_release_that_is_always_asked_for_leaves_after_its_turn() -> None:
    loader = Loader(2, room=0)
    with serving(loader, turn_seconds=2.0) as scheduler:
        stop = threading.Event()
        jobs: list[Job] = []

        def ask() -> None:
            while not stop.is_set():
                if sum(not job.done for job in jobs) < 8:  # always some, and never a full queue
                    jobs.append(scheduler.submit(params(len(jobs), num_inference_steps=3), model=0))
                time.sleep(0.002)

        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: bool(jobs), "a request")
        before = len(jobs)
        [result] = results(scheduler.submit(params(1), model=1))
        answered = len([job for job in jobs if job.done])
        stop.set()
        asking.join()
        assert result.images == alone(1, 1) and answered > before, "requests of the turn are answered first"
        assert all(len(one.images) == 1 for one in results(*jobs))


def test_a_turn_is_not_cut_short() -> None:
    loader = Loader(2, room=0)
    with serving(loader, turn_seconds=60) as scheduler:
        with paused(scheduler):
            first = [scheduler.submit(params(seed), model=0) for seed in range(8)]
            other = scheduler.submit(params(1), model=1)
            later = [scheduler.submit(params(seed), model=0) for seed in range(8)]
            loader.may_end.clear()
        results(*first, *later)
        assert not other.done
        loader.may_end.set()
        assert results(other)[0].images == alone(1, 1)


def test_a_failed_load_fails_its_own_requests_only() -> None:
    loader = Loader(3, room=1)
    loader.fails[2] = CorruptBlob("The blob is damaged.")
    with serving(loader) as scheduler:
        results(scheduler.submit(params(0), model=1))
        with paused(scheduler):
            failing = [scheduler.submit(params(seed), model=2) for seed in range(3)]
            others = [scheduler.submit(params(seed), model=seed % 2) for seed in range(4)]
        for job in failing:
            with pytest.raises(ReleaseNotLoaded, match="style/2 cannot be loaded. The blob is damaged."):
                job.result.result(TIMEOUT_SECONDS)
        for seed, result in enumerate(results(*others)):
            assert result.images == alone(seed % 2, seed)
        del loader.fails[2]
        assert results(scheduler.submit(params(5), model=2))[0].images == alone(2, 5)


@pytest.mark.parametrize(
    "error", [OutOfDeviceMemory("No memory."), torch.OutOfMemoryError("No memory."), EngineError("The disk is full.")]
)
def test_takes_turns_in_the_slots_that_could_be_opened(error: Exception) -> None:
    """The memory may be less than was estimated."""
    loader = Loader(3, room=2)
    loader.fails[1] = error
    with serving(loader, unasked=True) as scheduler:
        eventually(lambda: loader.loads == [("open", 1)], "the load")
        del loader.fails[1]
        assert results(scheduler.submit(params(5), model=1))[0].images == alone(1, 5)
        assert loader.loads == [("open", 1), ("fill", 1)]


def test_an_unknown_error_of_a_load_lets_the_scheduler_ask_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, asked = Loader(2, room=0), list[Exception]()
    loader.fails[1] = RuntimeError("CUDA error")
    monkeypatch.setattr(Scheduler, "_check_device", lambda _, error: asked.append(error))
    with serving(loader) as scheduler:
        with pytest.raises(RuntimeError, match="CUDA error"):
            scheduler.submit(params(0), model=1).result.result(TIMEOUT_SECONDS)
        assert asked == [loader.fails[1]]


def test_an_unknown_error_without_a_request_lets_the_scheduler_ask_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, asked = Loader(2, room=1), list[Exception]()
    loader.fails[1] = RuntimeError("CUDA error")
    monkeypatch.setattr(Scheduler, "_check_device", lambda _, error: asked.append(error))
    with serving(loader, unasked=True) as scheduler:
        eventually(lambda: bool(asked), "the question")
        assert [str(error) for error in asked] == ["RuntimeError: CUDA error"]
        assert results(scheduler.submit(params(3), model=0))[0].images == alone(0, 3)


def test_closing_answers_requests_that_wait_for_a_release() -> None:
    loader = Loader(2, room=0)
    with serving(loader) as scheduler:
        loader.may_end.clear()
        job = scheduler.submit(params(0), model=1)
        eventually(lambda: loader.loads == [("fill", 1)], "the load")
    with pytest.raises(Exception, match="This server has ended"):
        job.result.result(TIMEOUT_SECONDS)
    assert loader.slots.resident == (), "a stopped load"


def test_closing_waits_for_no_fetch() -> None:
    loader = Loader(2, room=0)
    loader.may_fetch[1].clear()
    with serving(loader) as scheduler:
        scheduler.submit(params(0), model=1)
        eventually(lambda: loader.fetches == [1], "the fetch")
        scheduler.close()
        assert not loader.may_fetch[1].is_set() and loader.slots.resident == (0,)


def test_a_cancelled_request_starts_no_load_later() -> None:
    loader = Loader(3, room=0)
    with serving(loader) as scheduler:
        with paused(scheduler):
            job = scheduler.submit(params(0), model=1)
            scheduler.cancel(job, CorruptBlob("The client has left."))
        results(scheduler.submit(params(1), model=0))
        assert not loader.loads
