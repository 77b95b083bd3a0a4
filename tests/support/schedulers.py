"""The schedulers of diffusers that implement our samplers, and noise schedules from configs."""

from collections.abc import Mapping
from typing import Any

from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EDMDPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    LCMScheduler,
)

from engine_builder.checkpoints.scheduler_config import read_scheduler_config
from model.denoising.edm_schedule import EdmSchedule
from model.denoising.noise_schedule import NoiseSchedule

# Sampler -> class, and the settings that differ from the checkpoint's.
DIFFUSERS_SCHEDULERS: dict[str, tuple[type, dict[str, Any]]] = {
    "Euler": (EulerDiscreteScheduler, {}),
    "Euler a": (EulerAncestralDiscreteScheduler, {}),
    "DDIM": (DDIMScheduler, {}),
    "DPM++ 2M": (DPMSolverMultistepScheduler, {}),
    "DPM++ 2M Karras": (DPMSolverMultistepScheduler, {"use_karras_sigmas": True}),
    "DPM++ 2M SDE Karras": (
        DPMSolverMultistepScheduler,
        {"use_karras_sigmas": True, "algorithm_type": "sde-dpmsolver++"},
    ),
    "LCM": (LCMScheduler, {}),
    "Heun": (HeunDiscreteScheduler, {}),
}
# The same for models in the EDM formulation.
EDM_SCHEDULERS: dict[str, tuple[type, dict[str, Any]]] = {
    "Euler": (EDMEulerScheduler, {}),
    "DPM++ 2M Karras": (EDMDPMSolverMultistepScheduler, {}),
    "DPM++ 2M SDE Karras": (EDMDPMSolverMultistepScheduler, {"algorithm_type": "sde-dpmsolver++"}),
}


def read_noise_schedule(config: Mapping[str, Any]) -> NoiseSchedule:
    """Return the noise schedule of the scheduler_config.json of an SDXL."""
    schedule = read_scheduler_config(config, "sdxl").schedule
    assert isinstance(schedule, NoiseSchedule)
    return schedule


def read_edm_schedule(config: Mapping[str, Any]) -> EdmSchedule:
    """Return the noise schedule of the scheduler_config.json of an SDXL in the EDM formulation."""
    schedule = read_scheduler_config(config, "sdxl").schedule
    assert isinstance(schedule, EdmSchedule)
    return schedule
