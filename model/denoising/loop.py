"""The denoising loop: rows of one size on one UNet, each at a step of its own; they join and leave between steps.

The arithmetic is that of diffusers' pipelines, a row's own whatever its company. This module knows nothing of requests,
prompts, queues or HTTP; `model.pipeline.text_to_image` makes the rows and says which implementation runs them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from model.denoising.samplers import (
    Table,
    stack,
)
from model.engines.components import DTYPES
from model.engines.engine import EngineSet
from model.scheduling.admission import fits


@dataclass
class Conditioning:
    """What tells the UNet what to draw, in its precision: `keys_values` [1, tokens, width] of the text, `time_embeds`
    [steps, width] for each step of a row's table. `blank`: there is no text, not even an empty one, and keys and values
    are zeros."""

    keys_values: torch.Tensor
    time_embeds: torch.Tensor
    blank: bool = False


@dataclass(eq=False)
class Row:
    """One image on its way through a loop. `guidance` [steps]: 1 where the step is unguided, as all after it then are;
    `step`: steps done.

    latents: float32 [1, channels, height/8, width/8], what the row starts from, and once it has finished its result.
    The generator is that of the image's seed and is drawn from exactly as diffusers does: the first latents, then each
    step's noise.
    """

    latents: torch.Tensor
    table: Table
    guidance: NDArray[np.float32]
    generator: torch.Generator
    conditional: Conditioning
    unconditional: Conditioning | None
    step: int = 0

    @property
    def guided(self) -> bool:
        """Whether the next step is guided, and so takes two rows of the UNet."""
        return self.unconditional is not None and bool(self.guidance[self.step] > 1)

    @property
    def unet_rows(self) -> int:
        """Rows of the UNet that the next step takes; never more than the one before."""
        return 2 if self.guided else 1


class Loop(Protocol):
    """Rows of one size on one UNet on their way; they join and leave between steps.

    Used from one thread. A row that a step has not returned is the loop's; `row.latents` is then no one's to read.
    """

    capacity: int
    """Rows of the UNet that its images may take at once; may be lowered while the loop is empty."""
    efficient: int
    """How many of them it takes for more to hardly pay (`model.scheduling.admission`); as many as fit, until that is measured."""
    rows: list[Row]
    """The active rows, in order of joining."""

    def join(self, row: Row) -> None:
        """Take in a row whose step is 0 and whose table has steps, and for which there is room (`has_room`); copies its
        state into the loop, and may take its conditioning from it."""

    def leave(self, row: Row) -> None:
        """Free a row that is not wanted any more, before the next step. Its companions do not feel it."""

    def step(self) -> list[Row]:
        """One step of all active rows, each at its own `row.step`, which then counts it.

        Returns the rows that finished, out of the loop, with `row.latents` holding the result. It may return before
        the device is done: the work is queued on the current stream.
        """

    def latents(self, row: Row) -> torch.Tensor:
        """A copy of the row's current denoised estimate [1, channels, height/8, width/8], zeros before its first
        step. For previews."""


def unet_rows(rows: Sequence[Row]) -> int:
    """Rows of the UNet that the next step of these takes."""
    return sum(row.unet_rows for row in rows)


def has_room(loop: Loop, needed: int) -> bool:
    """Whether an image that takes `needed` rows of the UNet may join. What has joined never takes more than it did."""
    return fits(unet_rows(loop.rows), needed, loop.capacity)


def guide(unconditional: torch.Tensor, conditional: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """unconditional + scale * (conditional - unconditional): Ho and Salimans, "Classifier-free diffusion guidance",
    2022, in diffusers' form."""
    return torch.addcmul(unconditional, scale, conditional - unconditional)


def advance(
    x: torch.Tensor, previous: torch.Tensor, eps: torch.Tensor, noise: torch.Tensor, update: Sequence[torch.Tensor]
) -> None:
    """One step of a sampler (`model.denoising.samplers`), in place: `previous` becomes the denoised estimate and `x` the next.

        denoised = a * x + b * eps
        next x   = x_coef * x + denoised_coef * denoised + prev_coef * previous + noise_coef * noise

    All are [rows, channels, height/8, width/8], float32. `update`: `COLUMNS` but the first, each [rows, 1, 1, 1].
    """
    # Written where they stay: a copy is a node of a graph that takes longer than these sums.
    a, b, x_coef, denoised_coef, prev_coef, noise_coef = update
    moved = prev_coef * previous
    torch.mul(a, x, out=previous).addcmul_(b, eps)
    moved.addcmul_(x_coef, x).addcmul_(denoised_coef, previous)
    torch.addcmul(moved, noise_coef, noise, out=x)


