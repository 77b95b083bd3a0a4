"""Post-process a decoded image as its request asks, before it is encoded."""

from model.images.postprocess import Pixels, color_match, composite, union, upscale
from model.pipeline.params import GenerationParams


def finish(pixels: Pixels, params: GenerationParams) -> Pixels:
    """Return uint8 [upscale * height, upscale * width, 3]: colours matched, then blended with the input, then enlarged.

    `pixels`: uint8 [height, width, 3]. The first two use the union of all masks, and need them.
    """
    if params.masks and (params.color_match or params.composite):
        assert params.image is not None
        mask = union([mask.levels for mask in params.masks])
        if params.color_match:
            pixels = color_match(pixels, params.image, mask)
        if params.composite:
            pixels = composite(pixels, params.image, mask)
    return upscale(pixels, params.upscale)
