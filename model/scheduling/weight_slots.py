"""Decide which releases have their weights on the device, where not all of them fit.

A slot holds the weights of one release at fixed addresses, with engines and loops on them. Images of releases in slots
are generated side by side. For a request of another release:

1. Its weights are fetched onto this machine, while all slots go on.
2. A new slot is opened while the device has room.
3. Otherwise its weights fill the slot that was used the longest time ago, if no image of that slot's release is in
   flight or waits. The other slots go on meanwhile.
4. If images of all slots' releases run or wait, the slot whose weights arrived first is drained: after `turn_seconds`
   none of its requests begins any more, and those that have begun finish.

So a request waits at most for its fetch, and then a turn, the time of the requests that have begun, and a load, for
each release that is fetched before it and has no slot. Fetches run side by side, but only one load. Without requests,
new slots are opened for the remaining releases, in order.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from model import metrics
from model.adapters.merge import AdaptableWeights
from model.errors import PreheatError, ReleaseNotLoaded, StoreError
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.runner import Runner
from model.scheduling.job import Job
from model.weights.slot import WeightSlot

logger = logging.getLogger("preheat")

_END = object()
_CONCURRENT_FETCHES = 4  # of releases, so that a slow one delays no other


@dataclass(eq=False)
class Slot:
    """Engines, loops and streams on weights at fixed addresses.

    model: has these engines, loops and streams; no request uses it. runner: of the release in the slot; None: none, or
    it is being loaded. since, used: by time.monotonic(), the arrival of the weights, and the last use by a request.
    """

    model: LoadedModel
    weights: WeightSlot
    adaptable: AdaptableWeights | None
    runner: Runner | None = None
    since: float = field(default_factory=time.monotonic)
    used: float = 0.0


class SlotLoader(Protocol):
    """Loads releases, by their index among the scheduler's runners."""

    def name(self, index: int) -> str:
        """Return the name of a release."""

    def has_room(self) -> bool:
        """True if the device has the memory of another slot."""

    def fetch(self, index: int) -> None:
        """Copy a release's weights onto this machine. Called on a thread of its own. Raises PreheatError."""

    def open(self, index: int) -> Slot:
        """Load a release into a new slot. Called on a thread of its own. Raises PreheatError."""

    def fill(self, index: int, slot: Slot) -> None:
        """Replace a slot's weights by a release's. Called on a thread of its own. Raises PreheatError."""

    def stop(self) -> None:
        """Let fetches and loads that run raise Unavailable soon. Any thread may call it."""

    def begin(self, index: int, is_new: bool) -> Iterator[None]:
        """Return the work that must precede the first request of a release that is in a slot; is_new: the slot is new.

        Images of other releases may be generated between its parts.
        """


@dataclass(eq=False)
class _Load:
    """A release that is being loaded into a slot; None: a new one. work: of `SlotLoader.begin`, once it has begun."""

    index: int
    slot: Slot | None
    result: "Future[Slot]"
    began: float
    work: Iterator[None] | None = None


