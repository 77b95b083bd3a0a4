"""Decoded images -> 8-bit pixels -> PNG, JPEG or WebP -> base64.

The pixels are those of diffusers' `VaeImageProcessor`. An image with NaN or infinite values is an error, never black.
"""

import base64
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from PIL import Image

from model.errors import BrokenImage
from model.images.jpeg_strips import encode_in_strips
from model.images.metadata import add_to_jpeg, exif, png_text
from model.images.pixels import Pixels
from model.validation import ImageFormat


def to_levels(decoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert the VAE decoder's output to pixels, and check each image for NaN and infinity, which clamping would hide.

    `decoded`: float [images, 3, height, width], nominally in [-1, 1], on any device; values outside are clamped.
    Returns uint8 [images, height, width, 3] (RGB) and bool [images], true for finite images. Both stay on the device,
    and the host does not wait for them. Values are scaled in the dtype of `decoded` and rounded half to even, as in
    diffusers' `VaeImageProcessor.postprocess`, so pixels are identical.
    """
    # NaN survives minimum and maximum, so two numbers for each image suffice; isfinite of every value is far slower.
    flat = decoded.flatten(1)
    finite = flat.amin(dim=1).isfinite() & flat.amax(dim=1).isfinite()
    levels = decoded.mul(0.5).add_(0.5).clamp_(0, 1).float().mul_(255).round_()
    # Converted to bytes on the device: a quarter of the traffic to the host.
    return levels.to(torch.uint8).permute(0, 2, 3, 1).contiguous(), finite


def broken_image(indices: Sequence[int], images: int, place: str = "", remedy: str | None = None) -> BrokenImage:
    """Return the error for images with NaN or infinity: the `indices` of them among the `images` of a request.

    `place`: where they began, "" if it is not known. `remedy`: None for the one of a VAE.
    """
    numbers, began = ", ".join(map(str, indices)), f", which began {place}" if place else ""
    return BrokenImage(f"image {numbers} of {images} (counted from 0) has NaN or infinite values{began}.", remedy)


def encode(pixels: Pixels, format: ImageFormat, quality: int, text: str = "") -> bytes:
    """Encode one image, uint8 [height, width, 3], as the bytes of a file.

    `quality`: 1 to 100 for jpeg and webp (100 is still lossy); png is lossless and ignores it. jpeg is baseline with
    4:2:0 chroma subsampling, Pillow's default; png keeps full colour. `text`: see `model.images.metadata`; "": none.
    """
    if format == "jpeg":
        file = encode_in_strips(pixels, partial(_encode, format=format, quality=quality))
        return add_to_jpeg(file, text) if text else file
    return _encode(pixels, format, quality, text)


def _encode(pixels: Pixels, format: ImageFormat, quality: int, text: str = "") -> bytes:
    # A file in memory, and not io.BytesIO: Pillow releases the interpreter lock while it writes to a file descriptor.
    # Otherwise it holds the lock for a whole JPEG.
    with open(os.memfd_create("image"), "w+b", buffering=0) as file:
        # A new Image each time: two threads that save one Image mix up their options.
        Image.fromarray(pixels).save(file, format=format.upper(), **_options(format, quality, text))
        file.seek(0)
        return file.read()


def encode_base64(pixels: Pixels, format: ImageFormat, quality: int, text: str = "") -> str:
    """Encode one image like `encode`, as standard base64 text without line breaks or a `data:` prefix."""
    return base64.b64encode(encode(pixels, format, quality, text)).decode("ascii")


def _options(format: ImageFormat, quality: int, text: str) -> dict[str, Any]:
    """Return Pillow's options, chosen for speed: a few per cent of the bytes are not worth a longer wait."""
    if format == "png":
        # Level 6 takes 3.5 times as long as level 1 and saves 5 % on a photo-like image.
        return {"compress_level": 1} | ({"pnginfo": png_text(text)} if text else {})
    if format == "jpeg":
        # "optimize" makes a second pass: 3 times the time for 4 % of the bytes.
        return {"quality": quality, "subsampling": "4:2:0"}
    # Method 4, Pillow's default, takes 3 times as long as method 0 for files of the same size.
    return {"quality": quality, "method": 0} | ({"exif": exif(text)} if text else {})
