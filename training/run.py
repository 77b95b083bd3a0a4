"""A training run: its settings, folder, device, clock and log, which every stage uses."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training.compile import compile_function
from training.optimizer import EmaOptimizer
from training.pictures.dataset import ChunkWorkers
from training.settings import Settings

LOG_EVERY_STEPS = 100


class PausedError(Exception):
    """The time of this run is over, and its checkpoint is saved."""


class TrainingRun:
    """One process of a training.

    out: folder of the checkpoints and the results.
    stop_after: seconds from now after which the run pauses; None never pauses.
    """

    def __init__(self, settings: Settings, out: Path, workers: ChunkWorkers, stop_after: float | None = None) -> None:
        self.settings, self.out, self.workers = settings, out, workers
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.started = time.monotonic()
        self.stop_after = stop_after

    def log(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:7.1f} s] {text}", flush=True)

    def compile(self, function: Callable[..., Any], networks: nn.Module) -> Callable[..., Any]:
        """Compile `function`, which runs `networks`, on a GPU."""
        return compile_function(function, networks) if self.device.type == "cuda" else function

    def resume(self, stage: str, optimizer: EmaOptimizer) -> None:
        """Load the checkpoint of a stage, if there is one."""
        checkpoint = self._checkpoint(stage)
        if checkpoint.exists():
            optimizer.load(checkpoint)
            self.log(f"{stage} continues from step {optimizer.step}")

    def optimize(self, stage: str, optimizer: EmaOptimizer, loss: Callable[[int], Tensor]) -> float:
        """Update `optimizer` with `loss(step)` until its last step, then put the averaged weights into the networks.

        Saves a checkpoint every `checkpoint_seconds`. Returns the seconds that the stage took in all its runs. Raises
        PausedError when the time of this run is over.
        """
        last_save = time.monotonic()
        stage_started = last_save - optimizer.seconds
        last_log, last_logged_step, losses = last_save, optimizer.step, []
        while optimizer.step < optimizer.steps:
            step_loss = loss(optimizer.step)
            optimizer.update(step_loss)
            losses.append(step_loss.detach())
            if optimizer.step % LOG_EVERY_STEPS == 0 or optimizer.step == optimizer.steps:
                mean = float(torch.stack(losses).mean())
                losses.clear()
                steps_per_second = (optimizer.step - last_logged_step) / (time.monotonic() - last_log)
                last_log, last_logged_step = time.monotonic(), optimizer.step
                progress = f"{stage} {optimizer.step}/{optimizer.steps}"
                self.log(f"{progress}: loss {mean:.4f}, {steps_per_second:.1f} steps/s")
            now = time.monotonic()
            out_of_time = self.stop_after is not None and now - self.started > self.stop_after
            if out_of_time or now - last_save > self.settings.checkpoint_seconds:
                optimizer.seconds = now - stage_started
                optimizer.save(self._checkpoint(stage))
                last_save = now
                if out_of_time:
                    self.log(f"{stage} paused at step {optimizer.step}; run the same command again to continue")
                    raise PausedError
        optimizer.use_averages()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic() - stage_started

    def remove_checkpoint(self, stage: str) -> None:
        self._checkpoint(stage).unlink(missing_ok=True)

    def _checkpoint(self, stage: str) -> Path:
        return self.out / f"{stage}.state.safetensors"
