"""The denoising loop as CUDA graphs: one step of a bucket is captured once and replayed for every step of every image.

A step runs the networks before the UNet, the UNet, guidance, the sampler update and the step counters. Everything that
differs between images (latents, text, times, sampler coefficients, guidance) is data in buffers that the graph reads.
Which images are active is data too. So no sampler, step count, guidance scale or change of images needs a new capture.

The host queues replays up to two steps ahead, so the device does not wait for it. The arithmetic is that of
`model.denoising.eager_loop`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch

from model.cuda.graphs import StepQueue
from model.cuda.streams import to_device
from model.denoising.buffers import BATCH, COND, SAMPLE, buffer_shapes
from model.denoising.loop import Conditioning, ImageState, StepNetworks, has_room, unet_batch
from model.denoising.samplers import pad_schedules
from model.denoising.step import advance, draw_noise, guide
from model.engines.engine import Engine, EngineSet
from model.engines.shapes import DTYPES
from model.validation import MAX_STEPS

MAX_STEPS_IN_FLIGHT = 2  # queued beyond the one that the device runs
_LARGE_STEP_PIXELS = 4 * 2**20  # from this size on cuBLAS's products are as fast without a workspace


class GraphLoop:
    """Runs one UNet at one size. Implements `model.denoising.loop.Loop`.

    Each image owns a latent slot, and a conditioning slot for each of its one or two texts.
    """

    def __init__(
        self, networks: StepNetworks, height: int, width: int, device: torch.device, queue: StepQueue | None = None
    ) -> None:
        """`height` and `width` in pixels. `queue`: by default, the device's own.

        Raises EngineError if no engine of the UNet serves the size.
        """
        calls, split_calls = _calls(networks.unet, height, width)
        self.capacity = self.efficient_batch = networks.unet.max_batch(height, width)
        self.images: list[ImageState] = []
        self._slots: dict[ImageState, int] = {}
        self._cond_slots: dict[ImageState, list[int]] = {}  # the unconditional text's first
        self._device = device
        self._queue = queue or StepQueue(device)
        self._networks = networks
        self._height, self._width = height, width
        with torch.inference_mode():
            batches = [engine.bucket.batch.max for engine in networks.unet.serving(height, width)]
            shapes = buffer_shapes(networks.signatures, networks.by_step, height, width, batches)
            buffers = {
                name: torch.zeros(buffer.shape, dtype=DTYPES[buffer.dtype], device=device)
                for name, buffer in shapes.items()
            }
            self._latents, self._previous, self._noise = (buffers[name] for name in ("latents", "previous", "noise"))
            self._model_input = buffers["model_input"]
            self._coefficients, self._steps_done = buffers["coefficients"], buffers["steps"]
            self._slot_indices = buffers["slot_indices"].copy_(torch.arange(len(self._latents)))
            # By conditioning slot, and in batch order. The order changes only when images join or leave.
            self._cond = {name.removeprefix(COND): buffers[name] for name in buffers if name.startswith(COND)}
            self._batch = {name.removeprefix(BATCH): buffers[name] for name in buffers if name.startswith(BATCH)}
            slots = len(self._latents)
            # Batch entry -> conditioning slot and latent slot. Latent slot -> the batch entries that predict its noise,
            # the unconditional entries of all slots first. For an unguided image both are the same entry.
            self._mapping = buffers["mapping"]
            cond_slots = len(self._mapping) // 2 - slots
            self._batch_cond_slots, self._batch_slots, self._predictions = torch.split(
                self._mapping, [cond_slots, cond_slots, 2 * slots]
            )
            # Captured now, so that no request waits for a capture or finds the memory full.
            self._replays = {batch: self._replay_of(*calls[batch]) for batch in sorted(calls)}
            self._split_replays = {batch: self._replay_of(*engines) for batch, engines in split_calls.items()}
            # Two engines of batch 1 run concurrently for a single image, even if an engine of batch 2 exists.
            pair = 2 * calls.get(1, [])
            is_faster = pair and calls[2] != pair and pair[0].concurrent
            self._single_image_replay = self._replay_of(*pair) if is_faster else None
        self._mapped: list[int] = []
        self._steps_in_flight: deque[Callable[[], None]] = deque()  # functions that wait for the end of a step
        host_noise = partial(torch.zeros, self._latents.shape, pin_memory=device.type == "cuda")
        self._host_noise = [host_noise() for _ in range(MAX_STEPS_IN_FLIGHT + 2)]
        self._steps_queued = 0

    @torch.inference_mode()
    def add(self, image: ImageState) -> None:
        assert image.step == 0 and image.schedule.steps and has_room(self, image.unet_batch)
        slot = min(set(range(len(self._slot_indices))) - set(self._slots.values()))
        taken = {cond_slot for other in self.images for cond_slot in self._active_cond_slots(other)}
        cond_slots = sorted(set(range(len(self._batch_cond_slots))) - taken)[: image.unet_batch]
        steps = image.schedule.steps
        coefficients = pad_schedules([image.schedule], MAX_STEPS)[1][0]
        guidance = np.ones((MAX_STEPS, 1), np.float32)
        if image.uncond is not None:
            guidance[:steps, 0] = image.guidance[:steps]
        steps_data = torch.from_numpy(np.hstack([coefficients, guidance]))  # [MAX_STEPS, 8]
        self._coefficients[slot].copy_(to_device(steps_data, self._device))
        self._steps_done[slot].zero_()
        self._latents[slot].copy_(image.latents[0])
        self._previous[slot].zero_()
        texts = [text for text in (image.uncond, image.cond) if text is not None]
        for cond_slot, text in zip(cond_slots, texts[-image.unet_batch :], strict=True):
            for name, buffer in self._cond.items():
                tensor = text.inputs.get(name)
                if tensor is None:
                    buffer[cond_slot].zero_()
                elif name in self._networks.by_step:
                    buffer[cond_slot, :steps].copy_(tensor[:steps])
                else:
                    buffer[cond_slot].copy_(tensor[0])
        # The buffers hold a copy now. Otherwise the image would hold tens of megabytes for as long as it runs.
        image.cond = Conditioning()
        image.uncond = image.uncond and Conditioning(is_zero=image.uncond.is_zero)
        self._slots[image], self._cond_slots[image] = slot, cond_slots
        self._mapped = []  # the conditioning slots held other text before
        self.images.append(image)

    def remove(self, image: ImageState) -> None:
        self.images.remove(image)
        del self._slots[image], self._cond_slots[image]

    @torch.inference_mode()
    def step(self) -> list[ImageState]:
        replay = self._map_images()
        self._stage_noise()
        replay()
        finished = []
        for image in self.images:
            image.step += 1
            if image.step == image.schedule.steps:
                slot = self._slots[image]
                image.latents = self._latents[slot : slot + 1].clone()
                finished.append(image)
        for image in finished:
            self.remove(image)
        self._limit_steps_in_flight()
        return finished

    @torch.inference_mode()
    def latents(self, image: ImageState) -> torch.Tensor:
        slot = self._slots[image]
        return self._previous[slot : slot + 1].clone()

    def _active_cond_slots(self, image: ImageState) -> list[int]:
        """Return the conditioning slots that an image's next step reads.

        After guidance has ended these are only the conditional one.
        """
        return self._cond_slots[image][-image.unet_batch :]

    def _map_images(self) -> Callable[[], None]:
        """Upload the mapping of the active images. Returns the step of the smallest bucket that holds them."""
        needed = unet_batch(self.images)
        bucket = next(batch for batch in self._replays if batch >= needed)
        guided_against_zeros = all(image.guided and image.uncond and image.uncond.is_zero for image in self.images)
        if guided_against_zeros and bucket in self._split_replays:
            self._map_split_cfg(bucket)
            return self._split_replays[bucket]
        cond_slots: list[int] = []
        slots: list[int] = []
        cond, uncond = [0] * len(self._slot_indices), [0] * len(self._slot_indices)
        for image in self.images:
            slot = self._slots[image]
            uncond[slot] = len(cond_slots)
            cond_slots += self._active_cond_slots(image)
            slots += [slot] * image.unet_batch
            cond[slot] = len(cond_slots) - 1
        self._upload_mapping(bucket, cond_slots, slots, cond, uncond)
        single = self._single_image_replay if len(self.images) == 1 and needed == 2 else None
        return single or self._replays[bucket]

    def _map_split_cfg(self, bucket: int) -> None:
        """Map images for the CFG variants.

        The first half of the batch is conditional, the second unconditional. Each image has the same position in both.
        """
        half = bucket // 2
        slots = [self._slots[image] for image in self.images]
        cond_slots = [self._cond_slots[image][-1] for image in self.images]
        uncond_slots = [self._cond_slots[image][0] for image in self.images]
        padding = half - len(slots)
        cond, uncond = [0] * len(self._slot_indices), [0] * len(self._slot_indices)
        for index, slot in enumerate(slots):
            cond[slot], uncond[slot] = index, half + index
        batch_cond_slots = [*cond_slots, *cond_slots[-1:] * padding, *uncond_slots]
        self._upload_mapping(bucket, batch_cond_slots, [*slots, *slots[-1:] * padding, *slots], cond, uncond)

    def _upload_mapping(
        self, bucket: int, cond_slots: list[int], slots: list[int], cond: list[int], uncond: list[int]
    ) -> None:
        """Upload the slots of each batch entry, the batch entries of each slot, and the entries' conditioning.

        Does nothing if nothing changed.
        """
        padding = len(self._batch_cond_slots) - len(cond_slots)
        mapped = [*cond_slots, *cond_slots[-1:] * padding, *slots, *slots[-1:] * padding, *uncond, *cond]
        if mapped != self._mapped:
            self._mapped = mapped
            self._mapping.copy_(to_device(torch.tensor(mapped), self._device))
            for name, buffer in self._batch.items():
                for entry, cond_slot in enumerate(mapped[:bucket]):  # 15 us each for SDXL, where one gather takes 48
                    buffer[entry].copy_(self._cond[name][cond_slot])

    def _stage_noise(self) -> None:
        """Draw the noise that the next step's samplers add on the host, and upload it."""
        drawing = [image for image in self.images if image.schedule.draws_noise[image.step]]
        if drawing:
            # The device has finished with this buffer: see _limit_steps_in_flight.
            host_noise = self._host_noise[self._steps_queued % len(self._host_noise)]
            for image in drawing:
                host_noise[self._slots[image]] = draw_noise([image], host_noise[:1])[0]
            end = 1 + max(self._slots[image] for image in drawing)
            self._noise[:end].copy_(host_noise[:end], non_blocking=True)

    def _limit_steps_in_flight(self) -> None:
        """Wait until the device is at most MAX_STEPS_IN_FLIGHT steps behind."""
        self._steps_queued += 1
        self._steps_in_flight.append(self._queue.mark())
        if len(self._steps_in_flight) > MAX_STEPS_IN_FLIGHT:
            wait = self._steps_in_flight.popleft()
            wait()

    def _replay_of(self, *engines: Engine) -> Callable[[], None]:
        batch = sum(engine.bucket.batch.max for engine in engines)
        is_large = batch * self._height * self._width >= _LARGE_STEP_PIXELS
        return self._queue.capture(partial(self._step, engines), workspace=len(engines) == 1 and not is_large)

    def _step(self, engines: Sequence[Engine]) -> None:
        """Run one step of every slot at its own counter. The batch is divided between `engines`, in order.

        The results of free slots are never read.
        """
        coefficients = self._coefficients[self._slot_indices, self._steps_done]  # [slots, 8]
        c_in, *update, scale = coefficients.T.reshape(coefficients.shape[1], -1, 1, 1, 1)
        model_input = torch.mul(c_in, self._latents, out=self._model_input)
        sizes = [engine.bucket.batch.max for engine in engines]
        ends = list(accumulate(sizes, initial=0))
        inputs = [self._inputs(slice(*part), model_input) for part in pairwise(ends)]
        runs = [partial(engine.run, tensors) for engine, tensors in zip(engines, inputs, strict=True)]
        concurrent = all(engine.concurrent for engine in engines)
        results = self._queue.run_concurrently(runs) if concurrent else [run() for run in runs]
        predicted = [result["noise"] for result in results]
        eps = torch.cat(predicted) if len(predicted) > 1 else predicted[0]
        uncond, cond = eps[self._predictions].float().chunk(2)
        advance(self._latents, self._previous, guide(uncond, cond, scale), self._noise, update)
        self._steps_done.add_(1).clamp_(max=MAX_STEPS - 1)

    def _inputs(self, entries: slice, model_input: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run the networks before the UNet, and return the UNet's inputs for these entries of the batch."""
        slots, cond_slots = self._batch_slots[entries], self._batch_cond_slots[entries]
        tensors = {SAMPLE: model_input[slots]} | {name: buffer[entries] for name, buffer in self._batch.items()}
        steps = self._steps_done[slots]
        tensors |= {name: buffer[cond_slots, steps] for name, buffer in self._cond.items() if name not in tensors}

        def inputs_of(network: EngineSet) -> dict[str, torch.Tensor]:
            return {spec.name: tensors[spec.name].to(DTYPES[spec.dtype]) for spec in network.signature.inputs}

        for network in self._networks.before:
            tensors |= network.run(inputs_of(network), self._height, self._width)
        return inputs_of(self._networks.unet)


def _calls(unet: EngineSet, height: int, width: int) -> tuple[dict[int, list[Engine]], dict[int, list[Engine]]]:
    """Return the engines that run a step together, by its batch: for any images, and for the CFG variants.

    The variants serve images that are all guided against zeros (see `GraphLoop._map_split_cfg`). Two engines of batch 1
    each run one half of a single guided image.
    """
    calls = {engine.bucket.batch.max: [engine] for engine in unet.serving(height, width)}
    split = {engine.bucket.batch.max: [engine] for engine in unet.of_size(height, width, "both")}
    if 1 in calls:
        calls.setdefault(2, 2 * calls[1])
        for engine in unet.of_size(height, width, "uncond"):  # of batch 1, like the conditional one
            split[2] = [*calls[1], engine]
    return calls, split
