"""TensorRT's nested phases -> one line of the build's progress, at most one report a percent."""

from collections.abc import Callable


class PhaseProgress:
    """Follows phases as TensorRT reports them: nested, with steps each, from its own threads, one call at a time.

    `tell` is given a line such as "building: Tactic search 43%". What it raises (an interrupt, say) does not pass
    through TensorRT: the build is told to stop and the error is kept in `error`.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._steps: dict[str, int] = {}
        self._parents: dict[str, str | None] = {}
        self._said = ""
        self.error: BaseException | None = None

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        self._steps[phase], self._parents[phase] = max(steps, 1), parent
        self._report(phase, 0)

    def step(self, phase: str, step: int) -> bool:
        """False where the build should stop."""
        self._report(phase, step + 1)
        return self.error is None

    def finish(self, phase: str) -> None:
        self._steps.pop(phase, None)
        self._parents.pop(phase, None)

    def _report(self, phase: str, done: int) -> None:
        """Only the outermost phase and the one in it: the others come and go too fast to read."""
        parent = self._parents.get(phase)
        if parent is not None and self._parents.get(parent) is not None:
            return
        line = f"building: {phase} {100 * min(done, self._steps.get(phase, 1)) // self._steps.get(phase, 1)}%"
        if line == self._said or self.error is not None:
            return
        self._said = line
        try:
            self._tell(line)
        except BaseException as error:
            self.error = error
