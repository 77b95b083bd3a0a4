"""The denoising loop as CUDA graphs, which a step replays.

A step consists of calls of the denoiser, which `model.denoising.cover` chooses, and one update. A call has a graph for
each variant of the denoiser and each batch size. It writes the predictions of its entries by conditioning slot. A
network before the denoiser has graphs of its own, which add its outputs to sums that the next call reads. One graph
then guides and advances all images. Everything that differs between images (latents, text, times, sampler coefficients,
guidance) is data in buffers that the graphs read. The set of active images is data too. So no sampler, step count,
guidance scale, combination of features or change of images needs a new capture.

With several ranks a batch is divided among them, and the graph of a call has one collective, which gathers the
predictions. All ranks replay the same graphs in the same order.

Each image owns a latent slot: the index of its latents, noise, coefficients and step counter in their buffers. It also
owns a conditioning slot for each of its one or two texts. A mapping assigns the slots to the entries of a call.

The host queues replays ahead of the device, so the device does not wait for the host. Both loops do the same
arithmetic: see `model.denoising.step` and `model.denoising.eager_loop`.
"""

import json
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from model.cuda.graphs import StepQueue
from model.cuda.probe import free_bytes
from model.cuda.streams import to_device
from model.denoising.buffers import BY_ENTRY, BY_SLOT, MAPPING, SAMPLE, SUM, NetworkShape, buffer_shapes
from model.denoising.cover import Cover, Kind, StepCosts
from model.denoising.inputs import gather_inputs, repeat_tokens
from model.denoising.loop import Conditioning, ImageState, Known, has_room
from model.denoising.loop_schedule import KEPT, NOISE, PREVIOUS, STATE, X, device_rows
from model.denoising.networks import Denoiser, StepCall
from model.denoising.step import advance, draw_noise, guide, keep_known
from model.denoising.step_plan import StepNeeds
from model.engines.engine import Engine, EngineSet
from model.engines.features import Input
from model.engines.shapes import DTYPES
from model.errors import EngineError
from model.store.manifest import TensorSpec
from model.validation import MAX_STEPS

logger = logging.getLogger("preheat")

MAX_STEPS_IN_FLIGHT = 2  # queued or running on the device when `step` returns
_LARGE_CALL_PIXELS = 4 * 2**20  # batch x height x width of a call from which cuBLAS is as fast without a workspace


class _Entry(NamedTuple):
    """An entry of a call. row: where its output goes, see `_Network`."""

    cond_slot: int
    latent_slot: int
    row: int


class _Call(NamedTuple):
    """A call of a denoiser with its padded entries, and before it the calls of the networks that its images use.

    reads_sums: the denoiser has inputs to which these networks add their outputs.
    """

    engines: EngineSet
    entries: list[_Entry]
    before: list[tuple[EngineSet, list[_Entry]]]
    reads_sums: bool


class _Network(NamedTuple):
    """A network of a step.

    by_entry: the names of its conditioning that is stored by entry. mapping: int64 [3, largest batch], an `_Entry` in
    each column. `row` is a row of `_predictions`, or for a network before the denoiser one of the sums. replays: by
    batch, the smallest first.
    """

    by_entry: tuple[str, ...]
    mapping: torch.Tensor
    replays: dict[int, Callable[[], None]]


