"""Reference images with ControlNets: diffusers' own pipelines, in float32 on the CPU."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from model.pipeline.params import GenerationParams
from tests.support.reference import Kind, Reference, _guidance, _pixels

_PIPELINES: dict[str, dict[Kind, Any]] = {
    "ControlNetModel": {
        "text to image": diffusers.StableDiffusionXLControlNetPipeline,
        "image to image": diffusers.StableDiffusionXLControlNetImg2ImgPipeline,
        "inpaint": diffusers.StableDiffusionXLControlNetInpaintPipeline,
    },
    "ControlNetUnionModel": {
        "text to image": diffusers.StableDiffusionXLControlNetUnionPipeline,
        "image to image": diffusers.StableDiffusionXLControlNetUnionImg2ImgPipeline,
        "inpaint": diffusers.StableDiffusionXLControlNetUnionInpaintPipeline,
    },
}


class ControlReference(Reference):
    """The pipelines of a model folder and of ControlNets, by name. Requests without controls are `Reference`'s."""

    def __init__(self, folder: Path, controlnets: Mapping[str, Path]) -> None:
        super().__init__(folder)
        self._classes, self._controlnets = {}, {}
        for name, path in controlnets.items():
            self._classes[name] = json.loads((path / "config.json").read_text())["_class_name"]
            self._controlnets[name] = getattr(diffusers, self._classes[name]).from_pretrained(path)

    def generate(self, params: GenerationParams) -> npt.NDArray[np.uint8]:
        """Return the first image of a request. Several masks are several calls."""
        if not params.controls:
            return super().generate(params)
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            image = params.image
            self._select_adapters(params)
            for of_pass in params.passes():
                image = self._generate_controlled(of_pass, image)
            assert image is not None
            return image

    def _generate_controlled(
        self, params: GenerationParams, image: npt.NDArray[np.uint8] | None
    ) -> npt.NDArray[np.uint8]:
        kind: Kind = "text to image" if image is None else "inpaint" if params.masks else "image to image"
        [class_name] = {self._classes[control.name] for control in params.controls}
        pipeline = self._pipeline(kind, class_name, [control.name for control in params.controls])
        pipeline.scheduler = self._scheduler(params.scheduler)
        controls = [Image.fromarray(control.levels) for control in params.controls]
        settings = {
            "controlnet_conditioning_scale": [control.scale for control in params.controls],
            "control_guidance_start": [control.start for control in params.controls],
            "control_guidance_end": [control.end for control in params.controls],
        }
        arguments: dict[str, Any] = {name: _single(values) for name, values in settings.items()}
        if class_name == "ControlNetUnionModel":
            modes = [control.mode for control in params.controls]
            many = len(modes) > 1
            arguments |= {"control_image": [[c] for c in controls] if many else controls}
            arguments |= {"control_mode": [[mode] for mode in modes] if many else modes}
        else:
            arguments["image" if kind == "text to image" else "control_image"] = _single(controls)
        steps = params.num_inference_steps
        if image is not None:
            arguments |= {"image": Image.fromarray(image), "strength": params.strength}
            steps = int(steps * params.strength)
        if params.masks:
            arguments["mask_image"] = Image.fromarray(params.masks[0].levels)
        images = pipeline(
            prompt=params.prompt,
            negative_prompt=params.negative_prompt,
            num_inference_steps=params.num_inference_steps,
            generator=torch.Generator("cpu").manual_seed(params.seed),
            height=params.height,
            width=params.width,
            output_type="np",
            **arguments,
            **self._image_prompt_arguments(params),
            **_guidance(params, steps, steps, kind),
        ).images
        return _pixels(images)

    def _pipeline(self, kind: Kind, class_name: str, names: list[str]) -> Any:
        base = self._base["text to image"]
        settings = {"force_zeros_for_empty_prompt": base.config["force_zeros_for_empty_prompt"]}
        networks = [self._controlnets[name] for name in names]
        made = _PIPELINES[class_name][kind](
            **base.components, controlnet=_single(networks), add_watermarker=False, **settings
        )
        made.set_progress_bar_config(disable=True)
        return made


def _single(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values
