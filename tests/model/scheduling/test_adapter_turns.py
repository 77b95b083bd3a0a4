"""Requests take turns by their adapters. Each gets the image that it gets alone, whatever waits or fails."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch

from model.adapters import merge
from model.errors import AdapterError, Cancelled, Unavailable
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.runner import Runner
from model.pipeline.text_to_image import generate
from model.scheduling.job import Job
from model.scheduling.scheduler import Scheduler
from model.scheduling.weight_slots import WeightSlots
from model.scheduling.weight_turns import WeightTurns
from model.settings import Limits
from tests.support.adapter_model import ADAPTER_BYTES, AdapterModel, adapter_model
from tests.support.images import pixels
from tests.support.scheduling import Gate, params, paused, results, settle
from tests.support.waiting import eventually

A, B, C = (("a", 1.0),), (("b", 1.0),), (("c", 1.0),)
ONE_TURN = Limits(max_queue=8, lora_turn_seconds=1e-9)
ENDLESS_TURN = Limits(max_queue=8, lora_turn_seconds=math.inf)


@pytest.fixture
def adapted(tmp_path: Path) -> AdapterModel:
    return adapter_model(tmp_path / "store")


@pytest.fixture
def model(adapted: AdapterModel) -> LoadedModel:
    return adapted.model


@pytest.fixture
def load_all(adapted: AdapterModel) -> None:
    adapted.library.load(["a", "b", "c"])


def expected(tmp_path: Path, job: Job) -> object:
    """Return the first image of a job, generated alone."""
    [image, *_] = generate(adapter_model(tmp_path / f"alone-{job.params.seed}").model, [job.params])[0]
    return image


@contextmanager
def damaged(adapted: AdapterModel) -> Iterator[None]:
    """Damage the blob of adapter a during the block."""
    path = Path(adapted.store.url.removeprefix("file://")) / "blobs" / "sha256" / adapted.blobs["a"]
    intact = path.read_bytes()
    path.write_bytes(intact[:-1] + b"\1")
    yield
    path.write_bytes(intact)


@pytest.mark.usefixtures("load_all")
def test_equal_adapters_share_a_batch_and_others_wait(gate: Gate, scheduler: Scheduler, tmp_path: Path) -> None:
    with paused(scheduler):
        jobs = [scheduler.submit(params(seed, loras=loras)) for seed, loras in enumerate((A, B, A, B, ()))]
    gate.open()
    results(*jobs)
    assert gate.seeds == [[4]] * 4 + [[0, 2]] * 4 + [[1, 3]] * 4  # no adapter is merged at first
    images = [pixels(job.result.result().images[0]) for job in jobs]
    for job, image in zip(jobs, images, strict=True):
        assert np.array_equal(image, expected(tmp_path, job))
    assert len({image.tobytes() for image in images[:2] + images[4:]}) == 3


@pytest.mark.usefixtures("load_all")
@pytest.mark.parametrize("limits", [ONE_TURN, ENDLESS_TURN], ids=["short", "endless"])
def test_turn_ends_for_waiting_requests(limits: Limits, gate: Gate, scheduler: Scheduler) -> None:
    """After its turn no further request with the merged set is admitted, before that all are."""
    gate.limit_batch(capacity=8, efficient=8)
    scheduler.runners[0].model.use_adapters(A)
    jobs = [scheduler.submit(params(0, loras=A))]
    gate.run(1)
    jobs += [scheduler.submit(params(seed, loras=loras)) for seed, loras in ((1, B), (2, A))]
    gate.open()
    results(*jobs)
    assert gate.order == ([0, 1, 2] if limits is ONE_TURN else [0, 2, 1])


def test_reading_an_adapter_holds_nobody_up(
    gate: Gate, scheduler: Scheduler, adapted: AdapterModel, tmp_path: Path
) -> None:
    let_go = adapted.store.hold(adapted.blobs["a"])
    adapted.library.load(["b"])
    slow = scheduler.submit(params(0, loras=A))
    gate.open()
    others = [scheduler.submit(params(1)), scheduler.submit(params(2, loras=B))]
    results(*others)
    assert not slow.done and scheduler.healthy()
    let_go.set()
    results(slow)
    for job in (slow, *others):
        assert np.array_equal(pixels(job.result.result().images[0]), expected(tmp_path, job))


def test_damaged_adapter_fails_its_request_only(gate: Gate, scheduler: Scheduler, adapted: AdapterModel) -> None:
    with damaged(adapted):
        running = scheduler.submit(params(1, num_inference_steps=20))
        gate.run(2)
        failing = scheduler.submit(params(2, loras=A))
        gate.open()
        with pytest.raises(AdapterError, match="Adapter a cannot be loaded. Blob .* is damaged"):
            results(failing)
        results(running)
    assert adapted.store.unpinned == adapted.store.reads
    results(scheduler.submit(params(3, loras=A)))


def test_a_damaged_adapter_is_read_once_for_all_that_wait(scheduler: Scheduler, adapted: AdapterModel) -> None:
    with damaged(adapted):
        with paused(scheduler):
            failing = [scheduler.submit(params(seed, loras=A)) for seed in range(4)]
        for job in failing:
            with pytest.raises(AdapterError):
                results(job)
        assert adapted.store.reads == [adapted.blobs["a"]]
    results(scheduler.submit(params(9, loras=A)))


def test_failed_merge_fails_its_request_only(
    gate: Gate, scheduler: Scheduler, load_all: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are then half merged. Each later request merges what it needs."""
    gate.open()
    write = merge._write

    def fail_after_write(*arguments: Any) -> None:
        write(*arguments)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(merge, "_write", fail_after_write)
    with pytest.raises(torch.OutOfMemoryError):
        results(scheduler.submit(params(1, loras=A)))
    monkeypatch.setattr(merge, "_write", write)
    for loras in ((), B):
        job = scheduler.submit(params(2, loras=loras))
        assert np.array_equal(pixels(results(job)[0].images[0]), expected(tmp_path / str(len(loras)), job))
    assert scheduler.healthy()


