"""Resize the pixels of an input image and its masks to the requested size.

`stretch` and `crop` are the resize modes "default" and "crop" of diffusers' `VaeImageProcessor`, with its Lanczos
filter. `pad` is its "fill" with a plain margin. Masks are resized in the same way; the pipeline makes them binary
afterwards.
"""

import numpy as np
import numpy.typing as npt
from PIL import Image

from model.errors import RequestRefused
from model.validation import Resize

Pixels = npt.NDArray[np.uint8]


def check_fit(image_size: tuple[int, int], size: tuple[int, int], resize: Resize, field: str = "image") -> None:
    """Raise RequestRefused if an image of another size than `size` must not be resized. Sizes: width, height."""
    if resize == "refuse" and image_size != size:
        raise RequestRefused(
            field,
            f"the image has {image_size[0]} x {image_size[1]} pixels, but {size[0]} x {size[1]} are requested. Set "
            "`resize` to stretch, crop or pad, or request the image's size.",
        )


def fit(pixels: Pixels, size: tuple[int, int], resize: Resize) -> Pixels:
    """Return `pixels`, uint8 [height, width, 3] or [height, width], in `size` (width, height).

    stretch: the aspect ratio changes. crop: the image covers the size and is cut around its centre. pad: the image
    fits inside the size, centred, and its outermost pixels are repeated. refuse: the image must have this size already.
    """
    image = Image.fromarray(pixels)
    if image.size == size:
        return pixels
    assert resize != "refuse", "check_fit refuses it"
    if resize == "stretch":
        return np.asarray(image.resize(size, Image.Resampling.LANCZOS))
    return _crop(image, *size) if resize == "crop" else _pad(image, *size)


def reference_square(pixels: Pixels, side: int) -> Pixels:
    """Return the square around the centre of `pixels`, uint8 [side, side, 3], by a bicubic filter.

    These are the pixels that transformers' `CLIPImageProcessor` normalizes, but for rounding.
    """
    return _crop(Image.fromarray(pixels), side, side, Image.Resampling.BICUBIC)


def _crop(
    image: Image.Image, width: int, height: int, resampling: Image.Resampling = Image.Resampling.LANCZOS
) -> Pixels:
    # diffusers scales the whole image and then cuts it. A narrow image would become huge, so only the part that remains
    # is computed here. The filter also reads the pixels around the box, so the result is the same but for rounding.
    wider = width / height > image.width / image.height
    scaled_width = width if wider else image.width * height // image.height
    scaled_height = image.height * width // image.width if wider else height
    left, top = scaled_width // 2 - width // 2, scaled_height // 2 - height // 2
    x, y = image.width / scaled_width, image.height / scaled_height
    box = (left * x, top * y, (left + width) * x, (top + height) * y)
    return np.asarray(image.resize((width, height), resampling, box))


def _pad(image: Image.Image, width: int, height: int) -> Pixels:
    narrower = width / height < image.width / image.height
    inner_width = width if narrower else max(1, image.width * height // image.height)
    inner_height = max(1, image.height * width // image.width) if narrower else height
    left, top = width // 2 - inner_width // 2, height // 2 - inner_height // 2
    inner = np.asarray(image.resize((inner_width, inner_height), Image.Resampling.LANCZOS))
    margins = [(top, height - inner_height - top), (left, width - inner_width - left)]
    return np.pad(inner, margins + [(0, 0)] * (inner.ndim - 2), mode="edge")
