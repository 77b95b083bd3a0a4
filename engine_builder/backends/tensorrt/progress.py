"""Turn TensorRT's nested phases into one line of the build's progress: each phase's start, then one line a second."""

import time
from collections.abc import Callable

_SECONDS_BETWEEN_LINES = 1.0


class PhaseProgress:
    """Tracks nested phases, which have steps. TensorRT reports them from its own threads, one call at a time.

    `report` receives lines such as "building: Tactic search 43%". An exception of `report`, for example an interrupt,
    cannot pass through TensorRT. So it is stored in `error`, and the build is stopped.
    """

    def __init__(self, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._report_line = report
        self._clock = clock
        self._reported_at = -_SECONDS_BETWEEN_LINES
        self._steps: dict[str, int] = {}
        self._parents: dict[str, str | None] = {}
        self._last_line = ""
        self.error: BaseException | None = None

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        self._steps[phase], self._parents[phase] = max(steps, 1), parent
        self._report(phase, 0)

    def step(self, phase: str, step: int) -> bool:
        """Return False if the build should stop."""
        self._report(phase, step + 1)
        return self.error is None

    def finish(self, phase: str) -> None:
        self._steps.pop(phase, None)
        self._parents.pop(phase, None)

    def _report(self, phase: str, done: int) -> None:
        """Report only the outermost phase and the phases directly inside it. Deeper ones change too fast to read."""
        parent = self._parents.get(phase)
        if parent is not None and self._parents.get(parent) is not None:
            return
        steps = self._steps.get(phase, 1)
        line = f"building: {phase} {100 * min(done, steps) // steps}%"
        is_early = done > 0 and self._clock() - self._reported_at < _SECONDS_BETWEEN_LINES
        if line == self._last_line or is_early or self.error is not None:
            return
        self._last_line, self._reported_at = line, self._clock()
        try:
            self._report_line(line)
        except BaseException as error:
            self.error = error
