"""The table of samplers: what each one is, can do, and equals in diffusers.

A sampler is one row, and its name stands nowhere else: other modules read a row's facts. Imports no numpy, because the
request's schema needs the table before torch is imported.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from model.errors import RequestRefused
from model.validation import MAX_STEPS, Forecast

_BOTH: tuple[Forecast, ...] = ("quality", "fast")


class DiffusersClass(NamedTuple):
    """A class of diffusers, and the options that select a sampler in it."""

    name: str
    options: Mapping[str, Any] = {}


@dataclass(frozen=True, eq=False)
class SamplerSpec:
    """A sampler. `spacing`, `takes` and the two classes are facts of diffusers, the others are facts of the sampler."""

    name: str  # its public name
    algorithm: Literal["euler", "heun", "ddim", "dpm", "lcm"]  # the builder in `model.denoising.samplers`
    diffusers: DiffusersClass  # the class's name alone means the first row that has the class
    edm: DiffusersClass | None = None  # for models in the EDM formulation. None: they do not have the sampler
    takes: tuple[str, ...] = ()  # the fields of a request that replace its own spacing
    spacing: str = "linspace"  # of a model that leaves `timestep_spacing` to the sampler
    comfy: tuple[str, ...] = ()  # its names in ComfyUI, without the schedule
    karras: bool = False  # the sigmas of Karras et al. 2022, equation 5, in place of the model's spacing
    max_steps: int = MAX_STEPS  # of one request
    order: int = 1  # runs of the UNet in each step but the last, which has one
    draws_noise: bool = False  # in its steps, from the generator
    distilled: bool = False  # its steps are some of the model's `original_inference_steps`
    forecasts: tuple[Forecast, ...] = ()  # the levels that it offers, without draws: where they cost little

    @property
    def refinable(self) -> bool:
        """True if a refiner can continue the images. It cannot start between the two runs of one step."""
        return self.order == 1

    def implementation(self, is_edm: bool) -> DiffusersClass:
        """Return the class for models of a formulation that the sampler serves."""
        found = self.edm if is_edm else self.diffusers
        assert found is not None, f"{self.name} does not serve the EDM formulation"
        return found


def _dpm(algorithm: str, karras: bool) -> DiffusersClass:
    return DiffusersClass("DPMSolverMultistepScheduler", {"algorithm_type": algorithm, "use_karras_sigmas": karras})


def _edm_dpm(algorithm: str) -> DiffusersClass:
    return DiffusersClass("EDMDPMSolverMultistepScheduler", {"algorithm_type": algorithm})  # has Karras sigmas only


EULER = SamplerSpec(
    "Euler", "euler", DiffusersClass("EulerDiscreteScheduler"), DiffusersClass("EDMEulerScheduler"),
    takes=("timesteps", "sigmas"), forecasts=_BOTH, comfy=("euler",),
)  # fmt: skip
EULER_A = SamplerSpec(
    "Euler a", "euler", DiffusersClass("EulerAncestralDiscreteScheduler"), draws_noise=True, comfy=("euler_ancestral",)
)
HEUN = SamplerSpec(
    "Heun",
    "heun",
    DiffusersClass("HeunDiscreteScheduler"),
    takes=("timesteps",),
    max_steps=50,
    order=2,
    comfy=("heun",),
)
DDIM = SamplerSpec("DDIM", "ddim", DiffusersClass("DDIMScheduler"), spacing="leading", forecasts=_BOTH, comfy=("ddim",))
DPM_2M = SamplerSpec(
    "DPM++ 2M", "dpm", _dpm("dpmsolver++", karras=False), takes=("timesteps",), forecasts=_BOTH, comfy=("dpmpp_2m",)
)
DPM_2M_KARRAS = SamplerSpec(
    "DPM++ 2M Karras", "dpm", _dpm("dpmsolver++", karras=True), _edm_dpm("dpmsolver++"), karras=True,
    forecasts=("fast",),  # 21 plain steps are nearer to 30 than `quality`
    comfy=("dpmpp_2m",),
)  # fmt: skip
DPM_2M_SDE_KARRAS = SamplerSpec(
    "DPM++ 2M SDE Karras", "dpm", _dpm("sde-dpmsolver++", karras=True), _edm_dpm("sde-dpmsolver++"), karras=True,
    draws_noise=True, comfy=("dpmpp_2m_sde", "dpmpp_2m_sde_gpu"),
)  # fmt: skip
LCM = SamplerSpec(
    "LCM", "lcm", DiffusersClass("LCMScheduler"), takes=("timesteps",), max_steps=50, draws_noise=True, distilled=True,
    comfy=("lcm",),
)  # fmt: skip
SPECS = {spec.name: spec for spec in (EULER, EULER_A, HEUN, DDIM, DPM_2M, DPM_2M_KARRAS, DPM_2M_SDE_KARRAS, LCM)}
# The names as users read them: samplers that run the UNet once in a step come first.
SAMPLERS = tuple(sorted(SPECS, key=lambda name: SPECS[name].order))


def sampler_spec(name: str) -> SamplerSpec:
    """Return a sampler, from its public name or from a diffusers class name. Raises RequestRefused."""
    for spec in SPECS.values():
        if name in (spec.name, spec.diffusers.name):
            return spec
    known = (*SAMPLERS, *dict.fromkeys(spec.diffusers.name for spec in SPECS.values()))
    raise RequestRefused("scheduler", f"{name!r} is not one of {', '.join(known)}.")


def takers(field: str) -> str:
    """Return the names of the samplers that take a field, for descriptions and messages."""
    return ", ".join(spec.name for spec in SPECS.values() if field in spec.takes)


def check_steps(steps: int, spec: SamplerSpec) -> None:
    """Raise RequestRefused for more steps than the sampler serves."""
    if steps > spec.max_steps:
        problem = f"{steps} is too many for {spec.name}. Set 1 to {spec.max_steps}, or another scheduler."
        raise RequestRefused("num_inference_steps", problem)


def check_refiner(spec: SamplerSpec) -> None:
    """Raise RequestRefused if a refiner cannot continue the sampler's images."""
    if not spec.refinable:
        problem = f"{spec.name} cannot be used with the refiner. Set another scheduler, or use_refiner to false."
        raise RequestRefused("scheduler", problem)


def check_forecast(spec: SamplerSpec, forecast: Forecast) -> None:
    """Raise RequestRefused for a level that the sampler does not offer."""
    if forecast not in ("off", *spec.forecasts):
        offering = [other.name for other in SPECS.values() if forecast in other.forecasts]
        problem = f"{spec.name} does not offer {forecast!r}. Set off, or scheduler to one of {', '.join(offering)}."
        raise RequestRefused("forecast", problem)


def check_guidance(start: float, end: float, field: str = "guidance_start") -> None:
    """Raise RequestRefused, which names `field`, if guidance begins late and not before it ends. 0 ends it at once."""
    if end and start >= end:
        problem = f"guidance would start at {start:g} of the steps and end at {end:g}. "
        problem += "Set guidance_start below guidance_end, or guidance_scale to 1 for no guidance."
        raise RequestRefused(field, problem)


def check_spacing(spec: SamplerSpec, timesteps: Sequence[int] | None, sigmas: Sequence[float] | None) -> None:
    """Raise RequestRefused for timesteps or sigmas that the sampler does not take."""
    for field, values in (("timesteps", timesteps), ("sigmas", sigmas)):
        if values is not None and field not in spec.takes:
            raise RequestRefused(field, f"{spec.name} takes none. Set scheduler to one of {takers(field)}.")


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
