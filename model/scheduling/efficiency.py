"""Measure how many images run efficiently at once, in steps of copies of one image.

The scheduler does this while it has nothing else to do (`Scheduler.when_idle`), one step at a time. So readiness does
not wait for it, and a request waits for at most one step. A server that is never idle interrupts its requests for it
after a while. Until a size is measured, as many images join as fit.
"""

import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from model.cuda.probe import DeviceProbe
from model.denoising.loop import ImageState, Loop
from model.engines.engine import EngineSet
from model.pipeline.encoded_once import EncodedOnce
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import GenerationParams
from model.pipeline.runner import Runner
from model.scheduling.admission import efficient_images

logger = logging.getLogger("preheat")

_NOISE_RATIO = 0.98  # a step counts as faster if its time is below this share of the fastest so far
_STEPS = 2  # of the plan, besides those in fp16; only one of them runs
_MAX_STEPS = 40  # of the plan


def measure_efficient_batches(
    model: LoadedModel, images: Sequence[GenerationParams], all_sizes: bool, probe: DeviceProbe | None = None
) -> Iterator[None]:
    """Set `efficient_batch` of the base's loop of each image's size. Yields after each measured step.

    images: one for each size, without a refiner. all_sizes: the only image's result holds for the sizes of all loops,
    in proportion to their pixels. `probe` defaults to one of the model's device. Logs the event "measured".
    """
    probe = probe or DeviceProbe(model.device)
    efficient = {}
    for params in images:
        loop = model.loop(model.family.base.unet, params.height, params.width)
        yield from _find_efficient_batch(model, loop, params, probe)
        efficient[f"{params.width}x{params.height}"] = loop.efficient_batch
        if all_sizes:
            model.set_efficient_pixels(loop.efficient_batch * params.height * params.width)
    logger.info(json.dumps({"event": "measured", "efficient": efficient}))


def _find_efficient_batch(
    model: LoadedModel, loop: Loop, params: GenerationParams, probe: DeviceProbe
) -> Iterator[None]:
    """Measure the base's loop of this size with copies of one image. The refiner's loop has no such limit.

    If the first and last steps run in fp16, a step between them is measured: most steps of a request are.
    """
    runner, outer = Runner(model), model.fp16_steps
    plan = runner.plan(replace(params, num_inference_steps=min(outer.first + outer.last + _STEPS, _MAX_STEPS)))
    batches = _batches(
        model.engines[model.family.base.unet], model.ranks.size, params.height, params.width, loop.capacity
    )
    counts = sorted({max(1, batch // plan.unet_batch) for batch in batches})
    if len(counts) <= 1:
        return  # a smaller batch would take as long
    [image] = plan.images()
    runner.advance(plan, image, EncodedOnce([0]))
    image.step = outer.first if outer.first + outer.last < image.plan.steps else 0
    measured: list[tuple[int, float]] = []
    for count in counts:
        fastest = math.inf
        while (seconds := _step_seconds(probe, loop, image, count)) < _NOISE_RATIO * fastest and probe.clocks_rise:
            fastest = seconds
            yield
        measured.append((count, min(fastest, seconds)))
        yield
        if efficient_images(measured) < count:
            break
    loop.efficient_batch = plan.unet_batch * efficient_images(measured)


def _batches(unet: EngineSet, ranks: int, height: int, width: int, capacity: int) -> list[int]:
    """Return the batch sizes of static buckets on all ranks together, or 1, 2, 4 and so on for a dynamic engine."""
    if unet.is_static(height, width):
        batches = [ranks * engine.bucket.batch.max for engine in unet.serving(height, width)]
        return [batch for batch in batches if batch <= capacity]
    return [2**power for power in range(capacity.bit_length())]


def _step_seconds(probe: DeviceProbe, loop: Loop, image: ImageState, count: int) -> float:
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
