"""Resolve a request whose images are still text: check all headers, then the request, and only then decode pixels.

The functions take milliseconds to a second. Call them from a worker thread.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from model.api.request import ControlRequest, GenerationRequest, IpAdapterRequest, MaskRequest
from model.api.resolve import resolve
from model.errors import Cancelled, RequestRefused
from model.images.fit import check_fit, fit, reference_square
from model.images.inputs import InputImage, decode_mask, decode_rgb, read_image, read_mask
from model.images.postprocess import feather
from model.loading.served import ServedModel
from model.pipeline.params import REPAINTED_LEVEL, Control, GenerationParams, ImagePrompt, Mask


def resolve_with_images(
    request: GenerationRequest, served: ServedModel, abandoned: Callable[[], bool] = lambda: False
) -> GenerationParams:
    """Return the parameters of a request with images, with decoded pixels.

    `abandoned` is asked before each image is decoded. Raises Cancelled once it returns true. Raises RequestRefused as
    `resolve` does, and for an image or a mask that cannot be used.
    """
    _check_wanted(abandoned)
    image = None if request.image is None else read_image(request.image, "image")
    masks = [
        (mask, read_mask(mask.image, f"masks.{number}.image", image))
        for number, mask in enumerate(request.masks or ())
        if image is not None
    ]
    controls = [
        (control, read_image(control.image, f"controls.{number}.image"))
        for number, control in enumerate(request.controls or ())
    ]
    references = [
        (
            adapter,
            [read_image(data, f"ip_adapters.{number}.images.{index}") for index, data in enumerate(adapter.images)],
        )
        for number, adapter in enumerate(request.ip_adapters or ())
    ]
    params = resolve(request, served, None if image is None else (image.width, image.height))
    size = (params.width, params.height)
    for file in [*([] if image is None else [image]), *(file for _, file in controls)]:
        check_fit((file.width, file.height), size, request.resize, file.field)
    resolved_controls = []
    for control, file in controls:
        _check_wanted(abandoned)
        resolved_controls.append(_control(request, params, control, file))
    image_prompts = [
        _image_prompt(adapter, files, served.ip_adapters[adapter.name].side, abandoned)
        for adapter, files in references
        if adapter.scale
    ]
    params = replace(params, controls=tuple(resolved_controls), image_prompts=tuple(image_prompts))
    if image is None:
        return params
    _check_wanted(abandoned)
    # A copy, as of the masks: PyTorch needs writable memory, and warns without it.
    pixels = np.array(fit(decode_rgb(image), size, request.resize))
    resolved_masks = []
    for mask, file in masks:
        _check_wanted(abandoned)
        resolved_masks.append(_mask(request, params, mask, file))
    return replace(params, image=pixels, masks=tuple(resolved_masks))


def _check_wanted(abandoned: Callable[[], bool]) -> None:
    if abandoned():
        raise Cancelled("The request was answered before its images were decoded.")


def _control(
    request: GenerationRequest, params: GenerationParams, control: ControlRequest, file: InputImage
) -> Control:
    """Return the use of a ControlNet with its control image, in the size of the result."""
    pixels = fit(decode_rgb(file), (params.width, params.height), request.resize)
    if control.preprocess == "canny":
        from model.images.canny import canny

        pixels = canny(pixels)
    return Control(control.name, np.array(pixels), control.scale, control.start, control.end, control.mode)


def _image_prompt(
    adapter: IpAdapterRequest, files: list[InputImage], side: int, abandoned: Callable[[], bool]
) -> ImagePrompt:
    """Return the use of an IP-Adapter, with its images as squares of `side` pixels."""
    squares = []
    for file in files:
        _check_wanted(abandoned)
        squares.append(reference_square(decode_rgb(file), side))
    return ImagePrompt(adapter.name, np.stack(squares), adapter.scale)


def _mask(request: GenerationRequest, params: GenerationParams, mask: MaskRequest, file: InputImage) -> Mask:
    """Return a mask with its own settings, or the request's where it has none."""
    levels = fit(decode_mask(file), (params.width, params.height), request.resize)
    binary = np.where(levels >= REPAINTED_LEVEL, np.uint8(255), np.uint8(0))
    blurred = feather(binary, mask.feather)
    if binary.any() and blurred.max() < REPAINTED_LEVEL:
        raise RequestRefused(
            f"{file.field.removesuffix('.image')}.feather",
            f"a blur of {mask.feather:g} pixels leaves no level of at least {REPAINTED_LEVEL} in the mask, so nothing "
            "would be repainted. Set a smaller value, or send a mask with a larger white part.",
        )
    return Mask(
        np.array(blurred),
        prompt=params.prompt if mask.prompt is None else mask.prompt,
        negative_prompt=params.negative_prompt if mask.negative_prompt is None else mask.negative_prompt,
        strength=params.strength if mask.strength is None else mask.strength,
    )
