"""The denoising loop as CUDA graphs: one step of one bucket captured once, replayed for every step of every request.

A step is UNet + guidance + sampler update + counters. All that differs between rows (latents, text, times, sampler
table, guidance, which rows there are) is data in buffers that the graph reads, so any sampler, step count and guidance
scale, and any coming and going of rows, runs without a new capture. The host queues replays and stays a step or two
ahead of the device, which never waits for it. The arithmetic is that of `model.denoising.loop.StepLoop`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from model.cuda.streams import to_device
from model.denoising.loop import (
    Conditioning,
    Row,
    advance,
    draw_noise,
    guide,
    has_room,
    unet_rows,
)
from model.denoising.noise_schedule import MAX_STEPS
from model.denoising.samplers import (
    COLUMNS,
    stack,
)
from model.engines.components import DTYPES
from model.engines.engine import (
    Engine,
    EngineSet,
)
from model.engines.graphed import beside, capture

_AHEAD = 2  # steps queued beyond the one the device is at
_MANY = 4 * 2**20  # pixels of a step, from which cuBLAS's products are as fast without a workspace (see `capture`)
_COPIED = torch.empty(0)


class GraphLoop:
    """Runs one UNet at one size. A slot holds an image, a place one of its texts: two while it is guided, then one. So
    there are as many of either as rows fit."""

    def __init__(
        self,
        unet: EngineSet,
        height: int,
        width: int,
        device: torch.device,
        unconditional: Sequence[Engine] = (),
        guided: Sequence[Engine] = (),
    ) -> None:
        """`height` and `width` in pixels. `unconditional` and `guided`: engines of that size for when all images are
        guided and against no text, of the rows that are told none and of both halves; see `_map_halves`. Raises
        EngineError where no engine of `unet` serves the size."""
        # Rows of a step -> the engines that run them, beside each other where they may: then a guided image alone has a
        # branch for each row.
        calls = {engine.bucket.rows.max: [engine] for engine in unet.serving(height, width)}
        guided_calls = {engine.bucket.rows.max: [engine] for engine in guided}
        alone = 2 * calls.get(1, [])
        if alone:
            calls.setdefault(2, alone)
            for engine in unconditional:  # of one row, as the other is
                guided_calls[2] = [*calls[1], engine]
        self.capacity = self.efficient = unet.most_rows(height, width)
        self.rows: list[Row] = []
        self._slots: dict[Row, int] = {}
        self._places: dict[Row, list[int]] = {}  # the unconditional text's first
        self._device = device
        self._pixels = height * width
        slots, places = self.capacity, max(calls)
        inputs = {spec.name: spec for spec in unet.signature.inputs}
        self._dtype = DTYPES[inputs["sample"].dtype]
        _, channels, *sides = inputs["sample"].shape
        scale = int(str(sides[0]).partition("/")[2] or 1)
        latent = (int(channels), height // scale, width // scale)
        _, time_width = inputs["time_embeds"].shape
        _, tokens, text_width = inputs["keys_values"].shape

        def buffer(*shape: int | str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros([int(size) for size in shape], dtype=dtype, device=device)

        with torch.inference_mode():
            self._latents, self._previous, self._noise = (buffer(slots, *latent) for _ in range(3))
            self._model_input = buffer(slots, *latent, dtype=self._dtype)
            self._coefficients = buffer(slots, MAX_STEPS, len(COLUMNS) + 1)  # guidance last
            self._at = buffer(slots, dtype=torch.int64)  # the step each slot is at
            self._every = torch.arange(slots, device=device)
            self._time_embeds = buffer(places, MAX_STEPS, time_width, dtype=self._dtype)
            # By place, and as the rows of a bucket read it: that is moved when rows come or go, not at each step.
            self._keys_values = buffer(places, tokens, text_width, dtype=self._dtype)
            self._row_keys_values = torch.zeros_like(self._keys_values)
            # Row of a bucket -> place and slot; slot -> the rows that predict it, of all slots the unconditional ones
            # first (the same one twice where it is not guided).
            self._map = buffer(2 * (places + slots), dtype=torch.int64)
            self._row_places, self._row_slots, self._predicts = torch.split(self._map, [places, places, 2 * slots])
            # All now, so that no request waits for a capture or finds the memory full.
            self._replays = {rows: self._replay_of(*calls[rows]) for rows in sorted(calls)}
            self._guided_replays = {rows: self._replay_of(*engines) for rows, engines in guided_calls.items()}
            # Of meta only shapes are asked, and what stands for engines then has no more.
            both = alone and calls[2] != alone and device.type != "meta" and alone[0].overlaps
            self._alone = self._replay_of(*alone) if both else None
        self._mapped: list[int] = []
        self._queued: deque[torch.cuda.Event] = deque()
        self._staging = [torch.zeros(slots, *latent, pin_memory=device.type == "cuda") for _ in range(_AHEAD + 2)]
        self._steps = 0

    @property
    def bytes(self) -> int:
        """Device memory of its buffers; what its steps take besides is known once they are captured. `device` may be
        meta to ask only this."""
        return sum(held.nbytes for held in vars(self).values() if isinstance(held, torch.Tensor))

    @torch.inference_mode()
    def join(self, row: Row) -> None:
        assert row.step == 0 and row.table.steps and has_room(self, row.unet_rows)
        slot = min(set(range(len(self._every))) - set(self._slots.values()))
        taken = {place for other in self.rows for place in self._read(other)}
        places = sorted(set(range(len(self._keys_values))) - taken)[: row.unet_rows]
        steps = row.table.steps
        coefficients = stack([row.table], MAX_STEPS)[1][0]
        guidance = np.ones((MAX_STEPS, 1), np.float32)
        if row.unconditional is not None:
            guidance[:steps, 0] = row.guidance[:steps]
        now = torch.from_numpy(np.hstack([coefficients, guidance]))
        self._coefficients[slot].copy_(to_device(now, self._device))
        self._at[slot].zero_()
        self._latents[slot].copy_(row.latents[0])
        self._previous[slot].zero_()
        texts = [text for text in (row.unconditional, row.conditional) if text is not None]
        for place, text in zip(places, texts[-row.unet_rows :], strict=True):
            self._keys_values[place].copy_(text.keys_values[0])
            self._time_embeds[place, :steps].copy_(text.time_embeds[:steps])
        # Tens of megabytes of text that a row would keep for as long as it runs.
        row.conditional = Conditioning(_COPIED, _COPIED)
        row.unconditional = row.unconditional and Conditioning(_COPIED, _COPIED, row.unconditional.blank)
        self._slots[row], self._places[row] = slot, places
        self._mapped = []  # its places held another's text
        self.rows.append(row)

    def leave(self, row: Row) -> None:
        self.rows.remove(row)
        del self._slots[row], self._places[row]

    @torch.inference_mode()
    def step(self) -> list[Row]:
        replay = self._map_rows()
        self._stage_noise()
        replay()
        finished = []
        for row in self.rows:
            row.step += 1
            if row.step == row.table.steps:
                slot = self._slots[row]
                row.latents = self._latents[slot : slot + 1].clone()
                finished.append(row)
        for row in finished:
            self.leave(row)
        self._keep_pace()
        return finished

    @torch.inference_mode()
    def latents(self, row: Row) -> torch.Tensor:
        slot = self._slots[row]
        return self._previous[slot : slot + 1].clone()

    def _read(self, row: Row) -> list[int]:
        """The places of the texts that its next step reads. Where guidance has ended the other is any newcomer's."""
        return self._places[row][-row.unet_rows :]

    def _map_rows(self) -> Callable[[], None]:
        """Tell the device which rows there are. Returns the step of the smallest bucket that holds them."""
        needed = unet_rows(self.rows)
        bucket = next(rows for rows in self._replays if rows >= needed)
        blank = all(row.guided and row.unconditional and row.unconditional.blank for row in self.rows)
        if blank and bucket in self._guided_replays:
            self._map_halves(bucket // 2)
            return self._guided_replays[bucket]
        places: list[int] = []
        slots: list[int] = []
        conditional, unconditional = [0] * len(self._every), [0] * len(self._every)
        for row in self.rows:
            slot = self._slots[row]
            unconditional[slot] = len(places)
            places += self._read(row)
            slots += [slot] * row.unet_rows
            conditional[slot] = len(places) - 1
        self._send(bucket, places, slots, conditional, unconditional)
        alone = self._alone if len(self.rows) == 1 and needed == 2 else None
        return alone or self._replays[bucket]

    def _map_halves(self, half: int) -> None:
        """For guided engines, whose rows are `half` with a text and then as many without one: each image has one of
        either, at the same place of its half."""
        slots = [self._slots[row] for row in self.rows]
        told = [self._places[row][-1] for row in self.rows]
        untold = [self._places[row][0] for row in self.rows]
        padding = half - len(slots)
        conditional, unconditional = [0] * len(self._every), [0] * len(self._every)
        for index, slot in enumerate(slots):
            conditional[slot], unconditional[slot] = index, half + index
        places = [*told, *told[-1:] * padding, *untold]
        self._send(half, places, [*slots, *slots[-1:] * padding, *slots], conditional, unconditional)

    def _send(
        self, told: int, places: list[int], slots: list[int], conditional: list[int], unconditional: list[int]
    ) -> None:
        """Of each row its place and slot, of each slot its rows, and the text of the first `told` rows; where nothing
        changed, nothing is sent."""
        padding = len(self._row_places) - len(places)
        mapped = [*places, *places[-1:] * padding, *slots, *slots[-1:] * padding, *unconditional, *conditional]
        if mapped != self._mapped:
            self._mapped = mapped
            self._map.copy_(to_device(torch.tensor(mapped), self._device))
            for row, place in enumerate(mapped[:told]):  # one of SDXL's in 15 us, where a gather takes 48
                self._row_keys_values[row].copy_(self._keys_values[place])

    def _stage_noise(self) -> None:
        """Draw what the next step's samplers add, on the host, and send it."""
        drawing = [row for row in self.rows if row.table.noise_drawn[row.step]]
        if drawing:
            staged = self._staging[self._steps % len(self._staging)]  # the device is done with it: see _keep_pace
            for row in drawing:
                staged[self._slots[row]] = draw_noise([row], staged[:1])[0]
            drawn = 1 + max(self._slots[row] for row in drawing)
            self._noise[:drawn].copy_(staged[:drawn], non_blocking=True)

    def _keep_pace(self) -> None:
        """Wait until the device is at most `_AHEAD` steps behind."""
        self._steps += 1
        if self._device.type != "cuda":
            return
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._queued.append(event)
        if len(self._queued) > _AHEAD:
            self._queued.popleft().synchronize()

    def _replay_of(self, *engines: Engine) -> Callable[[], None]:
        work = partial(self._step, engines)
        if self._device.type != "cuda":
            return work
        rows = sum(engine.bucket.rows.max for engine in engines)
        return capture(work, workspace=len(engines) == 1 and rows * self._pixels < _MANY)

    def _step(self, engines: Sequence[Engine]) -> None:
        """One step of every slot at its own counter, whose rows these engines take in turn. A slot that is free
        computes what no one reads."""
        now = self._coefficients[self._every, self._at]  # [slots, 8]
        c_in, *update, scale = now.T.reshape(now.shape[1], -1, 1, 1, 1)
        model_input = torch.mul(c_in, self._latents, out=self._model_input)
        rows = [engine.bucket.rows.max for engine in engines]
        by_row = (self._row_places, self._row_slots, self._row_keys_values)
        parts = zip(*(torch.split(of[: sum(rows)], rows) for of in by_row), strict=True)
        inputs = [
            {
                "sample": model_input[slots],
                "time_embeds": self._time_embeds[places, self._at[slots]],
                "keys_values": keys_values,
            }
            for places, slots, keys_values in parts
        ]
        runs = [partial(engine.run, given) for engine, given in zip(engines, inputs, strict=True)]
        results = beside(runs) if all(engine.overlaps for engine in engines) else [run() for run in runs]
        predicted = [result["noise"] for result in results]
        eps = torch.cat(predicted) if len(predicted) > 1 else predicted[0]
        unconditional, conditional = eps[self._predicts].float().chunk(2)
        eps = guide(unconditional, conditional, scale)
        advance(self._latents, self._previous, eps, self._noise, update)
        self._at.add_(1).clamp_(max=MAX_STEPS - 1)
