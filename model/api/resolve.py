"""Resolve a request to generation parameters: fill in empty fields, and check it against what a release serves.

This module uses no engines: `ServedModel` describes what is served.
"""

import secrets
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from model.adapters.block_scales import layer_scale
from model.adapters.layers import AdapterSet, Scale
from model.api.request import without_images
from model.denoising.sampler_specs import (
    check_forecast,
    check_guidance,
    check_refiner,
    check_spacing,
    check_steps,
    sampler_spec,
    skipped_steps,
    smallest_strength,
)
from model.errors import RequestRefused
from model.images.metadata import MAX_JPEG_BYTES, metadata_text
from model.loading.served import ServedModel, Sizes, check_clip_skip
from model.pipeline.params import GenerationParams
from model.request_fields import ANSWER, GenerationRequest, marked
from model.validation import RANDOM_SEED, SEED_COUNT, format_value

DEFAULT_STRENGTH, DEFAULT_INPAINT_STRENGTH = 0.3, 0.9999  # of diffusers' SDXL pipelines
_ABOUT_ANSWER = {*marked(ANSWER)}
_IMAGES_AND_NETWORKS = {"image", "strength", "masks", "resize", "loras", "controls", "ip_adapters"}


def find_release(names: Sequence[str], model: str | None) -> int:
    """Return the index of the release that a request names; None: the first.

    A model's name stands for its release if no other version of it is served. Raises RequestRefused, which lists the
    releases.
    """
    if model is None:
        return 0
    if model in names:
        return names.index(model)
    versions = [index for index, name in enumerate(names) if name.rpartition("/")[0] == model]
    if len(versions) == 1:
        return versions[0]
    several = f", which names {len(versions)} releases" if versions else ""
    raise RequestRefused("model", f"got {format_value(model)}{several}, expected one of {', '.join(names)}.")


def resolve(
    request: GenerationRequest, served: ServedModel, image_size: tuple[int, int] | None = None
) -> GenerationParams:
    """Fill in empty fields and check the request against what is served.

    `image_size`: width and height of the input image, the default size. The returned parameters have no image and no
    masks: see `model.api.images`.

    Raises RequestRefused for an unknown sampler, too many steps for it, a size that is not served, an adapter that is
    not offered, a refiner, a VAE encoder, a ControlNet or an IP-Adapter that the release lacks, a strength that leaves
    no step, or a field that needs another one.
    """
    width, height = image_size or (served.native_width, served.native_height)
    empty = {"negative_prompt": None, "width": width, "height": height, "seed": RANDOM_SEED}
    asked = request.model_dump(exclude_none=True, exclude=_ABOUT_ANSWER | _IMAGES_AND_NETWORKS)
    asked = {name: tuple(value) if isinstance(value, list) else value for name, value in asked.items()}
    if (end := asked.pop("end_cfg_frac", None)) is not None and asked.setdefault("guidance_end", end) != end:
        raise RequestRefused("end_cfg_frac", "is the older name of `guidance_end`. Leave one of the two out.")
    values = served.defaults.model_dump() | empty | asked
    if values["seed"] == RANDOM_SEED:
        values["seed"] = secrets.randbelow(SEED_COUNT)
    sampler = sampler_spec(values["scheduler"])
    values["scheduler"] = sampler.name
    check_spacing(sampler, request.timesteps, request.sigmas)
    if values["guidance_scale"] > 1:
        field = "guidance_end" if request.guidance_start is None else "guidance_start"
        check_guidance(values["guidance_start"], values["guidance_end"], field)
    if request.forecast is not None:
        check_forecast(sampler, request.forecast)
    values["num_inference_steps"] = _step_count(request, values["num_inference_steps"])
    check_steps(values["num_inference_steps"], sampler)
    try:
        served.sizes.check(values["width"], values["height"])
    except RequestRefused as error:
        if image_size is None or request.width or request.height:
            raise
        raise RequestRefused(
            "image",
            f"{width} x {height} pixels, the image's size, are requested, because `width` and `height` are missing. "
            f"{str(error).removeprefix(f'{error.field}: ')} Or set `width`, `height` and `resize`.",
        ) from error
    if values["use_refiner"] and not served.has_refiner:
        raise RequestRefused("use_refiner", "true is not accepted, because this release has no refiner. Set false.")
    values["loras"] = _resolve_loras(request, served, values["use_refiner"])
    if values["use_refiner"]:
        check_refiner(sampler)
    _check_image_fields(request, served, values["width"], values["height"])
    _check_controls(request, served, values["width"], values["height"])
    _check_ip_adapters(request, served, values["width"], values["height"])
    _check_conditioning(request, served)
    check_clip_skip(values["clip_skip"], served.max_clip_skip, served.release)
    if request.stream and request.preview_every and served.safety == "blank":
        raise RequestRefused(
            "preview_every",
            f"{request.preview_every} is not accepted in a stream, because this deployment replaces images that its "
            "safety checker flags, and previews are not checked. Set 0.",
        )
    steps, default = values["num_inference_steps"], DEFAULT_STRENGTH
    for number, mask in enumerate(request.masks or ()):
        default = DEFAULT_INPAINT_STRENGTH
        if mask.strength is not None:
            skipped_steps(mask.strength, steps, f"masks.{number}.strength")
    if request.image is not None:
        default = max(default, smallest_strength(steps))
        values["strength"] = default if request.strength is None else request.strength
        if not request.masks or any(mask.strength is None for mask in request.masks):
            skipped_steps(values["strength"], steps)
    params = GenerationParams(**values)
    if not request.metadata:
        return params
    # A request may not name a default that the sampler does not offer.
    metadata = _metadata(request, values | {"forecast": params.used_forecast}, served.release)
    return replace(params, metadata=metadata)


