"""Run everything once before the replica is ready, so that no request waits for lazy loading or finds memory full.

The warm-up makes every loop that requests can need, with the graphs of all of its buckets. It generates and decodes an
image of every size, and encodes text in every batch size. The peak memory of serving has then been allocated once. The
warm-up also measures the most efficient batch of each size.
"""

import math
import time
from dataclasses import replace

import numpy as np
import torch

from model.denoising.loop import ImageState, Loop
from model.engines.engine import EngineSet
from model.errors import EngineError, OutOfDeviceMemory
from model.loading.interfaces import check_interfaces
from model.loading.load import Loaded
from model.loading.served import ServedModel, SizeList
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import GenerationParams
from model.pipeline.plan import plan_request
from model.pipeline.preview import PreviewMap, fit_preview_map
from model.pipeline.prompt import encode_prompt
from model.pipeline.runner import Runner
from model.pipeline.spec import BASE, REFINER, UNET
from model.pipeline.text_to_image import generate
from model.scheduling.admission import efficient_images

_NOISE_RATIO = 0.98  # a step counts as faster if its time is below this share of the fastest so far
_STEPS = 2  # of the image; with a refiner, one of them is its own
_MAX_STEPS = 40  # of it, if the first and last steps run in fp16


class DeviceProbe:
    """Measures the device: its time, and how often its memory did not suffice."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self.clocks_rise = self._on_gpu
        """True if steps may become faster under load. False for a CPU, whose steps are too long to repeat."""

    def now(self) -> float:
        """Wait until all queued work is done, and return the seconds of a clock."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def refused_allocations(self) -> int:
        """Return how often PyTorch could not allocate memory. An engine's code reports that as a plain RuntimeError."""
        return int(torch.cuda.memory_stats(self._device).get("num_ooms", 0)) if self._on_gpu else 0


def warm_up(loaded: Loaded, probe: DeviceProbe | None = None) -> PreviewMap:
    """Warm up every listed size, or the native one. Returns the map for previews, fitted to the decoder.

    `probe` defaults to one of the model's device. Raises OutOfDeviceMemory if the configured buckets do not fit into
    the GPU's memory, and EngineError if the release's engines do not fit together.
    """
    check_interfaces(loaded.model.engines)
    served = loaded.served
    probe = probe or DeviceProbe(loaded.model.device)
    refusals = probe.refused_allocations()
    listed = served.sizes.sizes if isinstance(served.sizes, SizeList) else None
    try:
        for width, height in listed or ((served.native_width, served.native_height),):
            params = _warm_up_params(served, width, height, loaded.model)
            generate(loaded.model, [_from_image(params) if served.encodes_images else params])
            _find_efficient_batch(loaded.model, replace(params, use_refiner=False), probe)
        if listed is None:
            loop = loaded.model.loop(UNET, served.native_height, served.native_width)
            loaded.model.efficient_pixels = loop.efficient_batch * served.native_height * served.native_width
        _encode_every_text(loaded.model, params)
        return fit_preview_map(loaded.model, served.native_height, served.native_width)
    except EngineError as error:
        # No request has run yet, so the release is wrong. Its remedy differs from that of a wrong call.
        raise EngineError(f"The engines of {loaded.release} do not fit together. {error.args[0]}") from error
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or probe.refused_allocations() > refusals:
            raise OutOfDeviceMemory(
                f"{loaded.release} does not fit into this GPU's memory with every configured bucket running."
            ) from error
        raise


def _warm_up_params(served: ServedModel, width: int, height: int, model: LoadedModel) -> GenerationParams:
    """Return a request that runs each loop. A UNet in two precisions has two of them."""
    outer = model.fp16_steps.first + model.fp16_steps.last
    count = min(_STEPS * (outer + 1), _MAX_STEPS)
    steps = {"num_inference_steps": count, "use_refiner": served.has_refiner, "denoising_frac": 0.5}
    values = served.defaults.model_dump() | steps
    return GenerationParams(prompt="warm up", negative_prompt=None, width=width, height=height, seed=0, **values)


def _from_image(params: GenerationParams) -> GenerationParams:
    """Return the request with a black image to start from. All of its steps run."""
    return replace(params, image=np.zeros((params.height, params.width, 3), np.uint8), strength=1.0)


def _encode_every_text(model: LoadedModel, params: GenerationParams) -> None:
    """Encode with a negative prompt and without guidance: together these use both batch sizes of the text networks."""
    for negative_prompt, guidance_scale in (("warm up", 2.0), (None, 1.0)):
        varied = replace(params, negative_prompt=negative_prompt, guidance_scale=guidance_scale)
        plan = plan_request(model, varied)
        for denoiser in (BASE, REFINER):
            if denoiser.unet in plan.denoise:
                encode_prompt(model, plan, denoiser)


def efficient_by_size(model: LoadedModel) -> dict[str, int]:
    """Return WIDTHxHEIGHT -> most efficient UNet batch, for the base's loops made so far."""
    bases = {key: loop for key, loop in model.loops.items() if key[0] == UNET}
    return {f"{width}x{height}": loop.efficient_batch for (_, height, width), loop in bases.items()}


def _find_efficient_batch(model: LoadedModel, params: GenerationParams, probe: DeviceProbe) -> None:
    """Measure the base's loop of this size with copies of one image. The refiner's loop has no such limit.

    If the first and last steps run in fp16, a step between them is measured: most steps of a request are.
    """
    height, width = params.height, params.width
    loop = model.loop(UNET, height, width)
    runner = Runner(model)
    outer = model.fp16_steps
    plan = runner.plan(replace(params, num_inference_steps=min(outer.first + outer.last + _STEPS, _MAX_STEPS)))
    batches = _batches(model.engines[UNET], height, width, loop.capacity)
    counts = sorted({max(1, batch // plan.unet_batch) for batch in batches})
    if len(counts) <= 1:
        return  # a smaller batch would take as long
    [image] = plan.images()
    runner.advance(plan, image)
    image.step = outer.first if outer.first + outer.last < image.schedule.steps else 0
    seconds = ((images, _step_seconds(probe, loop, image, images)) for images in counts)
    loop.efficient_batch = plan.unet_batch * efficient_images(seconds)


def _batches(unet: EngineSet, height: int, width: int, capacity: int) -> list[int]:
    """Return the batch sizes of static buckets, or 1, 2, 4 and so on for a dynamic engine."""
    if unet.is_static(height, width):
        return [e.bucket.batch.max for e in unet.serving(height, width) if e.bucket.batch.max <= capacity]
    return [2**power for power in range(capacity.bit_length())]


def _step_seconds(probe: DeviceProbe, loop: Loop, image: ImageState, count: int) -> float:
    """Return the seconds of a step of `count` copies of `image`. If clocks rise, repeat it until it is no faster."""
    fastest = math.inf
    while (seconds := _one_step(probe, loop, image, count)) < _NOISE_RATIO * fastest and probe.clocks_rise:
        fastest = seconds
    return min(fastest, seconds)


def _one_step(probe: DeviceProbe, loop: Loop, image: ImageState, count: int) -> float:
    """Return the seconds of one step of `count` copies of `image`."""
    for _ in range(count):
        loop.add(replace(image, latents=image.latents.clone(), generator=torch.Generator().manual_seed(0)))
    began = probe.now()
    try:
        loop.step()
        return probe.now() - began
    finally:
        for added in list(loop.images):
            loop.remove(added)
