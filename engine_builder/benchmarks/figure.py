"""Draw a figure with two panels, for `preheat load` and `preheat plan-replicas`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def two_panels(path: Path, title: str) -> Iterator[tuple[Any, Any]]:
    """Yield the left and right axes to draw on. Then write the figure to `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    yield left, right
    figure.savefig(path, dpi=110)
