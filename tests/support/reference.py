"""Reference images: diffusers' own pipelines, in float32 on the CPU."""

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import diffusers
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from model.pipeline.params import GenerationParams
from tests.support.forecasts import Forecaster
from tests.support.schedulers import DIFFUSERS_SCHEDULERS, EDM_SCHEDULERS

Kind = Literal["text to image", "image to image", "inpaint"]
PIPELINES: dict[str, dict[Kind, Any]] = {
    "StableDiffusionXLPipeline": {
        "text to image": diffusers.StableDiffusionXLPipeline,
        "image to image": diffusers.StableDiffusionXLImg2ImgPipeline,
        "inpaint": diffusers.StableDiffusionXLInpaintPipeline,
    },
    "StableDiffusionPipeline": {
        "text to image": diffusers.StableDiffusionPipeline,
        "image to image": diffusers.StableDiffusionImg2ImgPipeline,
        "inpaint": diffusers.StableDiffusionInpaintPipeline,
    },
}
CONTROLLED: dict[str, dict[Kind, Any]] = {
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


_NO_GUIDANCE = 1 + 1e-9  # diffusers guides from above 1 on


class Reference:
    """The pipelines of a model folder and of its refiner's, if it has one.

    controlnets, ip_adapters: folders and files by name. image_encoder: the folder of the IP-Adapters' encoder.
    """

    def __init__(
        self,
        folder: Path,
        controlnets: Mapping[str, Path] | None = None,
        ip_adapters: Mapping[str, Path] | None = None,
        image_encoder: Path | None = None,
    ) -> None:
        name = json.loads((folder / "model_index.json").read_text())["_class_name"]
        kinds = next(kinds for kinds in PIPELINES.values() if name in [kind.__name__ for kind in kinds.values()])
        base = _pipeline(kinds["text to image"], folder)
        self._base = {kind: base if type(base) is made else _same(made, base) for kind, made in kinds.items()}
        self._refiner = {}
        if (folder / "refiner").is_dir():
            refiner = _pipeline(kinds["image to image"], folder / "refiner")
            self._refiner = {"image to image": refiner, "inpaint": _same(kinds["inpaint"], refiner)}
        self._is_sdxl = "XL" in type(base).__name__
        self._is_edm = type(base.scheduler).__name__.startswith("EDM")
        self._scheduler_config = dict(base.scheduler.config)
        self._has_loras = False
        self.block_scales: dict[str, dict[str, Any]] = {}
        """Scales by block, in place of a request's, by the name of the adapter."""
        self._controlnets = {name: _controlnet(path) for name, path in (controlnets or {}).items()}
        self._ip_adapters = dict(ip_adapters or {})
        if image_encoder is not None:
            from transformers import CLIPImageProcessorPil, CLIPVisionModelWithProjection

            encoder: Any = CLIPVisionModelWithProjection.from_pretrained(image_encoder)
            side = encoder.config.image_size
            processor = CLIPImageProcessorPil(size=side, crop_size=side)
            self._encoder = {"image_encoder": encoder, "feature_extractor": processor}

    @property
    def networks(self) -> dict[str, torch.nn.Module]:
        """The base model's networks that adapters change."""
        names = ("unet", "text_encoder", "text_encoder_2")
        components = self._base["text to image"].components
        return {name: components[name] for name in names if components.get(name) is not None}

    def load_lora(self, name: str, path: Path) -> None:
        """Load an adapter of a file. Requests that name it use it; see `generate`."""
        # peft warns about each further adapter.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            self._base["text to image"].load_lora_weights(path.parent, weight_name=path.name, adapter_name=name)
        self._has_loras = True

    def generate(self, params: GenerationParams) -> npt.NDArray[np.uint8]:
        """Return the first image of a request, [height, width, 3].

        Base and refiner run as diffusers documents for the ensemble of experts: denoising_end, denoising_start. Several
        masks are several calls, each with the 8-bit result of the one before.
        """
        with _quiet(), self._with_image_prompts(params):
            image = params.image
            self._select_adapters(params)
            for of_pass in params.passes():
                image = self._generate(of_pass, image)
            assert image is not None
            return image

    @contextmanager
    def _with_image_prompts(self, params: GenerationParams) -> Iterator[None]:
        """Load the IP-Adapters of a request. All pipelines share the UNet that they change."""
        if not params.image_prompts:
            yield
            return
        for pipeline in self._base.values():
            pipeline.register_modules(**self._encoder)
        base = self._base["text to image"]
        paths = [self._ip_adapters[prompt.name] for prompt in params.image_prompts]
        base.load_ip_adapter(
            [str(path.parent) for path in paths],
            subfolder=[""] * len(paths),
            weight_name=[path.name for path in paths],
            image_encoder_folder=None,
        )
        base.set_ip_adapter_scale([prompt.scale for prompt in params.image_prompts])
        try:
            yield
        finally:
            base.unload_ip_adapter()

    def _select_adapters(self, params: GenerationParams) -> None:
        """Switch on the adapters of a request. All pipelines share the networks that they change."""
        if params.loras:
            names, scales = zip(*params.loras, strict=True)
            self._base["text to image"].enable_lora()
            weights = [self.block_scales.get(name, scale) for name, scale in zip(names, scales, strict=True)]
            self._base["text to image"].set_adapters(list(names), weights)
        elif self._has_loras:
            self._base["text to image"].disable_lora()

    def generate_from(self, params: GenerationParams, embeds: dict[str, torch.Tensor]) -> npt.NDArray[np.uint8]:
        """Return the first image of a text to image request with these embeddings in place of its prompts."""
        with _quiet():
            pipeline = self._base["text to image"]
            pipeline.scheduler = self._scheduler(params.scheduler)
            images = pipeline(
                **embeds,
                num_inference_steps=params.num_inference_steps,
                generator=torch.Generator("cpu").manual_seed(params.seed),
                guidance_scale=params.guidance_scale,
                width=params.width,
                height=params.height,
                output_type="np",
            ).images
            return _pixels(images)

    def _generate(self, params: GenerationParams, image: npt.NDArray[np.uint8] | None) -> npt.NDArray[np.uint8]:
        shared = {
            "prompt": params.prompt,
            "negative_prompt": params.negative_prompt,
            "num_inference_steps": params.num_inference_steps,
            **({"guidance_rescale": params.guidance_rescale} if params.guidance_rescale else {}),
            "clip_skip": params.clip_skip or None,
            **_spacing(params),
            **(_sizes(params) if self._is_sdxl else {}),
            "generator": torch.Generator("cpu").manual_seed(params.seed),
        }
        size = {"width": params.width, "height": params.height}
        inputs: dict[str, Any] = size
        kind: Kind = "text to image"
        refining_kind: Kind = "image to image"
        mask = {}
        steps = params.num_inference_steps
        if image is not None:
            kind, inputs = "image to image", {"image": Image.fromarray(image), "strength": params.strength}
            steps = int(steps * params.strength)
        if params.masks:
            kind = refining_kind = "inpaint"
            mask = {"mask_image": Image.fromarray(params.masks[0].levels), **size}
        pipeline = self._controlled(kind, params) if params.controls else self._base[kind]
        pipeline.scheduler = self._scheduler(params.scheduler)
        order = pipeline.scheduler.order  # the last step has one entry
        first, end = (order * round(share * steps) for share in (params.guidance_start, params.guidance_end))
        guidance = {first, end} if params.guidance_scale != 1 else set()
        entries = order * (steps - 1) + 1
        if params.clip_skip and not self._is_sdxl:
            # diffusers 0.42.1 looks for the layer norm of clip_skip where transformers 4 had it.
            encoder = pipeline.text_encoder
            vars(encoder)["text_model"] = SimpleNamespace(final_layer_norm=encoder.final_layer_norm)
        base = {**shared, **inputs, **mask, **_guidance(params, first, end, entries, kind, self._is_sdxl)}
        base |= self._control_arguments(kind, params) if params.controls else {}
        if params.image_prompts:
            base["ip_adapter_image"] = [[Image.fromarray(one) for one in use.levels] for use in params.image_prompts]
        if not params.use_refiner:
            return _pixels(self._run(pipeline, params, guidance | _control_breaks(params, steps), base).images)
        frac = params.denoising_frac
        base |= {"denoising_end": frac, "output_type": "latent"}
        latents = self._run(pipeline, params, guidance, base).images
        done = pipeline.num_timesteps
        refiner = {**shared, **mask, **_guidance(params, first - done, end - done, entries - done, refining_kind)}
        refiner |= {"image": latents, "denoising_start": frac}
        breaks = {step - done for step in guidance}
        return _pixels(self._run(self._refiner[refining_kind], params, breaks, refiner).images)

    def _run(self, pipeline: Any, params: GenerationParams, breaks: set[int], arguments: dict[str, Any]) -> Any:
        """Return what a pipeline returns, with forecasts from the second of two runs, when its steps are known."""
        steps, arguments, state = 0, {"output_type": "np", **arguments}, arguments["generator"].get_state()
        for level in ["off", params.forecast][params.forecast == "off" :]:
            pipeline.scheduler = self._scheduler(params.scheduler)
            forecaster = Forecaster(pipeline.scheduler, level, steps, breaks)
            arguments["generator"].set_state(state)
            result = pipeline(**arguments)
            steps = forecaster.calls
        return result

    def _controlled(self, kind: Kind, params: GenerationParams) -> Any:
        """Return a pipeline with the ControlNets of a request."""
        networks = [self._controlnets[control.name] for control in params.controls]
        return _same(CONTROLLED[type(networks[0]).__name__][kind], self._base["text to image"], _single(networks))

    def _control_arguments(self, kind: Kind, params: GenerationParams) -> dict[str, Any]:
        controls, images = params.controls, [Image.fromarray(control.levels) for control in params.controls]
        arguments = {
            "controlnet_conditioning_scale": _single([control.scale for control in controls]),
            "control_guidance_start": _single([control.start for control in controls]),
            "control_guidance_end": _single([control.end for control in controls]),
        }
        if controls[0].mode is not None:
            return arguments | {"control_image": images, "control_mode": [control.mode for control in controls]}
        return arguments | {"image" if kind == "text to image" else "control_image": _single(images)}

    def _scheduler(self, sampler: str) -> Any:
        scheduler, settings = (EDM_SCHEDULERS if self._is_edm else DIFFUSERS_SCHEDULERS)[sampler]
        return scheduler.from_config(self._scheduler_config, **settings)


def _pipeline(kind: Any, folder: Path) -> Any:
    with _quiet():
        pipeline = kind.from_pretrained(folder, dtype=torch.float32, use_safetensors=True, **_extras(kind))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what diffusers logs and warns about.

    It logs each scheduler setting that another sampler does not have, and creates NumPy arrays in a deprecated way.
    """
    logger = logging.getLogger("diffusers")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            yield
    finally:
        logger.setLevel(before)


def _controlnet(folder: Path) -> Any:
    name = json.loads((folder / "config.json").read_text())["_class_name"]
    return getattr(diffusers, name).from_pretrained(folder)


def _single(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _extras(kind: Any) -> dict[str, Any]:
    """Leave out what runs after decoding: the watermark of SDXL needs a package that may be missing."""
    return {"add_watermarker": False} if "XL" in kind.__name__ else {"requires_safety_checker": False}


def _same(kind: Any, pipeline: Any, controlnet: Any = None) -> Any:
    """Return another pipeline of the same networks and settings."""
    names = ("force_zeros_for_empty_prompt", "requires_aesthetics_score")
    settings = {name: pipeline.config[name] for name in names if name in pipeline.config}
    controlled = {} if controlnet is None else {"controlnet": controlnet}
    made = kind(**pipeline.components, **controlled, **_extras(kind), **settings)
    made.set_progress_bar_config(disable=True)
    return made


def _spacing(params: GenerationParams) -> dict[str, Any]:
    spacing = {"timesteps": params.timesteps, "sigmas": params.sigmas}
    return {name: list(values) for name, values in spacing.items() if values is not None}


def _sizes(params: GenerationParams) -> dict[str, Any]:
    sizes = {"original_size": params.original_size, "target_size": params.target_size}
    return {"crops_coords_top_left": params.crop} | {name: size for name, size in sizes.items() if size is not None}


def _control_breaks(params: GenerationParams, steps: int) -> set[int]:
    """Return the steps at which a ControlNet begins or has ended."""
    used = [[one.start <= i / steps and (i + 1) / steps <= one.end for i in range(steps)] for one in params.controls]
    return {step for one in used for step in range(1, steps) if one[step] != one[step - 1]}


def _guidance(
    params: GenerationParams, first: int, end: int, steps: int, kind: Kind, is_sdxl: bool = True
) -> dict[str, Any]:
    """Return the arguments for guidance from the step `first` to the one before `end` of a pipeline's steps."""
    if end <= 0:
        return {"guidance_scale": 1.0}
    if first <= 0 and end >= steps:
        return {"guidance_scale": params.guidance_scale}
    return {
        "guidance_scale": params.guidance_scale if first <= 0 else _NO_GUIDANCE,
        "callback_on_step_end": _guide_between(params.guidance_scale, first, end),
        "callback_on_step_end_tensor_inputs": [
            "prompt_embeds",
            *(["add_text_embeds", "add_time_ids"] if is_sdxl else []),
            *(["mask"] if kind == "inpaint" else []),
        ],
    }


def _guide_between(scale: float, first: int, end: int) -> Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]]:
    """Return a callback that switches guidance on and off.

    At the end it drops the unconditional half, as diffusers documents. Before `first` both halves run, with a scale of
    nearly 1, which is the conditional half.
    """

    def callback(pipeline: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if index == first - 1:
            pipeline._guidance_scale = scale
        if index == end - 1 and pipeline.do_classifier_free_guidance:
            tensors = {name: tensor.chunk(2)[1] for name, tensor in tensors.items()}
            pipeline._guidance_scale = 0.0
        return tensors

    return callback


def _pixels(images: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    return np.asarray((images[0] * 255).round().astype(np.uint8))
