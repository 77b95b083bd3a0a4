"""A scheduler on linear networks, whose steps a test can hold, count and fail."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from model.denoising.eager_loop import EagerLoop
from model.denoising.loop import ImageState
from model.pipeline import spec
from model.pipeline.loaded_model import LoadedModel, LoopKey
from model.pipeline.params import GenerationParams
from model.pipeline.runner import Runner
from model.scheduling.job import GenerationResult, Job
from model.scheduling.scheduler import Scheduler
from model.settings import Limits
from tests.support.linear_networks import PLAIN
from tests.support.waiting import TIMEOUT_SECONDS

HEIGHT, WIDTHS = 64, (64, 96)


def params(seed: int, **changes: object) -> GenerationParams:
    return replace(PLAIN, seed=seed, **changes)  # type: ignore[arg-type]


def results(*jobs: Job) -> list[GenerationResult]:
    """Wait for all jobs, and return their results."""
    return [job.result.result(TIMEOUT_SECONDS) for job in jobs]


def served_together(model: LoadedModel, requests: Sequence[GenerationParams]) -> list[GenerationResult]:
    """Return the results of requests that arrive in one round."""
    scheduler = Scheduler([Runner(model)], Limits(), lambda: None)
    with paused(scheduler):
        jobs = [scheduler.submit(params) for params in requests]
    finished = results(*jobs)
    scheduler.close()
    return finished


def settle(scheduler: Scheduler) -> None:
    """Return once the scheduler's thread has done all that was sent to it: two rounds later."""
    for _ in range(2):
        scheduler.call(lambda: None).result(TIMEOUT_SECONDS)


@contextmanager
def paused(scheduler: Scheduler) -> Iterator[None]:
    """Hold the scheduler's thread, so that all requests of the block arrive in the same round."""
    begun, resumed = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        resumed.wait(TIMEOUT_SECONDS)

    scheduler.call(wait)
    assert begun.wait(TIMEOUT_SECONDS)
    yield
    resumed.set()


class Step(NamedTuple):
    """A step of a loop, and the seeds of the images in it."""

    unet: str
    width: int
    seeds: list[int]


class Gate:
    """Holds each step of a model's loops until `run` or `open` allows it. `steps`: the steps that have begun."""

    def __init__(self, model: LoadedModel) -> None:
        self.steps: list[Step] = []
        self._allowed, self._begun = threading.Semaphore(0), threading.Semaphore(0)
        self._is_open = False
        self._loops = [
            GatedLoop(self, model, (unet, HEIGHT, width)) for unet in (spec.UNET, spec.REFINER_UNET) for width in WIDTHS
        ]
        model.loops |= {loop.key: loop for loop in self._loops}
        self.limit_batch(4, 4)  # two guided images

    @property
    def seeds(self) -> list[list[int]]:
        """The seeds of the images in each step."""
        return [step.seeds for step in self.steps]

    @property
    def order(self) -> list[int]:
        """The seeds in the order of their first steps."""
        return list(dict.fromkeys(seed for seeds in self.seeds for seed in seeds))

    def limit_batch(self, capacity: int, efficient: int, power: float = 0.955) -> None:
        """Set the limits of all loops, in batch entries.

        Only beyond `efficient` do more entries take longer: with `power` 1 as many times as they are more. By default
        four times as many save 6 % of that.
        """
        for loop in self._loops:
            loop.capacity = capacity
            loop.costs.replace({option: max(1.0, option.batch / efficient) ** power for option in loop.costs.options})

    def run(self, steps: int = 1) -> None:
        """Allow `steps` further steps, and wait until the last of them has begun."""
        self._allowed.release(steps)
        for _ in range(steps):
            assert self._begun.acquire(timeout=TIMEOUT_SECONDS)

    def open(self) -> None:
        """Allow all further steps."""
        self._is_open = True
        self._allowed.release()

    def begin(self, step: Step) -> None:
        """Wait until a step is allowed, and record it."""
        if not self._is_open:
            assert self._allowed.acquire(timeout=TIMEOUT_SECONDS)
        self.steps.append(step)
        self._begun.release()


class GatedLoop(EagerLoop):
    def __init__(self, gate: Gate, model: LoadedModel, key: LoopKey) -> None:
        unet, height, width = key
        super().__init__(model.denoiser(unet, height, width), height, width)
        self.key = key
        self._gate = gate

    def step(self) -> list[ImageState]:
        seeds = [image.generator.initial_seed() for image in self.images]
        self._gate.begin(Step(self.key[0], self.key[2], seeds))
        return super().step()
