"""Decoded pictures -> 8-bit pixels -> PNG, JPEG or WebP -> base64.

Promises the same pixels as diffusers' `VaeImageProcessor`, and that a picture holding NaN or infinity is an
error and never a black picture. Knows nothing of seeds, releases or engines.
"""

import base64
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from model.api.request import ImageFormat
from model.errors import BrokenImage
from model.images.jpeg_strips import encode_in_strips

Pixels = npt.NDArray[np.uint8]  # [height, width, 3]


def to_levels(decoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The VAE decoder's output as pixels, and whether each image is all numbers, bool [images]: clamping would hide
    what is not. Both still on the device, and not waited for.

    `decoded` is float [images, 3, height, width], nominally in [-1, 1], on any device; what lies outside is
    clamped. Returns uint8 [images, height, width, 3], red first. Scales in `decoded`'s own dtype and rounds
    half to even, as diffusers' `VaeImageProcessor.postprocess` does: the same pixels to the last bit.
    """
    # NaN outlives minimum and maximum: two numbers an image tell, far cheaper than isfinite of every value.
    flat = decoded.flatten(1)
    finite = flat.amin(dim=1).isfinite() & flat.amax(dim=1).isfinite()
    levels = decoded.mul(0.5).add_(0.5).clamp_(0, 1).float().mul_(255).round_()
    # Made bytes on the device and permuted there: a quarter of the floats' traffic to the host.
    return levels.to(torch.uint8).permute(0, 2, 3, 1).contiguous(), finite


def broken_image(indices: Sequence[int], images: int) -> BrokenImage:
    """The error for images that are not all numbers, `indices` of the `images` of a request."""
    return BrokenImage(
        f"image {', '.join(map(str, indices))} of {images} (counted from 0) has NaN or infinite values. "
        "Most often a VAE overflowed in fp16: build the model with its VAE in bf16 or fp32 "
        "(`preheat build --vae-precision bf16`), or with a VAE made for fp16."
    )


def encode(pixels: Pixels, format: ImageFormat, quality: int) -> bytes:
    """One picture, uint8 [height, width, 3], as the bytes of a file.

    `quality` is 1 to 100 for jpeg and webp (100 is still lossy); png is lossless and ignores it.
    jpeg is baseline, with colour at half resolution (4:2:0, as Pillow does unless told); png keeps all of it.
    """
    if format == "jpeg":
        return encode_in_strips(pixels, partial(_encode, format=format, quality=quality))
    return _encode(pixels, format, quality)


def _encode(pixels: Pixels, format: ImageFormat, quality: int) -> bytes:
    # A file of the system's that lies in memory, not io.BytesIO: Pillow gives other threads the interpreter while it
    # writes to a file descriptor, and keeps it for all of a JPEG otherwise.
    with open(os.memfd_create("picture"), "w+b", buffering=0) as file:
        # A fresh Image each time: saving one Image from two threads mixes up their options.
        Image.fromarray(pixels).save(file, format=format.upper(), **_options(format, quality))
        file.seek(0)
        return file.read()


def encode_base64(pixels: Pixels, format: ImageFormat, quality: int) -> str:
    """`encode`, as standard base64 text without line breaks or a `data:` prefix."""
    return base64.b64encode(encode(pixels, format, quality)).decode("ascii")


def _options(format: ImageFormat, quality: int) -> dict[str, Any]:
    """Pillow's options, for speed: a few per cent of the bytes are not worth a longer wait."""
    if format == "png":
        # Level 6 takes 3.5 times level 1 and saves 5 % on a photo-like picture.
        return {"compress_level": 1}
    if format == "jpeg":
        # "optimize" makes a second pass: 3 times the time for 4 % of the bytes.
        return {"quality": quality, "subsampling": "4:2:0"}
    # Method 4, Pillow's own, takes 3 times method 0 for files no smaller.
    return {"quality": quality, "method": 0}
