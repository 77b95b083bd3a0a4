"""The schedulers of diffusers that implement our samplers."""

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
