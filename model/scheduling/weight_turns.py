"""Whether the weights that a request needs are on the device: its release in a slot, with its adapters merged."""

from collections.abc import Callable, Iterator, Sequence

from model import metrics
from model.adapters.library import AdapterLibrary
from model.pipeline.runner import Runner
from model.scheduling.adapter_turns import AdapterTurns
from model.scheduling.job import Job
from model.scheduling.weight_slots import WeightSlots


class WeightTurns:
    """Used on the scheduler's thread, but for `placed` and `adapters_on_device`."""

    def __init__(
        self, runners: Sequence[Runner], slots: WeightSlots | None, adapter_seconds: float, wake: Callable[[], None]
    ) -> None:
        """`slots`: of the runners; None: the weights of all are on the device. `adapter_seconds`: see `AdapterTurns`.

        `wake`: lets the scheduler's thread decide again. Any thread may call it.
        """
        self._runners, self._slots = runners, slots
        self._adapters = {runner: AdapterTurns(runner.model, adapter_seconds, self._count_merge) for runner in runners}
        self._libraries: list[AdapterLibrary] = [
            runner.model.adapters for runner in runners if runner.model.adapters is not None
        ]
        for library in self._libraries:
            library.on_loaded = wake
        if slots is not None:
            slots.wake = wake

    @property
    def placed(self) -> tuple[int, ...]:
        """The indices of the releases whose weights are on the device or will be. Any thread may read it."""
        return tuple(range(len(self._runners))) if self._slots is None else self._slots.placed

    @property
    def adapters_on_device(self) -> frozenset[str]:
        """The adapters whose factors are on the device. Any thread may read it."""
        return frozenset(name for library in self._libraries for name in library.on_device)

    @property
    def is_loading(self) -> bool:
        """True while a release is fetched, or loaded into a slot."""
        return self._slots is not None and self._slots.is_loading

    @property
    def has_work(self) -> bool:
        """True if the next `update` goes on with a load."""
        return self._slots is not None and self._slots.has_work

    def update(
        self, waiting: Sequence[Job], in_flight: Callable[[Runner], bool]
    ) -> Iterator[tuple[Job | None, Exception]]:
        """Load releases, and merge adapters, whose turn it is. `waiting`: in order of arrival.

        in_flight: true for a release with images in flight. Yields the jobs whose weights could not be loaded or
        merged, with the errors; None stands for no job. The caller answers each before it takes the next.
        """
        if self._slots is not None:
            yield from self._slots.update(waiting, in_flight, self.blocked)
        for runner, turns in self._adapters.items():
            own = [job for job in waiting if job.runner is runner]
            # Without a slot, adapters are read while the release is brought into one.
            while failed := turns.update(own, in_flight(runner)) if self._holds(runner) else turns.prepare(own):
                yield failed
        metrics.ADAPTERS_CACHED.set(sum(len(library.on_device) for library in self._libraries))

    def admits(self, job: Job) -> bool:
        """True if the weights that a job needs are on the device, and it is its turn."""
        return (self._slots is None or self._slots.admits(job)) and self._adapters[job.runner].admits(job)

    def blocked(self, runner: Runner) -> bool:
        """True if all requests of a release wait for a load: of the release, or of adapters."""
        if self._slots is None or self._slots.holds(runner):
            return self._adapters[runner].blocked
        return self._slots.waits(runner)

    def close(self) -> None:
        """End the threads that load, after the load of an adapter that has begun. Stop that of a release."""
        for library in self._libraries:
            library.close()
        if self._slots is not None:
            self._slots.close()

    def _holds(self, runner: Runner) -> bool:
        return self._slots is None or self._slots.holds(runner)

    def _count_merge(self, seconds: float) -> None:
        metrics.ADAPTER_MERGES.inc()
        metrics.ADAPTER_MERGE_SECONDS.observe(seconds)
