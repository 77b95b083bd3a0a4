"""Resize the pixels of an input image and its masks to the requested size.

`stretch` and `crop` are the resize modes "default" and "crop" of diffusers' `VaeImageProcessor`, with its Lanczos
filter. `pad` is its "fill" with a plain margin. Masks are resized in the same way; the pipeline makes them binary
afterwards.
"""

from math import ceil, floor

import numpy as np
from PIL import Image

from model.errors import RequestRefused
from model.images.inputs import MAX_INPUT_PIXELS
from model.images.pixels import Pixels
from model.validation import Resize

Size = tuple[int, int]  # width, height
_LANCZOS_REACH = 3  # source pixels on each side, of an image that is enlarged; the bicubic filter's is 2


def check_fit(image_size: Size, size: Size, resize: Resize, field: str = "image") -> None:
    """Raise RequestRefused if an image of another size than `size` must not be resized."""
    if resize == "refuse" and image_size != size:
        raise RequestRefused(
            field,
            f"the image has {image_size[0]} x {image_size[1]} pixels, but {size[0]} x {size[1]} are requested. Set "
            "`resize` to stretch, crop or pad, or request the image's size.",
        )


def fit(image: Image.Image, size: Size, resize: Resize) -> Pixels:
    """Return an image of mode RGB or L in `size` (width, height): uint8 [height, width, 3] or [height, width].

    stretch: the aspect ratio changes. crop: the image covers the size and is cut around its centre. pad: the image
    fits inside the size, centred, and its outermost pixels are repeated. refuse: the image must have this size already.
    """
    if image.size == size:
        return np.asarray(image)
    assert resize != "refuse", "check_fit refuses it"
    if resize == "stretch":
        return np.asarray(image.resize(size, Image.Resampling.LANCZOS))
    return _crop(image, *size) if resize == "crop" else _pad(image, *size)


def reference_square(image: Image.Image, side: int) -> Pixels:
    """Return the square around the centre of an image, uint8 [side, side, 3], by a bicubic filter. Of mode L without 3.

    These are the pixels that transformers' `CLIPImageProcessorPil` normalizes. diffusers uses `CLIPImageProcessor`,
    which is the same class unless torchvision is installed. torchvision's horizontal pass is always the first, and it
    rounds weights to 16 bits, so its pixels differ: by up to 12 levels in portrait noise, otherwise by one or two.
    """
    shorter = min(image.size)
    scaled = side * image.width // shorter, side * image.height // shorter
    corner = (scaled[0] - side) // 2, (scaled[1] - side) // 2
    return _scale_and_cut(image, scaled, corner, (side, side), Image.Resampling.BICUBIC)


def _crop(image: Image.Image, width: int, height: int) -> Pixels:
    wider = width / height > image.width / image.height
    scaled_width = width if wider else image.width * height // image.height
    scaled_height = image.height * width // image.width if wider else height
    corner = scaled_width // 2 - width // 2, scaled_height // 2 - height // 2
    return _scale_and_cut(image, (scaled_width, scaled_height), corner, (width, height), Image.Resampling.LANCZOS)


def _scale_and_cut(image: Image.Image, scaled: Size, corner: Size, size: Size, resampling: Image.Resampling) -> Pixels:
    """Return the part of `size` at `corner` (left, top) of the image in the size `scaled`."""
    (left, top), (width, height) = corner, size
    if scaled[0] * scaled[1] <= MAX_INPUT_PIXELS:
        return np.asarray(image.resize(scaled, resampling).crop((left, top, left + width, top + height)))
    # The whole of a narrow image would become huge, so only the part that remains is computed, from the rows that the
    # vertical pass reads. The horizontal pass is the first, as in Pillow for an image that is enlarged; this one is,
    # because it becomes larger than any input. Pillow keeps a box in float32. So each pass may differ by one level, and
    # the result by two.
    x, y = image.width / scaled[0], image.height / scaled[1]
    reach = ceil(_LANCZOS_REACH * max(1.0, y)) + 1
    first, last = max(0, floor(top * y) - reach), min(image.height, ceil((top + height) * y) + reach)
    columns = image.resize((width, last - first), resampling, (left * x, first, (left + width) * x, last))
    return np.asarray(columns.resize(size, resampling, (0, top * y - first, width, (top + height) * y - first)))


def _pad(image: Image.Image, width: int, height: int) -> Pixels:
    narrower = width / height < image.width / image.height
    inner_width = width if narrower else max(1, image.width * height // image.height)
    inner_height = max(1, image.height * width // image.width) if narrower else height
    left, top = width // 2 - inner_width // 2, height // 2 - inner_height // 2
    inner = np.asarray(image.resize((inner_width, inner_height), Image.Resampling.LANCZOS))
    margins = [(top, height - inner_height - top), (left, width - inner_width - left)]
    return np.pad(inner, margins + [(0, 0)] * (inner.ndim - 2), mode="edge")
