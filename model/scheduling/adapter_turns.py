"""Decide whose adapters are merged into the weights, where only one set can be at a time.

Images in flight need the same weights from their first stage to the end of their last loop. So a set is merged only
while no image is in flight. Requests take turns by their sets:

1. Requests with the merged set are admitted as if there were no others, for `turn_seconds` while others wait.
2. Then none of them is admitted any more. All images of requests that have begun finish.
3. Once no image is in flight, the set of the oldest waiting request whose adapters are on the device is merged. The
   same happens earlier if no request with the merged set waits.

A request whose adapters are inputs of the UNet needs the weights of the model itself, and takes its turn with the
requests without adapters.

So a request waits at most one turn, and the time of the requests that have begun, for each set that is ahead of it. A
request whose adapters are still being read is overtaken by others.
"""

import time
from collections.abc import Callable, Sequence

from model.pipeline.loaded_model import LoadedModel
from model.scheduling.job import Job


class AdapterTurns:
    """Used on the scheduler's thread."""

    def __init__(self, model: LoadedModel, turn_seconds: float, on_merged: Callable[[float], None]) -> None:
        """`on_merged` is called with the host's seconds of a merge; the work may still be queued on the device."""
        self._model = model
        self._turn_seconds = turn_seconds
        self._on_merged = on_merged
        self._merged_at = time.monotonic()
        self.draining = False
        """True if no further request with the merged set is admitted."""
        self.blocked = False
        """True if nothing can run until an adapter is on the device."""

    def update(self, waiting: Sequence[Job], in_flight: bool) -> tuple[Job, Exception] | None:
        """Merge the next set if it is its turn. `waiting`: in order of arrival.

        Returns a job whose adapters could not be loaded or merged, with the error.
        """
        self.draining = self.blocked = False
        active, library = self._model.active_adapters, self._model.adapters
        if (failed := self.prepare(waiting)) is not None or library is None:
            return failed
        jobs = [job for job in waiting if not job.done]
        own = [job for job in jobs if job.plan.adapters.merged == active]
        others = [job for job in jobs if job.plan.adapters.merged != active]
        next_job = next((job for job in others if self._is_ready(job)), None)
        if next_job is None:
            self.blocked = not in_flight and bool(jobs) and not any(map(self._is_ready, own))
            return None
        now = time.monotonic()
        self.draining = now - max(next_job.accepted_at, self._merged_at) >= self._turn_seconds
        has_begun = in_flight or any(job.joined_count for job in own)
        if not has_begun and (self.draining or not any(map(self._is_ready, own))):
            try:
                self._model.use_adapters(next_job.plan.adapters.merged)
            except Exception as error:
                return next_job, error
            self._merged_at = time.monotonic()
            self._on_merged(self._merged_at - now)
            self.draining = False
        return None

    def prepare(self, waiting: Sequence[Job]) -> tuple[Job, Exception] | None:
        """Load the adapters of `waiting` onto the device. Returns a job that cannot get them, with the error.

        Others that need the same adapters are returned by the next calls. Once none is left, a later one reads them
        again.
        """
        library = self._model.adapters
        needing = [job for job in waiting if not job.done and self._needed(job)]
        if library is None:
            return None
        library.prepare(list({job.params.loras: self._needed(job) for job in needing}.values()))
        for job in needing:
            if (error := library.failure(self._needed(job))) is not None:
                return job, error
        library.forget_failures()  # all who waited are answered
        return None

    def admits(self, job: Job) -> bool:
        """True if images of a job may start now, as far as its adapters decide."""
        is_merged = job.plan.adapters.merged == self._model.active_adapters
        return is_merged and (not self.draining or job.joined_count > 0) and self._is_ready(job)

    def _needed(self, job: Job) -> list[str]:
        """Return the adapters whose factors a job needs before it starts. Those that are merged are needed no more."""
        is_merged = job.plan.adapters.merged and job.plan.adapters.merged == self._model.active_adapters
        return [] if is_merged or job.joined_count else [name for name, _ in job.params.loras]

    def _is_ready(self, job: Job) -> bool:
        library = self._model.adapters
        return library is None or library.has(self._needed(job))
