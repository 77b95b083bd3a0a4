"""Forecasts on diffusers' own schedulers, step by step: a plain implementation of docs/forecast.md."""

import inspect
import math
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

SETTINGS = {"fast": (5, 2.0, 0.25, 0.9), "quality": (6, 2.0, 0.0, 0.8)}  # warm, window, flex, stop


class Forecaster:
    """Replaces the predictions that a scheduler's `step` receives, except those of the evaluated steps.

    The predictions are guided, because pipelines guide before they call `step`. `calls`: how often it was called.
    """

    def __init__(self, scheduler: Any, level: str, steps: int, breaks: Collection[int]) -> None:
        self._step, self._steps, self._breaks = scheduler.step, steps, breaks
        self.__signature__ = inspect.signature(scheduler.step)  # pipelines pass what it has
        self._warm, self._window, self._flex, self._stop = SETTINGS.get(level, (math.inf, 1, 0, 0))
        self._since_evaluation = self.calls = 0
        self._kept: list[tuple[int, torch.Tensor]] = []
        scheduler.step = self

    def __call__(self, prediction: torch.Tensor, *args: Any, **options: Any) -> Any:
        step, self.calls = self.calls, self.calls + 1
        if step in self._breaks:
            self._kept.clear()
        always = step < self._warm or step >= min(self._stop * self._steps, self._steps - 1) or len(self._kept) < 2
        if always or self._since_evaluation + 1 >= math.floor(self._window):
            self._window += self._flex if step >= self._warm else 0
            self._since_evaluation = 0
            self._kept = [*self._kept[-5:], (step, prediction)]
        else:
            self._since_evaluation += 1
            prediction = self._forecast(step)
        return self._step(prediction, *args, **options)

    def _forecast(self, step: int) -> torch.Tensor:
        """Return half of a polynomial of degree 4 through the kept predictions, and half of the line."""
        at = np.array([2 * one / self._steps - 1 for one, _ in self._kept])
        basis = np.polynomial.chebyshev.chebvander(np.append(at, 2 * step / self._steps - 1), 4)
        fitted, here = torch.from_numpy(basis[:-1]), torch.from_numpy(basis[-1])
        penalty = torch.diag(torch.tensor([0, 0.1, 0.1, 0.1, 0.1], dtype=torch.float64))
        values = torch.stack([value.double() for _, value in self._kept])
        polynomial = torch.linalg.solve(fitted.T @ fitted + penalty, fitted.T @ values.flatten(1))
        (before, earlier), (last, later) = self._kept[-2:]
        line = later + (step - last) / (last - before) * (later - earlier)
        return (0.5 * (here @ polynomial).reshape(later.shape) + 0.5 * line).to(later.dtype)
