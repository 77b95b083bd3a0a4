"""The denoising loop as CUDA graphs: one graph for each batch size of the UNet, replayed once a step.

A step runs the networks before the UNet, the UNet, guidance, the sampler update and the step counters. Everything that
differs between images (latents, text, times, sampler coefficients, guidance) is data in buffers that the graph reads.
The set of active images is data too. So no sampler, step count, guidance scale or change of images needs a new capture.

A step in which an image uses a ControlNet is several graphs: one for each ControlNet in use, which adds its outputs to
shared buffers, and one with the UNet that reads them. So the number of graphs grows with that of ControlNets, not with
that of their combinations. A step in which an image uses an IP-Adapter has the graph of a further UNet, which reads
the ControlNets' outputs too.

With several ranks a batch is divided among them, and the graph of a step has one collective, which gathers the
predictions. All ranks replay the same graphs in the same order.

Each image owns a latent slot: the index of its latents, noise, coefficients and step counter in their buffers. It also
owns a conditioning slot for each of its one or two texts. A mapping assigns the slots to the entries of the UNet's
batch, and the batch's predictions to the latent slots.

The host queues replays ahead of the device, so the device does not wait for the host. Both loops do the same
arithmetic: see `model.denoising.step` and `model.denoising.eager_loop`.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from model.cuda.graphs import StepQueue
from model.cuda.streams import to_device
from model.denoising.buffers import COND_BY_ENTRY, COND_BY_SLOT, RESIDUAL, SAMPLE, buffer_shapes
from model.denoising.loop import Conditioning, ImageState, Known, StepNetworks, has_room, repeat_tokens, unet_batch
from model.denoising.replays import Replays, call_all, divide_batches, smallest_batch
from model.denoising.samplers import pad_schedules
from model.denoising.step import advance, draw_noise, guide, keep_known
from model.engines.engine import Engine, EngineSet
from model.engines.shapes import DTYPES
from model.engines.signatures import KEYS_VALUES, control_input
from model.errors import EngineError
from model.store.manifest import Signature
from model.validation import MAX_STEPS

MAX_STEPS_IN_FLIGHT = 2  # queued or running on the device when `step` returns
_NO_RESIDUALS: Mapping[str, torch.Tensor] = MappingProxyType({})
_LARGE_CALL_PIXELS = 4 * 2**20  # batch x height x width of a call from which cuBLAS is as fast without a workspace


class _Mapping(NamedTuple):
    """The slots of the entries of a UNet batch, and the entries whose predictions are guided in each latent slot."""

    cond_slots: list[int]  # of each entry
    latent_slots: list[int]  # of each entry
    uncond_entries: list[int]  # of each latent slot; for an unguided image the same as in `cond_entries`
    cond_entries: list[int]  # of each latent slot


class GraphLoop:
    """Runs one UNet at one size. Implements `model.denoising.loop.Loop`."""

    def __init__(
        self, networks: StepNetworks, height: int, width: int, device: torch.device, queue: StepQueue | None = None
    ) -> None:
        """`height` and `width` in pixels. `queue`: by default one for `device`.

        Raises EngineError if no engine of the UNet serves the size.
        """
        self._ranks = networks.ranks
        _, guided_engines_by_batch = divide_batches(networks.unet, height, width, self._ranks.size)
        self.capacity = self.efficient_batch = self._max_batch(networks.unet, height, width)
        self.images: list[ImageState] = []
        self._image_latent_slot: dict[ImageState, int] = {}
        self._image_cond_slots: dict[ImageState, list[int]] = {}  # the unconditional text's first
        self._device = device
        self._queue = queue or StepQueue(device)
        self._networks = networks
        self._height, self._width = height, width
        with torch.inference_mode():
            serving = [engine.bucket.batch.max for engine in networks.unet.serving(height, width)]
            self._batches = divide_batches(networks.unet, height, width, self._ranks.size)[0].keys()
            # One rank has at least two conditioning slots, in which an engine of batch 1 runs twice.
            batches = serving if self._ranks.size == 1 else sorted(self._batches)
            shapes = buffer_shapes(
                networks.signatures,
                networks.by_step,
                height,
                width,
                batches,
                networks.control_signatures,
                networks.image_prompted.signature if networks.image_prompted else None,
            )
            buffers = {
                name: torch.zeros(buffer.shape, dtype=DTYPES[buffer.dtype], device=device)
                for name, buffer in shapes.items()
            }
            self._latents, self._noise, self._model_input = (
                buffers[name] for name in ("latents", "noise", "model_input")
            )
            self._known = Known(buffers["known"], buffers["known_noise"], buffers["mask"].fill_(1))
            self._denoised = buffers["previous"]  # the estimates after the last step, which the next step reads
            self._coefficients, self._steps_done = buffers["coefficients"], buffers["steps"]
            self._latent_slot_count = len(self._latents)
            self._latent_slot_indices = buffers["slot_indices"].copy_(torch.arange(self._latent_slot_count))
            # Conditioning is stored by slot, and again by batch entry. The copy changes only when the mapping does.
            self._cond_by_slot = {
                name.removeprefix(COND_BY_SLOT): buffers[name] for name in buffers if name.startswith(COND_BY_SLOT)
            }
            self._cond_by_entry = {
                name.removeprefix(COND_BY_ENTRY): buffers[name] for name in buffers if name.startswith(COND_BY_ENTRY)
            }
            # One buffer, so that a new `_Mapping` takes one upload. There are as many entries as conditioning slots.
            self._mapping_buffer = buffers["mapping"]
            self._cond_slot_count = len(self._mapping_buffer) // 2 - self._latent_slot_count
            sizes = [self._cond_slot_count, self._cond_slot_count, 2 * self._latent_slot_count]
            self._entry_cond_slots, self._entry_latent_slots, self._prediction_entries = torch.split(
                self._mapping_buffer, sizes
            )  # the last: the unconditional entries of all latent slots, then the conditional ones
            # The sums of what ControlNets add to the UNet, by batch entry.
            self._residuals = {
                name.removeprefix(RESIDUAL): buffers[name] for name in buffers if name.startswith(RESIDUAL)
            }
            # Captured now, so that no request waits for a capture or finds the memory full.
            self._replays = self._capture_batches(networks.unet, self._step)
            self._guided_replays = {
                batch: self._capture(engines, partial(self._step, engines))
                for batch, engines in guided_engines_by_batch.items()
            }
            if self._residuals:
                self._clear = self._queue.capture(self._clear_residuals, True, "clear_residuals")
            if networks.image_prompted is not None:
                self.capacity = min(self.capacity, self._max_batch(networks.image_prompted, height, width))
                self._image_prompted_replays = self._capture_batches(
                    networks.image_prompted, partial(self._step, residuals=self._residuals)
                )
            if networks.controlled is not None:
                self.capacity = min(self.capacity, self._max_batch(networks.controlled, height, width))
                self._control_replays = {
                    name: self._capture_batches(engines, partial(self._control_step, name))
                    for name, engines in networks.controlnets.items()
                }
                self._controlled_replays = self._capture_batches(
                    networks.controlled, partial(self._step, residuals=self._residuals)
                )
        self._last_mapping: _Mapping | None = None  # None: upload the next one even if it is equal
        self._waits_in_flight: deque[Callable[[], None]] = deque()  # each waits for the end of a step, oldest first
        # While a step's noise is staged, the device may still read that of the steps in flight.
        make_host_noise = partial(torch.zeros, self._latents.shape, pin_memory=device.type == "cuda")
        self._host_noise = [make_host_noise() for _ in range(MAX_STEPS_IN_FLIGHT + 1)]
        self._queued_step_count = 0

    @torch.inference_mode()
    def add(self, image: ImageState) -> None:
        plan, steps = image.plan, image.plan.steps
        assert image.step < steps and has_room(self, image.unet_batch)
        image.wait_for_inputs()
        latent_slot = min(set(range(self._latent_slot_count)) - set(self._image_latent_slot.values()))
        taken = {cond_slot for other in self.images for cond_slot in self._active_cond_slots(other)}
        cond_slots = sorted(set(range(self._cond_slot_count)) - taken)[: image.unet_batch]
        _, [coefficients] = pad_schedules([plan.schedule], MAX_STEPS)
        guidance = np.tile(np.array([1, 0], np.float32), (MAX_STEPS, 1))
        guided = np.flatnonzero(plan.entries == 2)
        guidance[guided, 0], guidance[guided, 1] = plan.guidance[guided], plan.guidance_rescale
        steps_data = torch.from_numpy(np.hstack([coefficients, guidance]))  # [MAX_STEPS, 11]
        self._coefficients[latent_slot].copy_(to_device(steps_data, self._device))
        self._steps_done[latent_slot].fill_(image.step)
        self._latents[latent_slot].copy_(image.latents[0])
        if image.denoised is None:
            self._denoised[latent_slot].zero_()
        else:
            self._denoised[latent_slot].copy_(image.denoised[0])
        self._copy_image(latent_slot, image)
        texts = [text for text in (image.uncond, image.cond) if text is not None]
        for cond_slot, text in zip(cond_slots, texts[-image.unet_batch :], strict=True):
            for name, buffer in self._cond_by_slot.items():
                tensor = text.inputs.get(name)
                if tensor is None:
                    buffer[cond_slot].zero_()
                elif name in self._networks.by_step:
                    buffer[cond_slot, :steps].copy_(tensor[:steps])
                elif name.endswith(KEYS_VALUES):  # of the UNet or of a ControlNet
                    buffer[cond_slot].copy_(repeat_tokens(tensor[0], buffer.shape[1]))
                else:
                    buffer[cond_slot].copy_(tensor[0])
        # The buffers hold a copy now. Otherwise the image would hold tens of megabytes for as long as it runs.
        image.cond = Conditioning()
        image.uncond = image.uncond and Conditioning(is_zero=image.uncond.is_zero)
        self._image_latent_slot[image], self._image_cond_slots[image] = latent_slot, cond_slots
        self._last_mapping = None  # an equal mapping may mean other conditioning now
        self.images.append(image)

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
        del self._image_latent_slot[image], self._image_cond_slots[image]

    @torch.inference_mode()
    def take(self, image: ImageState) -> None:
        image.latents = self._copy_of_slot(self._latents, image)
        image.denoised = self._copy_of_slot(self._denoised, image)
        self.remove(image)

    @torch.inference_mode()
    def step(self) -> list[ImageState]:
        replay = self._map_images()
        self._stage_noise()
        replay()
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
        latent_slot = self._image_latent_slot[image]
        return buffer[latent_slot : latent_slot + 1].clone()

    def _active_cond_slots(self, image: ImageState) -> list[int]:
        """Return the conditioning slots that an image's next step reads.

        After guidance has ended, only the conditional text's slot is read. Another image may take the other slot.
        """
        return self._image_cond_slots[image][-image.unet_batch :]

    def _map_images(self) -> Callable[[], None]:
        """Upload the mapping of the active images. Return what queues a step of the smallest batch that holds them."""
        needed = unet_batch(self.images)
        used = {name for image in self.images for name in image.active_controls}
        image_prompted = any(image.plan.image_prompts for image in self.images)
        unet = self._controlled_replays if used else self._replays
        if image_prompted:
            unet = self._image_prompted_replays
        batch = smallest_batch(unet, needed)
        guided_against_zeros = all(image.guided and image.uncond and image.uncond.is_zero for image in self.images)
        if not used and not image_prompted and guided_against_zeros and batch in self._guided_replays:
            self._upload_mapping(self._map_for_guided_variant(batch), batch)
            return self._guided_replays[batch]
        mapping = self._empty_mapping()
        for image in self.images:
            latent_slot = self._image_latent_slot[image]
            mapping.uncond_entries[latent_slot] = len(mapping.cond_slots)
            mapping.cond_slots.extend(self._active_cond_slots(image))
            mapping.latent_slots.extend([latent_slot] * image.unet_batch)
            mapping.cond_entries[latent_slot] = len(mapping.cond_slots) - 1
        self._upload_mapping(mapping, batch)
        if not (used or image_prompted) or not self._residuals:
            return unet[batch]
        replays = [self._control_replays[name] for name in self._networks.controlnets if name in used]
        controls = [of_controlnet[smallest_batch(of_controlnet, needed)] for of_controlnet in replays]
        return partial(call_all, [self._clear, *controls, unet[batch]])

    def _map_for_guided_variant(self, batch: int) -> _Mapping:
        """Return the mapping for the variant for guided images.

        The first half of the batch is conditional, the second unconditional. Each image has the same position in both.
        """
        mapping = self._empty_mapping()
        half = batch // 2
        latent_slots = [self._image_latent_slot[image] for image in self.images]
        cond_slots = [self._image_cond_slots[image][-1] for image in self.images]
        uncond_slots = [self._image_cond_slots[image][0] for image in self.images]
        padding = half - len(self.images)
        mapping.cond_slots.extend([*cond_slots, *cond_slots[-1:] * padding, *uncond_slots])
        mapping.latent_slots.extend([*latent_slots, *latent_slots[-1:] * padding, *latent_slots])
        for position, latent_slot in enumerate(latent_slots):
            mapping.cond_entries[latent_slot], mapping.uncond_entries[latent_slot] = position, half + position
        return mapping

    def _empty_mapping(self) -> _Mapping:
        """Return a mapping without entries. Free latent slots use entry 0, because they need a valid one."""
        return _Mapping([], [], [0] * self._latent_slot_count, [0] * self._latent_slot_count)

    def _upload_mapping(self, mapping: _Mapping, batch: int) -> None:
        """Upload a mapping, and copy the conditioning of the batch's entries. Does nothing if nothing changed."""
        padding = self._cond_slot_count - len(mapping.cond_slots)
        padded = mapping._replace(
            cond_slots=mapping.cond_slots + mapping.cond_slots[-1:] * padding,
            latent_slots=mapping.latent_slots + mapping.latent_slots[-1:] * padding,
        )
        if padded == self._last_mapping:
            return
        self._last_mapping = padded
        self._mapping_buffer.copy_(to_device(torch.tensor([*chain(*padded)]), self._device))
        for name, buffer in self._cond_by_entry.items():
            # For SDXL a copy takes 15 us. A gather takes 48 us for one entry and 388 us for eight.
            for entry, cond_slot in enumerate(padded.cond_slots[:batch]):
                buffer[entry].copy_(self._cond_by_slot[name][cond_slot])

    def _stage_noise(self) -> None:
        """Draw on the host the noise that the next step's samplers add, and upload it."""
        drawing = [image for image in self.images if image.plan.schedule.draws_noise[image.step]]
        if not drawing:
            return
        host_noise = self._host_noise[self._queued_step_count % len(self._host_noise)]
        for image in drawing:
            host_noise[self._image_latent_slot[image]] = draw_noise([image], like=host_noise[:1])[0]
        end = 1 + max(self._image_latent_slot[image] for image in drawing)
        self._noise[:end].copy_(host_noise[:end], non_blocking=True)

    def _limit_steps_in_flight(self) -> None:
        """Wait until at most MAX_STEPS_IN_FLIGHT steps are queued or running on the device."""
        self._queued_step_count += 1
        self._waits_in_flight.append(self._queue.mark())
        if len(self._waits_in_flight) > MAX_STEPS_IN_FLIGHT:
            wait = self._waits_in_flight.popleft()
            wait()

    def _capture_batches(self, network: EngineSet, work: Callable[[Sequence[Engine]], None]) -> Replays:
        """Capture a network's part of a step for each of its batch sizes. `work` gets the engines that divide it."""
        by_batch, _ = divide_batches(network, self._height, self._width, self._ranks.size)
        if self._ranks.size > 1 and by_batch.keys() != self._batches:
            raise EngineError(
                f"{network.component} has engines for other batches than the UNet at {self._width}x{self._height}, and "
                "ranks divide equal batches only.",
                "Build all of them for the same sizes, or set gpus_per_image to 1.",
            )
        return {batch: self._capture(by_batch[batch], partial(work, by_batch[batch])) for batch in sorted(by_batch)}

    def _capture(self, engines: Sequence[Engine], work: Callable[[], None]) -> Callable[[], None]:
        """Capture `work`, whose batch is divided between `engines`, and return its replay."""
        largest = max(engine.bucket.batch.max for engine in engines)
        is_large = largest * self._height * self._width >= _LARGE_CALL_PIXELS
        name = f"{'_and_'.join(f'{e.component}_{e.bucket.batch.max}' for e in engines)}_{self._width}x{self._height}"
        return self._queue.capture(work, not is_large, name)

    def _step(self, engines: Sequence[Engine], residuals: Mapping[str, torch.Tensor] = _NO_RESIDUALS) -> None:
        """Run one step of each latent slot at the slot's own counter. `engines` divide this rank's entries, in order.

        `residuals`: by batch entry, what ControlNets add. The results of free slots are never read.
        """
        coefficients = self._coefficients[self._latent_slot_indices, self._steps_done]  # [latent slots, 11]
        c_in, *update, known, known_noise, scale, rescale = coefficients.T.reshape(coefficients.shape[1], -1, 1, 1, 1)
        self._scale_latents(c_in)
        results = self._run(engines, partial(self._unet_inputs, engines[0].signature, residuals))
        predicted = [result["noise"] for result in results]
        eps = self._ranks.gather(torch.cat(predicted) if len(predicted) > 1 else predicted[0])
        uncond, cond = eps[self._prediction_entries].float().chunk(2)
        advance(self._latents, self._denoised, guide(uncond, cond, scale, rescale), self._noise, update)
        keep_known(self._latents, self._known, (known, known_noise), out=self._latents)
        self._steps_done.add_(1).clamp_(max=MAX_STEPS - 1)

    def _control_step(self, controlnet: str, engines: Sequence[Engine]) -> None:
        """Add the outputs of a ControlNet to the residuals. They are zeros for entries that do not use it."""
        self._scale_latents(self._coefficients[self._latent_slot_indices, self._steps_done][:, 0].reshape(-1, 1, 1, 1))
        begin = self._first_entry(engines)
        for result in self._run(engines, partial(self._control_inputs, controlnet, engines[0].signature)):
            for name, output in result.items():
                self._residuals[name][begin : begin + len(output)].add_(output)
            begin += len(output)

    def _clear_residuals(self) -> None:
        torch._foreach_zero_(list(self._residuals.values()))

    def _scale_latents(self, c_in: torch.Tensor) -> None:
        """Write the latents, scaled for the network, to the first channels of its input."""
        torch.mul(c_in, self._latents, out=self._model_input[:, : self._latents.shape[1]])

    def _run(
        self, engines: Sequence[Engine], inputs_of: Callable[[slice], dict[str, torch.Tensor]]
    ) -> list[dict[str, torch.Tensor]]:
        """Run the engines that divide this rank's entries of a batch, each with the inputs of its own."""
        ends = accumulate((engine.bucket.batch.max for engine in engines), initial=self._first_entry(engines))
        entries = [slice(begin, end) for begin, end in pairwise(ends)]
        return [engine.run(inputs_of(its_own)) for engine, its_own in zip(engines, entries, strict=True)]

    def _first_entry(self, engines: Sequence[Engine]) -> int:
        """Return this rank's first entry of a batch that `engines` divide on each rank."""
        return self._ranks.rank * sum(engine.bucket.batch.max for engine in engines)

    def _max_batch(self, network: EngineSet, height: int, width: int) -> int:
        """Return the largest batch that all ranks run together."""
        return self._ranks.size * network.max_batch(height, width)

    def _conditioning(self, entries: slice, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return the latents, and the conditioning inputs of these names, of these entries of the batch."""
        latent_slots, cond_slots = self._entry_latent_slots[entries], self._entry_cond_slots[entries]
        tensors = {SAMPLE: self._model_input[latent_slots]}
        tensors |= {name: buffer[entries] for name, buffer in self._cond_by_entry.items() if name in names}
        steps = self._steps_done[latent_slots]
        by_step = [name for name in self._cond_by_slot if name in names and name not in self._cond_by_entry]
        return tensors | {name: self._cond_by_slot[name][cond_slots, steps] for name in by_step}

    def _unet_inputs(
        self, signature: Signature, residuals: Mapping[str, torch.Tensor], entries: slice
    ) -> dict[str, torch.Tensor]:
        """Run the networks before the UNet, and return the UNet's inputs for these entries of the batch."""
        before = self._networks.before
        names = {spec.name for one in (signature, *(network.signature for network in before)) for spec in one.inputs}
        tensors = self._conditioning(entries, names) | {name: buffer[entries] for name, buffer in residuals.items()}
        for network in before:
            tensors |= network.run(_inputs_of(network.signature, tensors), self._height, self._width)
        return _inputs_of(signature, tensors)

    def _control_inputs(self, controlnet: str, signature: Signature, entries: slice) -> dict[str, torch.Tensor]:
        """Return a ControlNet's inputs for these entries of the batch."""
        names = {control_input(controlnet, spec.name): spec.name for spec in signature.inputs}
        tensors = self._conditioning(entries, names)
        latents = tensors.pop(SAMPLE)[:, : self._latents.shape[1]]
        return _inputs_of(signature, {SAMPLE: latents} | {names[name]: tensor for name, tensor in tensors.items()})


def _inputs_of(signature: Signature, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the inputs of a signature, in its dtypes."""
    return {spec.name: tensors[spec.name].to(DTYPES[spec.dtype]) for spec in signature.inputs}
