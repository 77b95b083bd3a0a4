"""Decide whose adapters are merged into the weights, where only one set can be at a time.

Images in flight need the same weights from their first stage to the end of their last loop. So a set is merged only
while no image is in flight. Requests take turns by their sets:

1. Requests with the merged set are admitted as if there were no others, for `turn_seconds` while others wait.
2. Then none of them is admitted any more. All images of requests that have begun finish.
3. Once no image is in flight, the set of the oldest waiting request whose adapters are on the device is merged. The
   same happens earlier if no request with the merged set waits.

So a request waits at most one turn, and the time of the requests that have begun, for each set that is ahead of it. A
request whose adapters are still being read is overtaken by others.
"""

import time
from collections.abc import Callable, Sequence

from model.adapters.layers import AdapterSet
from model.errors import AdapterError
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

    def update(self, waiting: Sequence[Job], in_flight: bool) -> tuple[Job, AdapterError] | None:
        """Merge the next set if it is its turn. `waiting`: in order of arrival.

        Returns a job whose adapters could not be loaded, with the error.
        """
        self.draining = self.blocked = False
        active = self._model.active_adapters
        others = [job for job in waiting if job.params.loras != active and not job.done]
        if not others:
            return None
        ready, failed = self._first_ready(others)
        own = [job for job in waiting if job.params.loras == active and not job.done]
        if ready is None:
            self.blocked = not own and not in_flight
            return failed
        now = time.monotonic()
        since = max(ready.accepted_at, self._merged_at)
        self.draining = now - since >= self._turn_seconds
        has_begun = in_flight or any(job.joined_count for job in own)
        if not has_begun and (self.draining or not own):
            self._model.use_adapters(ready.params.loras)
            self._merged_at = time.monotonic()
            self._on_merged(self._merged_at - now)
            self.draining = False
        return None

    def admits(self, job: Job) -> bool:
        """True if images of a job may start now, as far as its adapters decide."""
        return job.params.loras == self._model.active_adapters and (not self.draining or job.joined_count > 0)

    def _first_ready(self, jobs: Sequence[Job]) -> tuple[Job | None, tuple[Job, AdapterError] | None]:
        """Return the oldest job whose adapters are on the device, or a job whose adapters failed to load.

        Only the adapters of the oldest job are loaded: those of others could push them out.
        """
        tried: set[AdapterSet] = set()
        for job in jobs:
            if (adapters := job.params.loras) in tried:
                continue
            tried.add(adapters)
            try:
                if not adapters or self._on_device([name for name, _ in adapters], load=job is jobs[0]):
                    return job, None
            except AdapterError as error:
                return None, (job, error)
        return None, None

    def _on_device(self, names: list[str], load: bool) -> bool:
        library = self._model.adapters
        assert library is not None
        return library.prepare(names) if load else library.has(names)