class WeightSlots:
    """Used on the scheduler's thread. `wake`, which it is given, lets that thread decide again."""

    def __init__(
        self,
        runners: Sequence[Runner],
        loader: SlotLoader,
        first: Slot,
        limit: int | None = None,
        turn_seconds: float = 2.0,
    ) -> None:
        """`first`: has the weights of the first runner. `limit`: the most slots; None: as many as fit."""
        self.wake: Callable[[], None] = lambda: None
        self._runners, self._loader = tuple(runners), loader
        self._limit, self._turn_seconds = limit or len(runners), turn_seconds
        self._slots = [first]
        self._fetches: dict[int, Future[None]] = {}  # by release: those that run, or have ended for a load
        self._load: _Load | None = None
        self._draining: Slot | None = None
        self._unopened = list(range(1, len(runners)))  # releases that have not been in a slot yet
        self._may_open = True
        self._opens_unasked = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="preheat-slots")
        self._fetch_pool = ThreadPoolExecutor(_CONCURRENT_FETCHES, thread_name_prefix="preheat-fetches")
        for index in range(len(runners)):
            metrics.RELEASE_RESIDENT.labels(loader.name(index)).set(0)
        self._attach(first, 0)
        self._enter(first, 0)

    @property
    def resident(self) -> tuple[int, ...]:
        """The indices of the releases in slots. Any thread may read it."""
        held = [slot.runner for slot in list(self._slots)]
        return tuple(self._runners.index(runner) for runner in held if runner is not None)

    @property
    def placed(self) -> tuple[int, ...]:
        """The indices of the releases in slots, and of those that are fetched or loaded. Any thread may read it."""
        load = self._load
        return (*self.resident, *self._fetches, *(() if load is None else (load.index,)))

    def open_unasked(self) -> None:
        """From now on, open slots for the releases that no request has asked for."""
        self._opens_unasked = True

    def weights_of(self, runner: Runner) -> WeightSlot | None:
        """Return the weights of a release on the device, None without a slot."""
        return next((slot.weights for slot in self._slots if slot.runner is runner), None)

    def is_loaded_now(self, runner: Runner) -> bool:
        """True while the weights of a release are brought into a slot."""
        return self._load is not None and self._runners[self._load.index] is runner

    def holds(self, runner: Runner) -> bool:
        """True if a release is in a slot."""
        return any(slot.runner is runner for slot in self._slots)

    def admits(self, job: Job) -> bool:
        """True if images of a job may start now, as far as its release decides."""
        slot = next((slot for slot in self._slots if slot.runner is job.runner), None)
        return slot is not None and (slot is not self._draining or job.joined_count > 0)

    @property
    def is_loading(self) -> bool:
        """True while a release is fetched or loaded."""
        return self._load is not None or any(not fetch.done() for fetch in self._fetches.values())

    def waits(self, runner: Runner) -> bool:
        """True if a release without a slot waits for the end of its fetch or of a load."""
        fetch = self._fetches.get(self._runners.index(runner))
        return self._load is not None or (fetch is not None and not fetch.done())

    @property
    def has_work(self) -> bool:
        """True if the next `update` goes on with a load."""
        return self._load is not None and self._load.result.done()

    def update(
        self, waiting: Sequence[Job], in_flight: Callable[[Runner], bool], blocked: Callable[[Runner], bool]
    ) -> list[tuple[Job | None, Exception]]:
        """Go on with a load, or begin one. `waiting`: in order of arrival.

        in_flight, blocked: true for a release with images in flight, and for one in a slot whose requests all wait for
        adapters. Returns the jobs whose release could not be loaded, with the errors. An unexpected error of a load
        without jobs has None in place of a job.
        """
        had_load = self._load is not None
        failed = [*self._advance_load(waiting), *self._end_failed_fetches(waiting)]
        jobs = [job for job in waiting if not job.done and all(job is not one for one, _ in failed)]
        asked, now = {job.runner for job in jobs if not blocked(job.runner)}, time.monotonic()
        for slot in self._slots:
            if slot.runner is not None and (slot.runner in asked or in_flight(slot.runner)):
                slot.used = now
        self._draining = None
        wanted: dict[int, Job] = {}  # by release, the first job
        for job in jobs:
            if not self.holds(job.runner):
                wanted.setdefault(self._runners.index(job.runner), job)
        missing = [*wanted] or self._next_unasked()
        self._begin_fetches(missing)
        if self._load is not None:
            return failed
        index = next((index for index in missing if _has_succeeded(self._fetches[index])), None)
        if index is None:
            return failed
        if self._can_open():
            self._begin_load(index, None)
        elif wanted and not had_load:  # first, requests of the release that has arrived begin
            begun = {job.runner for job in jobs if job.joined_count}
            self._make_way(wanted[index], asked, lambda runner: runner in begun or in_flight(runner), now)
        return failed

    def close(self) -> None:
        """Stop a load that has begun, and end its thread."""
        self._loader.stop()
        self._pool.shutdown(cancel_futures=True)
        self._fetch_pool.shutdown(wait=False, cancel_futures=True)

    def _next_unasked(self) -> list[int]:
        """Return the next release for which a slot is opened without a request, or an empty list."""
        first = self._unopened[:1] if self._opens_unasked and self._load is None else []
        return first if first and (first[0] in self._fetches or self._can_open()) else []

    def _begin_fetches(self, missing: Sequence[int]) -> None:
        """Fetch the weights of releases that have no slot. Forget those that were fetched for nothing."""
        loading = None if self._load is None else self._load.index
        kept = {index: fetch for index, fetch in self._fetches.items() if index in missing or not fetch.done()}
        for index in missing:
            if index not in kept and index != loading:
                kept[index] = self._fetch_pool.submit(self._loader.fetch, index)
                kept[index].add_done_callback(lambda _: self.wake())
        self._fetches = kept

    def _end_failed_fetches(self, waiting: Sequence[Job]) -> list[tuple[Job | None, Exception]]:
        """Return the jobs whose release could not be fetched, with the errors. The slots stay as they are."""
        failed: list[tuple[Job | None, Exception]] = []
        for index, fetch in list(self._fetches.items()):
            if fetch.done() and (error := fetch.exception()) is not None:
                assert isinstance(error, Exception)
                del self._fetches[index]
                failed += self._fail(index, error, waiting)
        return failed

    def _can_open(self) -> bool:
        if self._may_open:
            self._may_open = len(self._slots) < self._limit and self._loader.has_room()
        return self._may_open

    def _make_way(self, wanted: Job, asked: set[Runner], has_begun: Callable[[Runner], bool], now: float) -> None:
        """Begin the load of a job's release into a slot that is free for it, or else drain one."""

        def is_free(slot: Slot) -> bool:
            return slot.runner is None or not (slot.runner in asked or has_begun(slot.runner))

        index = self._runners.index(wanted.runner)
        if free := [slot for slot in self._slots if is_free(slot)]:
            self._begin_load(index, min(free, key=lambda slot: (slot.runner is not None, slot.used)))
            return
        oldest = min(self._slots, key=lambda slot: slot.since)
        if now - max(wanted.accepted_at, oldest.since) < self._turn_seconds:
            return
        self._draining = oldest
        assert oldest.runner is not None
        if not has_begun(oldest.runner):
            self._begin_load(index, oldest)

    def _begin_load(self, index: int, slot: Slot | None) -> None:
        self._draining = None
        del self._fetches[index]
        if slot is None:
            result = self._pool.submit(self._loader.open, index)
        else:
            self._leave(slot)
            wait = slot.model.queued_work()

            def fill() -> Slot:
                wait()
                self._loader.fill(index, slot)
                return slot

            result = self._pool.submit(fill)
        self._load = _Load(index, slot, result, time.monotonic())
        result.add_done_callback(lambda _: self.wake())

    def _advance_load(self, waiting: Sequence[Job]) -> list[tuple[Job | None, Exception]]:
        """Run a part of what follows once the weights have arrived. Requests may begin after the last part.

        After an error, return the jobs that waited for the release.
        """
        load = self._load
        if load is None or not load.result.done():
            return []
        runner = self._runners[load.index]
        try:
            slot = load.result.result()
            if load.work is None:
                self._attach(slot, load.index)
                if load.slot is not None and slot.adaptable is not None:
                    slot.adaptable.renew()
                load.work = self._loader.begin(load.index, is_new=load.slot is None)
            if next(load.work, _END) is not _END:
                return []
        except Exception as error:
            self._load = None
            self._detach(runner)
            if load.slot is None:
                runner.model.run_on(self._slots[0].model)  # frees the new engines
                # A slot that exists takes the release, and needs no memory and no file.
                self._may_open = isinstance(error, StoreError)
            return self._fail(load.index, error, waiting if load.slot or self._may_open else ())
        self._load = None
        if load.index in self._unopened:
            self._unopened.remove(load.index)
        if load.slot is None:
            self._slots.append(slot)
        self._enter(slot, load.index)
        name, kind = self._loader.name(load.index), "open" if load.slot is None else "fill"
        seconds = time.monotonic() - load.began
        metrics.RELEASE_LOADS.labels(kind).inc()
        metrics.RELEASE_LOAD_SECONDS.labels(kind).observe(seconds)
        entry = {"event": "release_loaded", "release": name, "slots": len(self._slots), "new_slot": load.slot is None}
        logger.info(json.dumps({**entry, "seconds": round(seconds, 3)}))
        return []

    def _fail(self, index: int, error: Exception, waiting: Sequence[Job]) -> list[tuple[Job | None, Exception]]:
        """Report a failure to fetch or load a release. Returns its jobs among `waiting`, with the error."""
        name, runner = self._loader.name(index), self._runners[index]
        metrics.RELEASE_LOADS.labels("failed").inc()
        if index in self._unopened:
            self._unopened.remove(index)
        cause = str(error) if isinstance(error, PreheatError) else f"{type(error).__name__}: {error}"
        logger.error("%s cannot be loaded: %s", name, cause)
        failed = [job for job in waiting if job.runner is runner]
        if isinstance(error, PreheatError):
            failure = ReleaseNotLoaded(f"Release {name} cannot be loaded. {cause}", "")
            return [(job, failure) for job in failed]
        # The scheduler asks the device after any other error. Without a job it does not take the error's word for it.
        return [(job, error) for job in failed] or [(None, RuntimeError(cause))]

    def _attach(self, slot: Slot, index: int) -> None:
        """Let a release use the engines and weights of a slot."""
        runner = self._runners[index]
        runner.model.run_on(slot.model)
        if runner.model.adapters is not None:
            runner.model.adapters.use(slot.adaptable)

    def _detach(self, runner: Runner) -> None:
        if runner.model.adapters is not None:
            runner.model.adapters.use(None)

    def _enter(self, slot: Slot, index: int) -> None:
        """Let requests of a release begin, whose weights are in a slot."""
        slot.runner, slot.since = self._runners[index], time.monotonic()
        metrics.RELEASE_RESIDENT.labels(self._loader.name(index)).set(1)

    def _leave(self, slot: Slot) -> None:
        if slot.runner is None:
            return
        self._detach(slot.runner)
        metrics.RELEASE_RESIDENT.labels(self._loader.name(self._runners.index(slot.runner))).set(0)
        slot.runner = None


def _has_succeeded(fetch: "Future[None]") -> bool:
    return fetch.done() and fetch.exception() is None
