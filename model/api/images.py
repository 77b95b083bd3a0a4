"""Resolve a request whose images are still text: check all headers, then the request, and only then decode pixels.

The functions take milliseconds to a second. Call them from a worker thread.
"""

from dataclasses import replace

import numpy as np

from model.api.request import GenerationRequest, MaskRequest, resolve
from model.images.fit import check_fit, fit
from model.images.inputs import InputImage, decode_mask, decode_rgb, read_image, read_mask
from model.images.postprocess import feather
from model.loading.served import ServedModel
from model.pipeline.params import GenerationParams, Mask


def resolve_with_images(request: GenerationRequest, served: ServedModel) -> GenerationParams:
    """Return the parameters of a request with an `image`, with decoded pixels.

    Raises RequestRefused as `resolve` does, and for an image or a mask that cannot be used.
    """
    assert request.image is not None
    image = read_image(request.image, "image")
    masks = [
        (mask, read_mask(mask.image, f"masks.{number}.image", image)) for number, mask in enumerate(request.masks or ())
    ]
    params = resolve(request, served, (image.width, image.height))
    size = (params.width, params.height)
    check_fit((image.width, image.height), size, request.resize)
    # A copy: PyTorch needs writable memory.
    pixels = np.array(fit(decode_rgb(image), size, request.resize))
    return replace(params, image=pixels, masks=tuple(_mask(request, params, *pair) for pair in masks))


def _mask(request: GenerationRequest, params: GenerationParams, mask: MaskRequest, file: InputImage) -> Mask:
    """Return a mask with its own settings, or the request's where it has none."""
    levels = fit(decode_mask(file), (params.width, params.height), request.resize)
    binary = np.where(levels >= 128, np.uint8(255), np.uint8(0))
    return Mask(
        np.array(feather(binary, mask.feather)),
        prompt=params.prompt if mask.prompt is None else mask.prompt,
        negative_prompt=params.negative_prompt if mask.negative_prompt is None else mask.negative_prompt,
        strength=params.strength if mask.strength is None else mask.strength,
    )
