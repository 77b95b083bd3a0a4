"""Measure what the calls of a step take, in steps of images that nobody sees.

The scheduler does this while it has nothing else to do (`Scheduler.when_idle`), one step at a time. So readiness does
not wait for it, and a request waits for at most one step. A server that is never idle interrupts its requests for it
after a while. Until then the benchmarks of the release count, and without these as many images join as fit.
"""

import json
import logging
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from model.cuda.probe import DeviceProbe
from model.denoising.cover import Call, Option
from model.denoising.loop import Conditioning, ImageState, Loop
from model.denoising.step_plan import StepPlan
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import GenerationParams
from model.pipeline.request_plan import plan_request

logger = logging.getLogger("preheat")

# On a GPU, whose first steps after a pause run at other clocks: steps in a row, until they have taken so long.
_LEAST_STEPS, _MOST_STEPS, _STEADY_SECONDS = 3, 16, 0.15
_LINEAR_RATIO = 1.8  # of the seconds of twice the batch: from here on a larger batch saves nothing


def measure_step_times(
    model: LoadedModel, requests: Sequence[GenerationParams], probe: DeviceProbe | None = None
) -> Iterator[None]:
    """Replace the costs of the loops that requests run in. Yields after each measured step.

    requests: one for each size. Where engines take any size, the times hold for all sizes, in proportion to the pixels.
    `probe` defaults to one of the model's device. Logs the event "measured".
    """
    probe = probe or DeviceProbe(model.device)
    measured: dict[str, dict[str, float]] = {}
    for params in requests:
        for plan in plan_request(model, params).passes[0].denoise.values():
            unet, height, width = plan.loop
            loop, denoiser = model.loop(*plan.loop), model.denoiser(*plan.loop)
            is_static = denoiser.plain.engines.is_static(height, width)
            times: dict[Option, float] = {}
            ranks = denoiser.ranks.size
            for option in _measured_options(loop, is_static, ranks):
                smaller, half = (option._replace(batch=option.batch // share) for share in (2, 4))
                if not is_static and option.batch > 2 * ranks:
                    if smaller not in times or times[smaller] > _LINEAR_RATIO * times[half]:
                        continue
                image = _image(model, plan.step_plan, option, height, width)
                steps: list[float] = []
                for number in range(_MOST_STEPS if probe.clocks_rise else 1):
                    if number >= _LEAST_STEPS and sum(steps) >= _STEADY_SECONDS:
                        break
                    steps.append(_step_seconds(probe, loop, image, option))
                    yield
                times[option] = statistics.median(steps[1:] or steps)
            model.set_step_times(plan.loop, times, for_all_sizes=not is_static)
            names = {
                option: f"{denoiser.engines_of(option).component} {option.batch}"
                + " in fp16" * (option.exact and not denoiser.plain.exact)
                for option in times
            }
            measured[f"{unet} {width}x{height}"] = {names[one]: round(1e3 * times[one], 3) for one in times}
    logger.info(json.dumps({"event": "measured", "step_ms": measured}))


def _measured_options(loop: Loop, is_static: bool, ranks: int) -> list[Option]:
    """Return the calls that are measured: all, or the calls of batch 1, 2, 4 and so on of a rank if any is possible."""
    options = [one for one in loop.costs.options if one.batch <= loop.capacity]
    options = [one for one in options if is_static or (one.batch // ranks).bit_count() == 1]
    return sorted(options, key=lambda one: (one.batch, one.variant, one.paired)) if len(loop.costs.options) > 1 else []


def _image(model: LoadedModel, plan: StepPlan, option: Option, height: int, width: int) -> ImageState:
    """Return an image whose next step may take a call: with random latents, and zeros for everything else."""
    steps, settings = plan.steps, model.settings
    plan = replace(
        plan,
        entries=np.full(steps, 1 + option.paired, np.int8),
        zero_negative=True,
        needs=(frozenset(),) * steps,
        uses={},
        exact=np.full(steps, option.exact),
    )
    sides = (height // settings.vae_scale_factor, width // settings.vae_scale_factor)
    latents = torch.randn((1, settings.latent_channels, *sides), generator=torch.Generator().manual_seed(0))
    return ImageState(0, torch.Generator(), plan, latents.to(model.device), uncond=Conditioning())


def _step_seconds(probe: DeviceProbe, loop: Loop, image: ImageState, option: Option) -> float:
    """Return the seconds of one step that is one full call of copies of an image."""
    entries = ((loop.kind(image.now), option.batch),)
    try:
        for _ in range(option.batch // image.now.entries):
            loop.add(replace(image, latents=image.latents.clone(), generator=torch.Generator().manual_seed(0)))
        began = probe.now()
        loop.step((Call(option.variant, option.paired, option.batch, entries),))
        return probe.now() - began
    finally:
        for added in list(loop.images):
            loop.remove(added)
