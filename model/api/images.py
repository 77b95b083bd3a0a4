"""Resolve a request whose images are still text: check all headers, then the request, and only then decode pixels.

    undecoded = read_images(request, served)
    params = undecoded.params_with([part.decode() for part in undecoded.parts])

Reading and each part take milliseconds to a second. Call them from a worker thread. A part knows its price before it is
decoded, so that a queue can order the parts of all requests.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from model.api.resolve import resolve
from model.errors import Cancelled, RequestRefused
from model.images.fit import check_fit, fit, reference_square
from model.images.inputs import MAX_REQUEST_PIXELS, InputImage, decode_mask, decode_rgb, read_image, read_mask
from model.images.pixels import Pixels
from model.images.postprocess import feather
from model.loading.served import ServedModel
from model.pipeline.params import REPAINTED_LEVEL, Control, GenerationParams, ImagePrompt, Mask
from model.request_fields import ControlRequest, GenerationRequest, MaskRequest

CANNY_PRICE = 16  # of a pixel of the result, relative to decoding one


@dataclass(frozen=True)
class Part:
    """An image of a request that is not decoded yet. `price`: what `decode` costs, in pixels of a simple file.

    `decode` raises RequestRefused for damaged data.
    """

    price: int
    decode: "Callable[[], Pixels | Mask | Control | ImagePrompt]"


@dataclass(frozen=True)
class UndecodedRequest:
    """A request whose headers are checked. `params`: those without images."""

    params: GenerationParams
    parts: list[Part]

    def params_with(self, decoded: "Sequence[Pixels | Mask | Control | ImagePrompt]") -> GenerationParams:
        """Return the parameters with the results of all parts, in their order."""
        squares: dict[str, list[ImagePrompt]] = {}
        for part in decoded:
            if isinstance(part, ImagePrompt):
                squares.setdefault(part.name, []).append(part)
        return replace(
            self.params,
            image=next((part for part in decoded if isinstance(part, np.ndarray)), None),
            masks=tuple(part for part in decoded if isinstance(part, Mask)),
            controls=tuple(part for part in decoded if isinstance(part, Control)),
            image_prompts=tuple(
                replace(first, levels=np.concatenate([first.levels, *(other.levels for other in others)]))
                for first, *others in squares.values()
            ),
        )


def resolve_with_images(
    request: GenerationRequest, served: ServedModel, abandoned: Callable[[], bool] = lambda: False
) -> GenerationParams:
    """Return the parameters of a request with images, with decoded pixels.

    `abandoned` is asked before each image is decoded. Raises Cancelled once it returns true. Raises RequestRefused as
    `read_images` does, and for an image or a mask that cannot be decoded.
    """
    check_wanted(abandoned)
    undecoded = read_images(request, served)
    decoded = []
    for part in undecoded.parts:
        check_wanted(abandoned)
        decoded.append(part.decode())
    return undecoded.params_with(decoded)


def check_wanted(abandoned: Callable[[], bool]) -> None:
    """Raise Cancelled for a request whose answer nobody reads any more."""
    if abandoned():
        raise Cancelled("The request was answered before its images were decoded.")


def reading_price(request: GenerationRequest) -> int:
    """Return what `read_images` costs, in pixels: the characters of all images."""
    return sum(map(len, _texts(request)))


def _texts(request: GenerationRequest) -> Iterator[str]:
    yield request.image or ""
    yield from (part.image for part in (*(request.masks or ()), *(request.controls or ())))
    yield from (image for adapter in request.ip_adapters or () for image in adapter.images)


def read_images(request: GenerationRequest, served: ServedModel) -> UndecodedRequest:
    """Check the headers of all images, and the request. No pixel is decoded.

    Raises RequestRefused as `resolve` does, for a file that cannot be used, and for more than 320 megapixels in all.
    """
    pixels = 0

    def counted(file: InputImage) -> InputImage:
        nonlocal pixels
        pixels += file.width * file.height
        if pixels > MAX_REQUEST_PIXELS:
            raise RequestRefused(
                file.field,
                f"with this one, the images of the request have {pixels / 10**6:.1f} megapixels. At most "
                f"{MAX_REQUEST_PIXELS // 10**6} are accepted for one request: send smaller or fewer images.",
            )
        return file

    image = None if request.image is None else counted(read_image(request.image, "image"))
    masks = [
        (mask, counted(read_mask(mask.image, f"masks.{number}.image", image)))
        for number, mask in enumerate(request.masks or ())
        if image is not None
    ]
    controls = [
        (control, counted(read_image(control.image, f"controls.{number}.image")))
        for number, control in enumerate(request.controls or ())
    ]
    references = [
        (adapter, counted(read_image(data, f"ip_adapters.{number}.images.{index}")))
        for number, adapter in enumerate(request.ip_adapters or ())
        for index, data in enumerate(adapter.images)
    ]
    params = resolve(request, served, None if image is None else (image.width, image.height))
    size = (params.width, params.height)
    for file in [*([] if image is None else [image]), *(file for _, file in controls)]:
        check_fit((file.width, file.height), size, request.resize, file.field)
    result_price = params.width * params.height
    parts = [
        Part(
            max(file.price, result_price * (CANNY_PRICE if control.preprocess == "canny" else 1)),
            partial(_control, request, params, control, file),
        )
        for control, file in controls
    ]
    for adapter, file in references:
        if adapter.scale:
            side = served.ip_adapters[adapter.name].side
            parts.append(Part(max(file.price, side**2), partial(_reference, adapter.name, adapter.scale, file, side)))
    if image is not None:
        parts.append(Part(max(image.price, result_price), partial(_image, request, params, image)))
    for mask, file in masks:
        parts.append(Part(max(file.price, result_price), partial(_mask, request, params, mask, file)))
    return UndecodedRequest(params, parts)


def _image(request: GenerationRequest, params: GenerationParams, file: InputImage) -> Pixels:
    return decode_rgb(file, partial(fit, size=(params.width, params.height), resize=request.resize))


def _control(
    request: GenerationRequest, params: GenerationParams, control: ControlRequest, file: InputImage
) -> Control:
    """Return the use of a ControlNet with its control image, in the size of the result."""
    pixels = _image(request, params, file)
    if control.preprocess == "canny":
        from model.images.canny import canny

        pixels = canny(pixels)
    return Control(control.name, pixels, control.scale, control.start, control.end, control.mode)


def _reference(name: str, scale: float, file: InputImage, side: int) -> ImagePrompt:
    """Return the use of an IP-Adapter with one of its images, as a square of `side` pixels."""
    return ImagePrompt(name, decode_rgb(file, partial(reference_square, side=side))[None], scale)


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
        np.array(blurred),  # a copy: PyTorch needs writable memory, and warns without it
        prompt=params.prompt if mask.prompt is None else mask.prompt,
        negative_prompt=params.negative_prompt if mask.negative_prompt is None else mask.negative_prompt,
        strength=params.strength if mask.strength is None else mask.strength,
    )
