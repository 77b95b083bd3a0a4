"""Time the choices of a benchmark, such as tiles, and leave out those that fail."""

from collections.abc import Mapping, Sequence

from engine_builder.building.graph_timing import Timer, Work


class Failures:
    """Prints each failure of a case once, in one line."""

    def __init__(self) -> None:
        self._printed: set[str] = set()

    def print(self, case: str, error: Exception) -> None:
        """Print the case and the error's first line, unless this case failed before."""
        if case not in self._printed:
            self._printed.add(case)
            lines = str(error).strip().splitlines() or [""]
            print(f"{case} failed: {type(error).__name__}: {lines[0][:300]}", flush=True)


def time_choices(choices: Mapping[str, Sequence[Work]], timer: Timer, failures: Failures) -> dict[str, list[float]]:
    """Return the times of the choices that run, by name. A choice that fails is left out, and its error is printed."""
    times = {}
    for name, works in choices.items():
        try:
            times[name] = timer(works)
        except Exception as error:  # of the compiler, the driver or PyTorch, such as too little shared memory
            failures.print(name, error)
    return times