def _metadata(request: GenerationRequest, values: dict[str, Any], release: str) -> dict[str, Any]:
    """Return the metadata of a request's images; see `model.images.metadata`. Hashes the input images.

    `values`: the resolved fields. Raises RequestRefused if they do not fit into a JPEG.
    """
    found = request.model_dump(exclude_none=True, exclude_unset=True, exclude=_ABOUT_ANSWER)
    names = type(request).model_fields.keys() & values.keys() - {"loras"}
    found |= {name: values[name] for name in names if values[name] is not None}
    metadata = {"release": release, "request": without_images(found)}
    size = len(metadata_text(metadata, SEED_COUNT))
    if values["output_format"] == "jpeg" and size > MAX_JPEG_BYTES:
        raise RequestRefused(
            "metadata",
            f"the metadata has {size:,} bytes, and a JPEG holds {MAX_JPEG_BYTES:,}. Set `output_format` png or webp, "
            "or shorten the prompts.",
        )
    return metadata


def _resolve_loras(request: GenerationRequest, served: ServedModel, use_refiner: bool) -> AdapterSet:
    """Return the adapters with a scale other than 0, in the order of names.

    Raises RequestRefused for one that is not offered or named twice, for an unknown block, and with the refiner.
    """
    scales: dict[str, Scale] = {}
    for number, lora in enumerate(request.loras or ()):
        field = f"loras.{number}.name"
        if not served.may_have_adapter(lora.name):
            offered = f"one of {', '.join(served.loras)}" if served.loras else "no adapter: this deployment offers none"
            raise RequestRefused(field, f"got {format_value(lora.name)}, expected {offered}.")
        if lora.name in scales:
            raise RequestRefused(field, f"{format_value(lora.name)} is named twice. Name each adapter once.")
        try:
            scales[lora.name] = layer_scale(lora.scale, served.unet_blocks)
        except ValueError as error:
            raise RequestRefused(f"loras.{number}.scale", f"{error}.") from error
    if use_refiner and scales:
        raise RequestRefused(
            "use_refiner", "true is not accepted with `loras`, which change only the base model. Set false."
        )
    return tuple(sorted((name, scale) for name, scale in scales.items() if scale != 0))


def _step_count(request: GenerationRequest, default: int) -> int:
    """Return the steps of a request whose `default` are those of its other fields. Raises RequestRefused."""
    if request.timesteps is not None and request.sigmas is not None:
        raise RequestRefused("sigmas", "cannot be used together with `timesteps`. Leave one of the two out.")
    for name, values, more in (("timesteps", request.timesteps, 0), ("sigmas", request.sigmas, 1)):
        if values is not None:
            steps = len(values) - more
            if request.num_inference_steps not in (None, steps):
                raise RequestRefused(
                    "num_inference_steps",
                    f"{request.num_inference_steps} contradicts `{name}`, which has {len(values)} entries for {steps} "
                    f"steps. Set {steps}, or leave it out.",
                )
            return steps
    return default


def _check_conditioning(request: GenerationRequest, served: ServedModel) -> None:
    """Raise RequestRefused for conditioning that the release's networks do not take."""
    for name in ("original_size", "crop", "target_size"):
        if getattr(request, name) is not None and not served.takes_sizes:
            raise RequestRefused(
                name,
                f"is not accepted, because the UNet of release {served.release} is not conditioned on sizes, as only "
                "SDXL is. Leave it out.",
            )