class StepLoop:
    """Runs the engines of one UNet op by op, in the smallest bucket that holds the active rows. For any device."""

    def __init__(self, unet: EngineSet, height: int, width: int) -> None:
        """`height` and `width` in pixels. Raises EngineError where no engine of `unet` serves them."""
        self.capacity = self.efficient = unet.most_rows(height, width)
        self.rows: list[Row] = []
        self._unet = unet
        self._height, self._width = height, width
        self._states: dict[Row, _State] = {}

    def join(self, row: Row) -> None:
        assert row.step == 0 and row.table.steps and has_room(self, row.unet_rows)
        coefficients = stack([row.table], row.table.steps)[1][0]
        self._states[row] = _State(row.latents.clone(), torch.zeros_like(row.latents), coefficients)
        self.rows.append(row)

    def leave(self, row: Row) -> None:
        self.rows.remove(row)
        del self._states[row]

    @torch.inference_mode()
    def step(self) -> list[Row]:
        rows, states = self.rows, [self._states[row] for row in self.rows]
        x = torch.cat([state.x for state in states])  # [rows, channels, height/8, width/8], float32
        previous = torch.cat([state.previous for state in states])
        at = [state.coefficients[row.step] for row, state in zip(rows, states, strict=True)]
        coefficients = torch.from_numpy(np.stack(at)).to(x.device)  # [rows, 7]
        c_in, *update = coefficients.T.reshape(-1, len(rows), 1, 1, 1)
        eps = self._predict_noise(c_in * x)
        advance(x, previous, eps, draw_noise(rows, x), update)
        finished = []
        for row, state, *now in zip(rows, states, torch.split(x, 1), torch.split(previous, 1), strict=True):
            state.x, state.previous = now
            row.step += 1
            if row.step == row.table.steps:
                row.latents = state.x
                finished.append(row)
        for row in finished:
            self.leave(row)
        return finished

    def latents(self, row: Row) -> torch.Tensor:
        return self._states[row].previous.clone()

    def _predict_noise(self, model_input: torch.Tensor) -> torch.Tensor:
        """The UNet's guided prediction for each row, float32. Guided rows come first once more, unconditionally."""
        guided = [index for index, row in enumerate(self.rows) if row.guided]
        order = torch.tensor([*guided, *range(len(self.rows))], device=model_input.device)
        told = [(self.rows[index].unconditional, self.rows[index].step) for index in guided]
        told += [(row.conditional, row.step) for row in self.rows]
        texts = [(text, step) for text, step in told if text is not None]
        dtype = DTYPES[self._unet.signature.outputs[0].dtype]
        eps = self._unet.run(
            {
                "sample": model_input[order].to(dtype),
                "time_embeds": torch.stack([text.time_embeds[step] for text, step in texts]),
                "keys_values": torch.cat([text.keys_values for text, _ in texts]),
            },
            self._height,
            self._width,
        )["noise"].float()
        unconditional, conditional = eps[: len(guided)], eps[len(guided) :]
        if guided:
            conditional = conditional.clone()
            at = torch.tensor(guided, device=eps.device)
            scales = [float(self.rows[index].guidance[self.rows[index].step]) for index in guided]
            scale = torch.tensor(scales, device=eps.device).reshape(-1, 1, 1, 1)
            conditional[at] = guide(unconditional, conditional[at], scale)
        return conditional


@dataclass
class _State:
    """A row inside a StepLoop. x, previous: [1, channels, height/8, width/8]; coefficients [steps, 7], on the host."""

    x: torch.Tensor
    previous: torch.Tensor
    coefficients: NDArray[np.float32]


def draw_noise(rows: Sequence[Row], like: torch.Tensor) -> torch.Tensor:
    """The next step's noise for each row, from the row's own generator; zeros where the sampler draws none.

    Returns float32 of `like`'s shape [rows, channels, height/8, width/8], on its device.
    """
    if not any(row.table.noise_drawn[row.step] for row in rows):
        return torch.zeros_like(like)
    shape = (1, *like.shape[1:])
    drawn = [
        torch.randn(shape, generator=row.generator) if row.table.noise_drawn[row.step] else torch.zeros(shape)
        for row in rows
    ]
    return torch.cat(drawn).to(like.device)