def test_request_that_waits_for_an_adapter_can_be_cancelled(
    gate: Gate, scheduler: Scheduler, adapted: AdapterModel
) -> None:
    """The end of the scheduler answers one, too."""
    let_go = adapted.store.hold(adapted.blobs["a"])
    waiting = scheduler.submit(params(0, loras=A))
    scheduler.cancel(waiting, Cancelled("The client left."))
    settle(scheduler)
    gate.open()
    results(scheduler.submit(params(90, num_images=8)))  # all places in the queue are free
    waiting = scheduler.submit(params(1, loras=A))
    settle(scheduler)
    scheduler.close()
    with pytest.raises(Unavailable):
        results(waiting)
    let_go.set()
    assert not {0, 1} & set(gate.order)


@pytest.fixture
def small_cache(tmp_path: Path) -> Iterator[AdapterModel]:
    """A model whose device keeps two adapters."""
    made = adapter_model(tmp_path / "store", cache_bytes=2 * ADAPTER_BYTES)
    yield made
    made.library.close()


def test_least_recently_used_adapter_leaves_the_device(small_cache: AdapterModel) -> None:
    library, blobs = small_cache.library, small_cache.blobs
    scheduler = Scheduler([Runner(small_cache.model)], Limits(), lambda: None)
    for loras in (A, B, A, C, A, B):
        results(scheduler.submit(params(0, loras=loras)))
    scheduler.close()
    library.prepare([[]])
    assert len(library.on_device) == 2
    names = {digest: name for name, digest in blobs.items()}
    assert [names[digest] for digest in small_cache.store.reads] == ["a", "b", "c", "b"]


@pytest.mark.usefixtures("load_all")
def test_scale_is_part_of_the_set(gate: Gate, scheduler: Scheduler) -> None:
    with paused(scheduler):
        jobs = [scheduler.submit(params(7, loras=(("a", scale),))) for scale in (1.0, 0.5)]
    gate.open()
    results(*jobs)
    images = [pixels(job.result.result().images[0]) for job in jobs]
    assert len(gate.steps) == 8 and not np.array_equal(*images)


@pytest.mark.usefixtures("load_all")
@pytest.mark.parametrize("limits", [ONE_TURN])
def test_images_of_an_admitted_request_finish_in_its_turn(gate: Gate, scheduler: Scheduler) -> None:
    gate.limit_batch(capacity=2, efficient=2)  # one guided image
    with paused(scheduler):
        jobs = [scheduler.submit(params(0, num_images=3, loras=A)), scheduler.submit(params(10, loras=B))]
        jobs.append(scheduler.submit(params(20, loras=A)))
    gate.open()
    results(*jobs)
    assert gate.order == [0, 1, 2, 10, 20]


def test_old_failure_answers_no_later_request(gate: Gate, scheduler: Scheduler, adapted: AdapterModel) -> None:
    """The request that needed the adapter left before it could not be read."""
    gate.open()
    with damaged(adapted):
        let_go = adapted.store.hold(adapted.blobs["a"])
        leaving = scheduler.submit(params(1, loras=A))
        settle(scheduler)
        scheduler.cancel(leaving, Cancelled("The client left."))
        settle(scheduler)
        let_go.set()
        eventually(lambda: adapted.store.reads == [adapted.blobs["a"]], "the damaged blob was read")
        settle(scheduler)
    results(scheduler.submit(params(2, loras=A)))


def test_adapters_are_read_for_a_release_without_a_slot(adapted: AdapterModel) -> None:
    """So a request waits once, and one whose adapter is damaged brings no release onto the device."""
    runner = Runner(adapted.model)
    slots = create_autospec(WeightSlots, instance=True)
    slots.holds.return_value, slots.update.return_value = False, []
    turns = WeightTurns([runner], slots, 1.0, lambda: None)
    jobs = [Job(runner, runner.plan(params(0, loras=loras)), None, 0, None) for loras in (A, B)]
    with damaged(adapted):
        found: list[tuple[Job, Exception]] = []

        def update() -> bool:
            for job, error in turns.update(jobs, lambda _: False):
                assert job is not None
                job.fail(error)
                found.append((job, error))
            return bool(found)

        eventually(update, "the failure")
    [(job, error)] = found
    assert job is jobs[0] and isinstance(error, AdapterError)
    eventually(lambda: adapted.library.has(["b"]), "the other adapter")
    turns.close()