def _check_image_fields(request: GenerationRequest, served: ServedModel, width: int, height: int) -> None:
    """Raise RequestRefused for a field that needs `image`, or if the release cannot encode images of this size."""
    if request.image is None:
        names = ("strength", "masks") if request.controls else ("strength", "masks", "resize")
        for name in names:
            if name in request.model_fields_set and getattr(request, name) is not None:
                raise RequestRefused(name, "needs `image`, which is missing. Send the image, or leave this field out.")
    for name in ("composite", "color_match"):
        if getattr(request, name) and not request.masks:
            raise RequestRefused(name, "true needs `masks`, which are missing. Send the masks, or set false.")
    if request.image is not None and served.image_sizes is None:
        raise RequestRefused(
            "image",
            f"release {served.release} has no VAE encoder for the sizes served here. Build the model again with this "
            "version (`preheat build`), which adds it, and publish a new release (`preheat publish`).",
        )
    if request.image is not None and served.image_sizes and not served.image_sizes.holds(width, height):
        raise RequestRefused(
            "image",
            f"release {served.release} has no VAE encoder for {width}x{height}, only for {served.image_sizes} (width x "
            "height). Request such a size, with `resize` for an image of another size. Or build the encoder for this "
            "size too (`preheat build`) and publish a new release (`preheat publish`).",
        )
    if served.requires_masks and not request.masks:
        raise RequestRefused(
            "masks",
            f"are required, because the UNet of release {served.release} was trained for inpainting only. For a wholly "
            "new image, send any image with a white mask and strength 1.",
        )


def _check_controls(request: GenerationRequest, served: ServedModel, width: int, height: int) -> None:
    """Raise RequestRefused for a ControlNet that is not served, or not at this size, or is named twice.

    The same is raised for fields that do not fit it.
    """
    names = [control.name for control in request.controls or ()]
    for number, control in enumerate(request.controls or ()):
        field = f"controls.{number}"
        _check_name(f"{field}.name", names[: number + 1], served, served.controlnets, "a ControlNet", "--controlnet")
        sizes = served.control_sizes.get(control.name, served.sizes)
        _check_size(f"{field}.name", control.name, served.release, sizes, width, height)
        if control.start >= control.end:
            raise RequestRefused(f"{field}.start", f"{control.start:g} is not less than end, {control.end:g}.")
        types = served.controlnets[control.name]
        if types and (control.mode is None or control.mode >= types):
            given = "is missing" if control.mode is None else f"{control.mode} is not accepted"
            raise RequestRefused(f"{field}.mode", f"{given}; {control.name} is a Union network: give 0 to {types - 1}.")
        if not types and control.mode is not None:
            raise RequestRefused(
                f"{field}.mode", f"{control.mode} is not accepted, because {control.name} is not a Union network."
            )


def _check_ip_adapters(request: GenerationRequest, served: ServedModel, width: int, height: int) -> None:
    """Raise RequestRefused for an IP-Adapter that is not served, or not at this size, or is named twice.

    The same is raised for more images than it takes.
    """
    names = [adapter.name for adapter in request.ip_adapters or ()]
    for number, adapter in enumerate(request.ip_adapters or ()):
        field = f"ip_adapters.{number}"
        _check_name(f"{field}.name", names[: number + 1], served, served.ip_adapters, "an IP-Adapter", "--ip-adapter")
        sizes = served.ip_adapter_sizes or served.sizes
        _check_size(f"{field}.name", adapter.name, served.release, sizes, width, height)
        most = served.ip_adapters[adapter.name].images
        if len(adapter.images) > most:
            raise RequestRefused(
                f"{field}.images",
                f"{len(adapter.images)} images are not accepted; {adapter.name} takes at most {most} in release "
                f"{served.release}. Send fewer, or build the release for more (`preheat build --ip-images`).",
            )


def _check_size(field: str, name: str, release: str, sizes: Sizes, width: int, height: int) -> None:
    """Raise RequestRefused, which states the sizes, unless what is named can be used at this size."""
    if not sizes.holds(width, height):
        raise RequestRefused(
            field,
            f"{format_value(name)} of release {release} cannot be used at {width}x{height}, only at {sizes} (width x "
            "height). Request such a size. Or build it for this size too (`preheat build`) and publish a new release "
            "(`preheat publish`).",
        )


def _check_name(
    field: str, names: Sequence[str], served: ServedModel, offered: Collection[str], kind: str, option: str
) -> None:
    """Raise RequestRefused if the last of `names` is not offered, or is one of the names before it.

    kind: the noun for what is named, with its article. option: of `preheat build`, which adds one to a release.
    """
    *earlier, name = names
    if name not in offered:
        has = ", ".join(offered) if offered else f"none: build it with them (`preheat build {option}`)"
        raise RequestRefused(field, f"{format_value(name)} is not {kind} of release {served.release}. It has {has}.")
    if name in earlier:
        raise RequestRefused(field, f"{format_value(name)} is named twice. Name each once.")
