"""Images of responses: base64 of a file -> pixels."""

import base64
import io

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]


def open_image(data: str) -> Image.Image:
    """Decode base64 of an image file, all of its pixels included."""
    image = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
    image.load()
    return image


def pixels(data: str) -> Pixels:
    """uint8 [height, width, 3] of base64 of an image file."""
    return np.asarray(open_image(data))


def file_of(levels: Pixels) -> str:
    """base64 of a PNG of uint8 [height, width, 3] or [height, width]."""
    file = io.BytesIO()
    Image.fromarray(levels).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


def largest_difference(one: Pixels, other: Pixels) -> int:
    """The largest difference of two images in one channel of one pixel, of 255."""
    return int(np.abs(one.astype(int) - other.astype(int)).max())