class GraphLoop:
    """Runs one denoiser at one size. Implements `model.denoising.loop.Loop`, once `capture` has ended."""

    def __init__(
        self, denoiser: Denoiser, height: int, width: int, device: torch.device, queue: StepQueue | None = None
    ) -> None:
        """Allocate the buffers. `height` and `width` in pixels. `queue`: by default one for `device`.

        Raises EngineError if no engine of the denoiser serves the size, or if ranks cannot divide each batch.
        """
        self.images: list[ImageState] = []
        self._denoiser, self._ranks = denoiser, denoiser.ranks
        self._height, self._width, self._device = height, width, device
        self._queue = queue or StepQueue(device)
        self._latent_slot: dict[ImageState, int] = {}
        self._cond_slots: dict[ImageState, list[int]] = {}  # the unconditional text's first
        shapes = denoiser.shapes(height, width)
        self._check_batches(shapes)
        with torch.inference_mode():
            self._allocate([shape for _, shape in shapes])
        self._networks = {engines: self._network(shape) for engines, shape in shapes}
        self.capacity = max(shapes[0][1].batches)
        self.costs = StepCosts(denoiser.options(height, width))
        # The calls of a step, and the images and cover that they are of.
        self._calls: list[_Call] = []
        self._called: tuple[list[tuple[ImageState, StepNeeds]], Cover | None] = ([], None)
        # What the device has: the columns of each mapping, and the slot that each entry of a buffer is of.
        self._mapped: dict[EngineSet, list[_Entry]] = {}
        self._held: dict[str, dict[int, int]] = {}
        self._sums_are_zero = False
        self._waits_in_flight: deque[Callable[[], None]] = deque()  # each waits for the end of a step, oldest first
        # While a step's noise is staged, the device may still read that of the steps in flight.
        make_host_noise = partial(torch.zeros, self._latents.shape, pin_memory=device.type == "cuda")
        self._host_noise = [make_host_noise() for _ in range(MAX_STEPS_IN_FLIGHT + 1)]
        self._queued_step_count = 0

    def capture(self) -> Iterator[None]:
        """Capture all graphs, so that no request waits for a capture or finds the memory full. Yields after each."""
        graphs = captured_bytes = 0
        for capture in self._captures():
            with torch.inference_mode():
                free = free_bytes(self._device)
                capture()
                captured_bytes += free - free_bytes(self._device)
            graphs += 1
            yield
        loop = f"{self._denoiser.plain.engines.component} {self._width}x{self._height}"
        logger.info(json.dumps({"event": "captured", "loop": loop, "graphs": graphs, "bytes": captured_bytes}))

    def _captures(self) -> Iterator[Callable[[], None]]:
        """Yield functions that capture one graph each."""
        for engines, shape in self._denoiser.shapes(self._height, self._width):
            for batch, engine in zip(shape.batches, engines.serving(self._height, self._width), strict=True):
                yield partial(self._capture_call, self._networks[engines], engine, batch, shape.prefix)
        if self._sums:
            yield self._capture_clear
        yield self._capture_advance

    def _allocate(self, networks: Sequence[NetworkShape]) -> None:
        shapes = buffer_shapes(networks, self._height, self._width)
        buffers = {
            name: torch.zeros(buffer.shape, dtype=DTYPES[buffer.dtype], device=self._device)
            for name, buffer in shapes.items()
        }

        def named(prefix: str) -> dict[str, torch.Tensor]:
            return {name.removeprefix(prefix): buffers[name] for name in buffers if name.startswith(prefix)}

        self._state, self._noise, self._model_input = (buffers[name] for name in ("state", "noise", "model_input"))
        self._latents, self._denoised = self._state[:, X], self._state[:, PREVIOUS]
        self._known = Known(buffers["known"], buffers["known_noise"], buffers["mask"].fill_(1))
        self._coefficients, self._steps_done = buffers["coefficients"], buffers["steps"]
        self._latent_slot_indices = buffers["slot_indices"].copy_(torch.arange(len(self._latents)))
        # By conditioning slot. Each latent slot has a pair of rows: of the unconditional and of the conditional text.
        self._predictions, self._pairs = buffers["predictions"], buffers["pairs"]
        self._by_slot, self._by_entry = named(BY_SLOT), named(BY_ENTRY)
        self._sums, self._mappings = named(SUM), named(MAPPING)
        self._inputs: dict[str, tuple[TensorSpec, Input]] = {}
        for network in networks:
            self._inputs |= network.conditioning

    @torch.inference_mode()
    def add(self, image: ImageState) -> None:
        plan, steps = image.plan, image.plan.steps
        needed = image.now.slots
        assert image.step < steps and has_room(self, needed)
        image.wait_for_inputs()
        latent_slot = min(set(range(len(self._latents))) - set(self._latent_slot.values()))
        taken = {cond_slot for other in self.images for cond_slot in self._active_cond_slots(other)}
        free = sorted(set(range(len(self._predictions) - 1)) - taken)
        cond_slots = free[:needed]
        coefficients = device_rows(plan.schedule, MAX_STEPS)
        guidance = np.tile(np.array([1, 0], np.float32), (MAX_STEPS, 1))
        guided = np.flatnonzero(plan.entries == 2)
        guidance[guided, 0], guidance[guided, 1] = plan.guidance[guided], plan.guidance_rescale
        steps_data = torch.from_numpy(np.hstack([coefficients, guidance]))  # [MAX_STEPS, ROW_WIDTH + 2]
        self._coefficients[latent_slot].copy_(to_device(steps_data, self._device))
        self._steps_done[latent_slot].fill_(image.step)
        self._state[latent_slot].zero_()  # whatever an earlier image left could hold NaN
        self._latents[latent_slot].copy_(image.latents[0])
        self._copy_image(latent_slot, image)
        texts = [text for text in (image.uncond, image.cond) if text is not None]
        for cond_slot, text in zip(cond_slots, texts[-needed:], strict=True):
            self._copy_conditioning("text", cond_slot, text, steps)
        self._copy_conditioning("image", latent_slot, image.cond, steps)
        # The buffers hold a copy now. Otherwise the image would hold tens of megabytes for as long as it runs.
        image.cond = Conditioning()
        image.uncond = None
        self._latent_slot[image], self._cond_slots[image] = latent_slot, cond_slots
        self._held = {}  # the same slots have other conditioning now
        self._called = ([], None)  # the image may have had other slots when it was here before
        self.images.append(image)

    def _copy_conditioning(self, scope: str, slot: int, text: Conditioning, steps: int) -> None:
        """Copy the inputs of a scope into their slot. Missing ones are zeros."""
        for name, (_, one) in self._inputs.items():
            if one.scope != scope:
                continue
            buffer, tensor = self._by_slot[name][slot], text.inputs.get(name)
            if tensor is None:
                buffer.zero_()
            elif one.by_step:
                buffer[:steps].copy_(tensor[:steps])
            else:
                buffer.copy_(repeat_tokens(tensor[0], len(buffer)) if one.repeats else tensor[0])

    def _copy_image(self, latent_slot: int, image: ImageState) -> None:
        """Copy what an image's steps keep of a known image, and the extra channels of its UNet's input."""
        known = self._known
        if image.known is None:
            # The graph reads these of every image. Whatever an earlier image left could hold NaN.
            known.latents[latent_slot].zero_()
            known.noise[latent_slot].zero_()
            known.mask[latent_slot].fill_(1)
        else:
            known.latents[latent_slot].copy_(image.known.latents[0])
            known.noise[latent_slot].copy_(image.known.noise[0])
            known.mask[latent_slot].copy_(image.known.mask[0])
        extra = self._model_input[latent_slot, self._latents.shape[1] :]
        if image.extra_channels is not None:
            extra.copy_(image.extra_channels[0])
        elif len(extra):
            extra.zero_()

    def remove(self, image: ImageState) -> None:
        self.images.remove(image)
        self._called = ([], None)
        del self._latent_slot[image], self._cond_slots[image]

    def kind(self, needs: StepNeeds) -> Kind:
        return self._denoiser.kind(needs)

    def cover(self) -> Cover:
        return self.costs.cheapest(self._denoiser.counts(self.images))

    @torch.inference_mode()
    def step(self, cover: Cover | None = None) -> list[ImageState]:
        called = [(image, image.now) for image in self.images], cover
        if called != self._called:
            calls = self._denoiser.calls(self.cover() if cover is None else cover, self.images)
            self._calls = [self._prepare(call) for call in calls]
            self._upload_pairs()
            self._called = called
        for call in self._calls:
            if call.reads_sums and (call.before or not self._sums_are_zero):
                self._clear()
                self._sums_are_zero = not call.before
            for engines, entries in call.before:
                self._run(engines, entries)
            self._run(call.engines, call.entries)
        self._stage_noise()
        self._advance()
        finished = []
        for image in self.images:
            image.step += 1
            if image.step == image.plan.steps:
                image.latents = self._copy_of_slot(self._latents, image)
                finished.append(image)
        for image in finished:
            self.remove(image)
        self._limit_steps_in_flight()
        return finished

    @torch.inference_mode()
    def latents(self, image: ImageState) -> torch.Tensor:
        return self._copy_of_slot(self._denoised, image)

    def _copy_of_slot(self, buffer: torch.Tensor, image: ImageState) -> torch.Tensor:
        """Return a copy [1, ...] of the image's latent slot in a buffer."""
        latent_slot = self._latent_slot[image]
        return buffer[latent_slot : latent_slot + 1].clone()

    def _active_cond_slots(self, image: ImageState) -> list[int]:
        """Return the conditioning slots that an image's next step or a later one reads.

        After guidance has ended, only the conditional text's slot is read. Another image may take the other slot.
        """
        return self._cond_slots[image][-image.now.slots :]

    def _prepare(self, call: StepCall) -> _Call:
        """Return a call with the slots of its entries."""
        entries = [self._entry(image, half) for image, half in call.entries]
        engines = call.variant.paired if call.paired else call.variant.engines
        assert engines is not None
        networks = [network for network in self._denoiser.before if network.feature in call.variant.features]
        before = []
        for network in networks:
            users = [number for number, (image, _) in enumerate(call.entries) if network.name in image.now.networks]
            if users and self._ranks.size > 1:  # each rank has its own entries, so all of them run
                rows = [number if number in users else -1 for number in range(len(entries))]
                added = [entry._replace(row=row) for row, entry in zip(rows, entries, strict=True)]
                before.append((network.engines, _pad(added, call.batch)))
            elif users:
                added = [entries[user]._replace(row=user) for user in users]
                batch = next(batch for batch in self._networks[network.engines].replays if batch >= len(added))
                before.append((network.engines, _pad(added, batch)))
        return _Call(engines, _pad(entries, call.batch, 1 + call.paired), before, bool(networks))

    def _entry(self, image: ImageState, half: int) -> _Entry:
        cond_slot = self._active_cond_slots(image)[-1 if half else 0]
        return _Entry(cond_slot, self._latent_slot[image], cond_slot)

    def _run(self, engines: EngineSet, entries: list[_Entry]) -> None:
        """Queue a network for as many entries as one of its batches has."""
        network = self._networks[engines]
        if entries != self._mapped.get(engines):
            self._mapped.pop(engines, None)  # until the device has it: this may fail for lack of memory
            mapping = to_device(torch.tensor(list(zip(*entries, strict=True))), self._device)
            network.mapping[:, : len(entries)].copy_(mapping)
            self._mapped[engines] = entries
        for name in network.by_entry:
            held, (_, one) = self._held.setdefault(name, {}), self._inputs[name]
            # For SDXL a copy takes 15 us. A gather takes 48 us for one entry and 388 us for eight.
            for number, entry in enumerate(entries):
                slot = entry.latent_slot if one.scope == "image" else entry.cond_slot
                if entry.row >= 0 and held.get(number) != slot:
                    self._by_entry[name][number].copy_(self._by_slot[name][slot])
                    held[number] = slot
        network.replays[len(entries)]()

    def _upload_pairs(self) -> None:
        pairs = [[0] * len(self._latents) for _ in range(2)]  # free latent slots need a valid row
        for image in self.images:
            latent_slot, halves = self._latent_slot[image], range(2 - image.now.entries, 2)
            pairs[0][latent_slot], pairs[1][latent_slot] = (self._entry(image, half).row for half in (halves[0], 1))
        self._pairs.copy_(to_device(torch.tensor(pairs), self._device))

    def _stage_noise(self) -> None:
        """Draw on the host the noise that the next step's samplers add, and upload it."""
        drawing = [image for image in self.images if image.plan.schedule.draws_noise[image.step]]
        if not drawing:
            return
        host_noise = self._host_noise[self._queued_step_count % len(self._host_noise)]
        for image in drawing:
            noise = draw_noise(image, host_noise.shape[1:])
            assert noise is not None
            host_noise[self._latent_slot[image]] = noise[0]
        end = 1 + max(self._latent_slot[image] for image in drawing)
        self._noise[:end].copy_(host_noise[:end], non_blocking=True)

    def _limit_steps_in_flight(self) -> None:
        """Wait until at most MAX_STEPS_IN_FLIGHT steps are queued or running on the device."""
        self._queued_step_count += 1
        self._waits_in_flight.append(self._queue.mark())
        if len(self._waits_in_flight) > MAX_STEPS_IN_FLIGHT:
            wait = self._waits_in_flight.popleft()
            wait()

    def _check_batches(self, shapes: Sequence[tuple[EngineSet, NetworkShape]]) -> None:
        """Raise EngineError if ranks cannot divide each call in the same way."""
        plain = shapes[0][1].batches
        for engines, shape in shapes:
            if self._ranks.size > 1 and shape.batches != plain:
                raise EngineError(
                    f"{engines.component} has engines for other batches than the UNet at {self._width}x{self._height}, "
                    "and ranks divide equal batches only.",
                    "Build all of them for the same sizes, or set gpus_per_image to 1.",
                )

    def _network(self, shape: NetworkShape) -> _Network:
        by_entry = tuple(name for name in shape.conditioning if name in self._by_entry)
        return _Network(by_entry, self._mappings[shape.name], {})

    def _capture_call(self, network: _Network, engine: Engine, batch: int, prefix: str) -> None:
        is_large = engine.bucket.batch.max * self._height * self._width >= _LARGE_CALL_PIXELS
        work = partial(self._add_outputs if prefix else self._predict, engine, network.mapping[:, :batch], prefix)
        name = f"{engine.component}_{batch}_{self._width}x{self._height}"
        network.replays[batch] = self._queue.capture(work, not is_large, name)

    def _capture_clear(self) -> None:
        self._clear = self._queue.capture(self._clear_sums, True, "clear")

    def _capture_advance(self) -> None:
        self._advance = self._queue.capture(self._advance_images, True, "advance")

    def _predict(self, engine: Engine, mapping: torch.Tensor, prefix: str) -> None:
        """Write the predictions of a call's entries into their rows. `mapping`: int64 [3, batch], see `_Network`."""
        own = self._run_own(engine, mapping, prefix)["noise"]
        predicted = self._ranks.gather(own).to(self._predictions.dtype)
        self._predictions.index_copy_(0, self._rows(mapping, self._predictions), predicted)

    def _add_outputs(self, engine: Engine, mapping: torch.Tensor, prefix: str) -> None:
        """Add the outputs of a network before the denoiser to the rows of the sums."""
        own = self._own(engine)
        for name, output in self._run_own(engine, mapping, prefix).items():
            sums = self._sums[name]
            rows = self._rows(mapping, sums)[own]
            sums.index_copy_(0, rows, sums.index_select(0, rows).add_(output))

    def _rows(self, mapping: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Return the rows of the entries of a call. The last one is for padding."""
        return mapping[2] % len(buffer)

    def _own(self, engine: Engine) -> slice:
        """Return this rank's entries of a call."""
        batch = engine.bucket.batch.max
        return slice(self._ranks.rank * batch, (self._ranks.rank + 1) * batch)

    def _run_own(self, engine: Engine, mapping: torch.Tensor, prefix: str) -> dict[str, torch.Tensor]:
        """Run a network for this rank's entries of a call."""
        own = self._own(engine)
        cond_slots, latent_slots, _ = mapping[:, own]
        steps = self._steps_done[latent_slots]
        # Each network of a step does this, because calls are replayed in any combination.
        c_in = self._coefficients[self._latent_slot_indices, self._steps_done][:, 0].reshape(-1, 1, 1, 1)
        torch.mul(c_in, self._latents, out=self._model_input[:, : self._latents.shape[1]])

        def tensor_of(spec: TensorSpec, name: str) -> torch.Tensor:
            if spec.name == SAMPLE:
                return self._model_input[latent_slots][:, : int(spec.shape[1])]
            if name in self._sums:
                return self._sums[name][own]
            if name in self._by_entry:
                return self._by_entry[name][own]
            slots = latent_slots if self._inputs[name][1].scope == "image" else cond_slots
            return self._by_slot[name][slots, steps]

        return engine.run(gather_inputs(engine.signature, tensor_of, prefix))

    def _clear_sums(self) -> None:
        torch._foreach_zero_(list(self._sums.values()))

    def _advance_images(self) -> None:
        """Guide, and take one step of each latent slot at its own counter. The results of free slots are never read."""
        coefficients = self._coefficients[self._latent_slot_indices, self._steps_done]  # [latent slots, ROW_WIDTH + 2]
        rows = coefficients[:, 1 : 1 + 2 * STATE].reshape(-1, 2, STATE)
        of_known, (scale, rescale) = coefficients.T[-4:].reshape(2, 2, -1, 1, 1, 1)
        uncond, cond = self._predictions[self._pairs.flatten()].float().chunk(2)
        self._state[:, NOISE] = self._noise
        advance(self._state, guide(uncond, cond, scale, rescale), self._steps_done % KEPT, rows)
        keep_known(self._latents, self._known, of_known, out=self._latents)
        self._steps_done.add_(1).clamp_(max=MAX_STEPS - 1)


def _pad(entries: list[_Entry], batch: int, parts: int = 1) -> list[_Entry]:
    """Pad each of the equal parts of a batch with the inputs of its last entry. Their outputs are not read."""
    size = len(entries) // parts
    padded: list[_Entry] = []
    for begin in range(0, len(entries), size):
        part = entries[begin : begin + size]
        padded += [*part, *[part[-1]._replace(row=-1)] * (batch // parts - size)]
    return padded
