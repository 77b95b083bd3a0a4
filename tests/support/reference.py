"""Reference images: diffusers' own SDXL pipelines, in float32 on the CPU."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import numpy.typing as npt
import torch

from model.pipeline.params import GenerationParams
from tests.support.schedulers import DIFFUSERS_SCHEDULERS


class Reference:
    """The pipelines of a model folder and of its refiner's, if it has one."""

    def __init__(self, folder: Path) -> None:
        self._base = _pipeline(diffusers.StableDiffusionXLPipeline, folder)
        refiner = folder / "refiner"
        self._refiner = _pipeline(diffusers.StableDiffusionXLImg2ImgPipeline, refiner) if refiner.is_dir() else None
        self._scheduler_config = dict(self._base.scheduler.config)

    def generate(self, params: GenerationParams) -> npt.NDArray[np.uint8]:
        """Return the first image of a request, [height, width, 3].

        Base and refiner run as diffusers documents for the ensemble of experts: denoising_end, denoising_start.
        """
        # diffusers creates NumPy arrays in a way that NumPy has deprecated.
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            return self._generate(params)

    def _generate(self, params: GenerationParams) -> npt.NDArray[np.uint8]:
        steps = params.num_inference_steps
        guided = round(params.end_cfg_frac * steps)
        shared = {
            "prompt": params.prompt,
            "negative_prompt": params.negative_prompt,
            "num_inference_steps": steps,
            "generator": torch.Generator("cpu").manual_seed(params.seed),
        }
        base = {**shared, "width": params.width, "height": params.height, **_guidance(params, guided, steps)}
        self._base.scheduler = self._scheduler(params.scheduler)
        if not params.use_refiner:
            return _pixels(self._base(**base, output_type="np").images)
        assert self._refiner is not None
        self._refiner.scheduler = self._scheduler(params.scheduler)
        frac = params.denoising_frac
        latents = self._base(**base, denoising_end=frac, output_type="latent").images
        done = self._base.num_timesteps
        refiner = {**shared, **_guidance(params, guided - done, steps - done)}
        return _pixels(self._refiner(**refiner, image=latents, denoising_start=frac, output_type="np").images)

    def _scheduler(self, sampler: str) -> Any:
        scheduler, settings = DIFFUSERS_SCHEDULERS[sampler]
        return scheduler.from_config(self._scheduler_config, **settings)


def _pipeline(kind: Any, folder: Path) -> Any:
    # SDXL's watermark is added after decoding, by a package that may be missing.
    pipeline = kind.from_pretrained(folder, dtype=torch.float32, use_safetensors=True, add_watermarker=False)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _guidance(params: GenerationParams, guided: int, steps: int) -> dict[str, Any]:
    """Return the arguments for guidance in the first `guided` of a pipeline's steps."""
    if guided <= 0:
        return {"guidance_scale": 1.0}
    if guided >= steps:
        return {"guidance_scale": params.guidance_scale}
    return {
        "guidance_scale": params.guidance_scale,
        "callback_on_step_end": _end_guidance_after(guided),
        "callback_on_step_end_tensor_inputs": ["prompt_embeds", "add_text_embeds", "add_time_ids"],
    }


def _end_guidance_after(guided: int) -> Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]]:
    """Return a callback that drops the unconditional half and switches guidance off, as diffusers documents."""

    def callback(pipeline: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if index == guided - 1 and pipeline.do_classifier_free_guidance:
            tensors = {name: tensor.chunk(2)[1] for name, tensor in tensors.items()}
            pipeline._guidance_scale = 0.0
        return tensors

    return callback


def _pixels(images: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    return np.asarray((images[0] * 255).round().astype(np.uint8))
