"""Which steps of a sampler run the UNet, where the predictions of the others are forecast.

After Spectrum (arXiv 2603.01623). `model.denoising.loop_schedule` has the forecasts. Imports neither torch nor numpy.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from model.validation import Forecast


class Level(NamedTuple):
    """Which steps are evaluated: the first `warm`, the last from the share `stop` on, and one in floor(window) between.

    window grows by `flex` after each of those between.
    """

    warm: int
    window: float
    flex: float
    stop: float


LEVELS = {"quality": Level(6, 2.0, 0.0, 0.8), "fast": Level(5, 2.0, 0.25, 0.9)}


def evaluated_steps(level: Level, steps: int, breaks: Sequence[int] = ()) -> list[int]:
    """Return the steps whose prediction is the UNet's.

    breaks: the steps at which the UNet's inputs become others, such as the first one without guidance. Such a step and
    the next are evaluated, because no earlier prediction counts there.
    """
    required = {step + more for step in breaks for more in range(2)}
    evaluated: list[int] = []
    since, window = 0, level.window
    for step in range(steps):
        between = level.warm <= step < min(level.stop * steps, steps - 1) and step not in required
        if between and since + 1 < math.floor(window):
            since += 1
            continue
        evaluated.append(step)
        since = 0
        window += level.flex if step >= level.warm else 0
    return evaluated


def evaluation_count(forecast: Forecast, steps: int) -> int:
    """Return how many of `steps` are evaluated, without breaks."""
    return steps if forecast == "off" else len(evaluated_steps(LEVELS[forecast], steps))
