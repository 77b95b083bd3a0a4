"""The samplers' public names. Imports no numpy: the request's schema needs the names before torch is imported."""

import math
from collections.abc import Sequence

from model.errors import RequestRefused
from model.validation import MAX_STEPS_HEUN, MAX_STEPS_LCM

SAMPLERS: tuple[str, ...] = (
    "Euler", "Euler a", "DDIM", "DPM++ 2M", "DPM++ 2M Karras", "DPM++ 2M SDE Karras", "LCM", "Heun",
)  # fmt: skip
# The samplers that take explicit timesteps or sigmas: those whose diffusers class does.
TAKE_TIMESTEPS = ("Euler", "Heun", "DPM++ 2M", "LCM")
TAKE_SIGMAS = ("Euler",)
_FEWER_STEPS = {"Heun": MAX_STEPS_HEUN, "LCM": MAX_STEPS_LCM}
DIFFUSERS_CLASSES = {
    "EulerDiscreteScheduler": "Euler",
    "EulerAncestralDiscreteScheduler": "Euler a",
    "HeunDiscreteScheduler": "Heun",
    "DDIMScheduler": "DDIM",
    "DPMSolverMultistepScheduler": "DPM++ 2M",
    "LCMScheduler": "LCM",
}
EDM_SAMPLERS = ("Euler", "DPM++ 2M Karras", "DPM++ 2M SDE Karras")


def sampler_name(name: str) -> str:
    """Return the public name of a sampler, from that name or from a diffusers class name. Raises RequestRefused."""
    if name not in SAMPLERS and name not in DIFFUSERS_CLASSES:
        raise RequestRefused("scheduler", f"{name!r} is not one of {', '.join((*SAMPLERS, *DIFFUSERS_CLASSES))}.")
    return DIFFUSERS_CLASSES.get(name, name)


def check_steps(steps: int, sampler: str) -> None:
    """Raise RequestRefused for more steps than the sampler (public name) serves."""
    if steps > (limit := _FEWER_STEPS.get(sampler, steps)):
        raise RequestRefused(
            "num_inference_steps", f"{steps} is too many for {sampler}. Set 1 to {limit}, or another scheduler."
        )


def check_refiner(sampler: str) -> None:
    """Raise RequestRefused if a refiner cannot continue the sampler's images (public name).

    A step of Heun has two entries. The fraction of the denoising that divides base and refiner falls between the two.
    """
    if sampler == "Heun":
        raise RequestRefused(
            "scheduler", "Heun cannot be used with the refiner. Set another scheduler, or use_refiner to false."
        )


def check_spacing(sampler: str, timesteps: Sequence[int] | None, sigmas: Sequence[float] | None) -> None:
    """Raise RequestRefused for timesteps or sigmas that the sampler (public name) does not take."""
    for field, values, takers in (("timesteps", timesteps, TAKE_TIMESTEPS), ("sigmas", sigmas, TAKE_SIGMAS)):
        if values is not None and sampler not in takers:
            raise RequestRefused(field, f"{sampler} takes none. Set scheduler to one of {', '.join(takers)}.")


def skipped_steps(strength: float, steps: int, field: str = "strength") -> int:
    """Return how many of `steps` an image skips at a strength, as in diffusers' image-to-image pipelines.

    Raises RequestRefused, which names `field`, if no step is left.
    """
    run = min(int(steps * strength), steps)
    if run < 1:
        raise RequestRefused(
            field, f"{strength:g} of {steps} steps leaves no step. Set at least {smallest_strength(steps):g}."
        )
    return steps - run


def smallest_strength(steps: int) -> float:
    """Return the smallest strength, in steps of 0.0001, that leaves one of `steps`.

    1 / steps itself is not enough for each number: in floating point 49 * (1 / 49) is less than 1.
    """
    return math.ceil(1e4 / steps) / 1e4
