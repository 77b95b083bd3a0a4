"""One run of the training: its folder, device, clock and log, handed to every stage."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training.compiled import compiled
from training.data import Workers
from training.learner import Learner
from training.settings import Settings

LOG_STEPS = 100


class PausedError(Exception):
    """The time given to this run is used up; its checkpoint is saved."""


class Run:
    def __init__(
        self, settings: Settings, out: Path, workers: Workers, stop_after: float | None = None, fast: bool = True
    ) -> None:
        """`stop_after`: seconds from now; `fast`: compile the networks (CUDA only)."""
        self.settings, self.out, self.workers = settings, out, workers
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.fast = fast and self.device.type == "cuda"
        self.began = time.monotonic()
        self.stop_after = stop_after

    def log(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:7.1f} s] {text}", flush=True)

    def compiled(self, function: Callable[..., Any], networks: nn.Module) -> Callable[..., Any]:
        """`function`, which runs `networks`; compiled, unless this run is not to."""
        return compiled(function, networks) if self.fast else function

    def learn(self, stage: str, learner: Learner, loss: Callable[[int], Tensor]) -> float:
        """Updates `learner` with `loss(step)` until its last step, from its checkpoint where there is one; ends
        with the averaged weights in the networks. Returns the seconds of all its runs."""
        state = self.out / f"{stage}.state.safetensors"
        saved = time.monotonic()
        began = saved - learner.seconds
        marked, mark, losses = saved, learner.step, []
        while learner.step < learner.steps:
            value = loss(learner.step)
            learner.update(value)
            losses.append(value.detach())
            if learner.step % LOG_STEPS == 0 or learner.step == learner.steps:
                mean = float(torch.stack(losses).mean())
                losses.clear()
                pace = (learner.step - mark) / (time.monotonic() - marked)
                marked, mark = time.monotonic(), learner.step
                self.log(f"{stage} {learner.step}/{learner.steps}: loss {mean:.4f}, {pace:.1f} steps/s")
            now = time.monotonic()
            out_of_time = self.stop_after is not None and now - self.began > self.stop_after
            if out_of_time or now - saved > self.settings.checkpoint_seconds:
                learner.seconds = now - began
                learner.save(state)
                saved = now
                if out_of_time:
                    self.log(f"{stage} paused at step {learner.step}; run again to go on")
                    raise PausedError
        learner.use_average()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic() - began

    def resume(self, stage: str, learner: Learner) -> None:
        state = self.out / f"{stage}.state.safetensors"
        if state.exists():
            learner.load(state)
            self.log(f"{stage} goes on from step {learner.step}")
