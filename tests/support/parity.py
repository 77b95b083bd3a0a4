"""Images of a model compared with those of diffusers: alone, in batches, and over HTTP."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine_builder.building.build_plan import BuildPlan
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.stores.store import WritableStore
from model.api.resolve import resolve
from model.cold_start import ColdStart
from model.images.pixels import Pixels
from model.loading.load import Loaded
from model.loading.target import Target, detect_targets
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import GenerationParams, Mask
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from model.store.precision import FP32
from tests.support.deployments import deployed, load_release
from tests.support.images import file_of, largest_difference
from tests.support.reference import Reference
from tests.support.uncompiled import publish_uncompiled

TOLERANCE = 2  # of 255: float32 rounding, in another order
_IMAGES = ("image", "strength", "masks", "controls", "image_prompts")


def publish(name: str, checkpoint: Checkpoint, target: Target, folder: Path) -> WritableStore:
    """Return a new store in `folder` that has a model without compiled code, as version 1."""
    return publish_uncompiled(BuildPlan(name, checkpoint, None, target, FP32), folder / "store")


def load(store: WritableStore, release: str, **options: Any) -> Loaded:
    """Load a release on the CPU. `options`: of its `Deployment`."""
    return load_release(store, deployed(release, **options), detect_targets(), ColdStart())


def params_of(loaded: Loaded, **fields: Any) -> GenerationParams:
    """Return the parameters of a request with these fields, by default for a small image of 8 steps.

    image, masks, controls, image_prompts, loras: those of the parameters.
    """
    own = {name: fields.pop(name) for name in (*_IMAGES, "loras") if name in fields}
    side = min(loaded.served.native_width, 128)
    request = {"prompt": "a large red circle on a blue background", "seed": 7, "num_inference_steps": 8}
    request |= {"width": side, "height": side}
    return replace(resolve(GenerationRequest.model_validate(request | fields), loaded.served), **own)


def request_of(params: GenerationParams) -> dict[str, Any]:
    """Return the JSON of a request that resolves to these parameters, for a PNG."""
    names = (
        "prompt", "negative_prompt", "num_inference_steps", "guidance_scale", "guidance_end", "scheduler", "seed",
        "num_images", "width", "height", "use_refiner",
    )  # fmt: skip
    request = {name: getattr(params, name) for name in names} | {"output_format": "png"}
    if params.use_refiner:
        request["denoising_frac"] = params.denoising_frac
    if params.image is not None:
        request |= {"image": file_of(params.image), "strength": params.strength}
    own = {"masks": ("prompt", "negative_prompt", "strength"), "controls": ("name", "scale", "start", "end", "mode")}
    for field, parts in own.items():
        uses = getattr(params, field)
        files = [{name: getattr(use, name) for name in parts} | {"image": file_of(use.levels)} for use in uses]
        request |= {field: files} if files else {}
    if params.image_prompts:
        request["ip_adapters"] = [
            {"name": use.name, "scale": use.scale, "images": list(map(file_of, use.levels))}
            for use in params.image_prompts
        ]
    return request


def picture(seed: int, side: int = 64) -> Pixels:
    """Return a picture of random blocks."""
    blocks = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return blocks.repeat(side // 8, axis=0).repeat(side // 8, axis=1)


def box(
    left: int, top: int, right: int, bottom: int, side: int = 128, prompt: str = "a green triangle",
    negative_prompt: str | None = None, strength: float = 0.9999,
) -> Mask:  # fmt: skip
    """Return a mask of a rectangle, in an image of `side` pixels."""
    levels = np.zeros((side, side), np.uint8)
    levels[top:bottom, left:right] = 255
    return Mask(levels, prompt, negative_prompt, strength)


def image_of(model: LoadedModel, params: GenerationParams) -> Pixels:
    """Return the only image of a request that runs alone."""
    [image] = generate(model, [params])[0]
    return image


def check_images(model: LoadedModel, reference: Reference, *requests: GenerationParams) -> None:
    """Each request alone gives the image of diffusers."""
    for params in requests:
        assert largest_difference(image_of(model, params), reference.generate(params)) <= TOLERANCE, params


def check_batch(reference: Reference, batch: Sequence[GenerationParams], *models: LoadedModel) -> None:
    """Requests of a batch give the images of diffusers, and those of each seed alone in the first model."""
    together = [iter(generate(model, batch)[0]) for model in models]
    for params in batch:
        for seed in params.seeds:
            single = replace(params, seed=seed, num_images=1)
            alone, expected = image_of(models[0], single), reference.generate(single)
            for images in together:
                image = next(images)
                assert largest_difference(image, alone) <= 1, single
                assert largest_difference(image, expected) <= TOLERANCE, single


def check_all_differ(model: LoadedModel, *requests: GenerationParams) -> None:
    """The images of requests differ by more than the tolerance, each from each. So comparisons can fail."""
    images = [image_of(model, params) for params in requests]
    pairs = itertools.combinations(range(len(images)), 2)
    differences = {(one, other): largest_difference(images[one], images[other]) for one, other in pairs}
    assert min(differences.values()) > TOLERANCE, differences
