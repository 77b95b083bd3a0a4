"""The public response, and requests without their images. The fields of a request are in `model.request_fields`."""

import base64
import hashlib
from typing import Any, Literal, NotRequired, TypedDict

from model.images.metadata import DIGEST
from model.validation import ImageFormat


def without_images(value: Any, key: str = "") -> Any:
    """Return `value` with the SHA-256 of each file in place of its base64, in all fields `image` and `images`."""
    if isinstance(value, dict):
        return {name: without_images(entry, name) for name, entry in value.items()}
    if isinstance(value, list):
        return [without_images(entry, key) for entry in value]
    if key in ("image", "images"):
        return f"{DIGEST}{hashlib.sha256(base64.b64decode(value.rpartition(',')[2])).hexdigest()}"
    return value


class ImageResult(TypedDict):
    """One image of a response."""

    data: str  # base64 of the file
    seed: int  # a request with this seed and num_images 1 returns this image again
    format: ImageFormat  # png, jpeg or webp
    width: int  # pixels
    height: int  # pixels
    flagged: NotRequired[bool]  # true if the safety checker flagged it; missing without a safety checker


class EngineInfo(TypedDict):
    """The release and engines that made the images."""

    release: str  # model/version
    target: str  # target key, for example cuda-h200-sm90-torch2.13-cu130
    runtime: str  # aot_inductor, tensorrt, tensorrt-rtx or eager


class GenerationResponse(TypedDict):
    """The body of a response with status 200. `data` repeats the first image for callers of the older SDXL Truss."""

    status: Literal["success"]  # always "success"
    data: str  # base64 of the first image's file
    time: float  # seconds from the request's arrival in the model
    images: list[ImageResult]  # in the order of their seeds
    timings: dict[str, float]  # milliseconds by stage, summed over masks
    warnings: list[str]  # what was not followed: a truncated prompt, an ignored negative prompt, an unused mask
    engine: EngineInfo  # the release and engines that made the images
