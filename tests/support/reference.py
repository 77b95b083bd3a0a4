"""What every picture is held against: diffusers' own SDXL pipelines, in float32 on the CPU."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import numpy.typing as npt
import torch

from model.pipeline.params import GenerationParams

_SAMPLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Euler": ("EulerDiscreteScheduler", {}),
    "Euler a": ("EulerAncestralDiscreteScheduler", {}),
    "DDIM": ("DDIMScheduler", {}),
    "DPM++ 2M": ("DPMSolverMultistepScheduler", {}),
    "DPM++ 2M Karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    "DPM++ 2M SDE Karras": (
        "DPMSolverMultistepScheduler",
        {"use_karras_sigmas": True, "algorithm_type": "sde-dpmsolver++"},
    ),
    "LCM": ("LCMScheduler", {}),
}


class Reference:
    """The pipelines of a model folder and of its refiner's, if it has one."""

    def __init__(self, folder: Path) -> None:
        self._base = _pipeline(diffusers.StableDiffusionXLPipeline, folder)
        refiner = folder / "refiner"
        self._refiner = _pipeline(diffusers.StableDiffusionXLImg2ImgPipeline, refiner) if refiner.is_dir() else None
        self._scheduler_config = dict(self._base.scheduler.config)

    def generate(self, settings: GenerationParams) -> npt.NDArray[np.uint8]:
        """The first image of a request, [height, width, 3], as people draw it with diffusers.

        Base and refiner as in diffusers' guide to the ensemble of experts: denoising_end, denoising_start.
        """
        # Around diffusers alone: it makes NumPy arrays in a way that NumPy has deprecated.
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            return self._generate(settings)

    def _generate(self, settings: GenerationParams) -> npt.NDArray[np.uint8]:
        steps = settings.num_inference_steps
        guided = round(settings.end_cfg_frac * steps)
        asked = {
            "prompt": settings.prompt,
            "negative_prompt": settings.negative_prompt,
            "num_inference_steps": steps,
            "generator": torch.Generator("cpu").manual_seed(settings.seed),
        }
        sized = {"width": settings.width, "height": settings.height}
        self._base.scheduler = self._scheduler(settings.scheduler)
        if not settings.use_refiner:
            drawn = self._base(**asked, **sized, **_guidance(settings, guided, steps), output_type="np")
            return _pixels(drawn.images)
        assert self._refiner is not None
        self._refiner.scheduler = self._scheduler(settings.scheduler)
        frac = settings.denoising_frac
        latents = self._base(
            **asked, **sized, **_guidance(settings, guided, steps), denoising_end=frac, output_type="latent"
        ).images
        done = self._base.num_timesteps
        guidance = _guidance(settings, guided - done, steps - done)
        drawn = self._refiner(**asked, **guidance, image=latents, denoising_start=frac, output_type="np")
        return _pixels(drawn.images)

    def _scheduler(self, sampler: str) -> Any:
        name, settings = _SAMPLERS[sampler]
        return getattr(diffusers, name).from_config(self._scheduler_config, **settings)


def _pipeline(kind: Any, folder: Path) -> Any:
    # SDXL's watermark is a step after drawing, of a package that need not be there.
    pipeline = kind.from_pretrained(folder, dtype=torch.float32, use_safetensors=True, add_watermarker=False)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _guidance(settings: GenerationParams, guided: int, steps: int) -> dict[str, Any]:
    """Guidance in the first `guided` of a pipeline's own steps; where it ends between two, a callback ends it."""
    if guided <= 0:
        return {"guidance_scale": 1.0}
    if guided >= steps:
        return {"guidance_scale": settings.guidance_scale}
    return {
        "guidance_scale": settings.guidance_scale,
        "callback_on_step_end": _ends_guidance_after(guided),
        "callback_on_step_end_tensor_inputs": ["prompt_embeds", "add_text_embeds", "add_time_ids"],
    }


def _ends_guidance_after(guided: int) -> Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]]:
    """diffusers' recipe for dynamic guidance: drop the unconditional half and switch guidance off."""

    def callback(pipeline: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if index == guided - 1 and pipeline.do_classifier_free_guidance:
            tensors = {name: tensor.chunk(2)[1] for name, tensor in tensors.items()}
            pipeline._guidance_scale = 0.0
        return tensors

    return callback


def _pixels(images: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    return np.asarray((images[0] * 255).round().astype(np.uint8))
