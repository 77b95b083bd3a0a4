"""Draw the pictures of docs/image-to-image.md from a release of the tiny model.

    python -m engine_builder.docs_pages.image_pictures STORE RELEASE

Each image is the server's answer to the request that the page shows.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from engine_builder.benchmarks.bench import load_in_process, release_parser
from model.api.request import GenerationRequest
from model.api.resolve import resolve
from model.images.encode import Pixels
from model.loading.load import Loaded
from model.pipeline.params import Mask
from model.pipeline.text_to_image import generate

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
STRENGTHS = (0.1, 0.2, 0.3, 0.5, 0.9)
_SIDE, _GAP = 256, 8  # pixels
_CIRCLE = "a large red circle on a blue background"
_SQUARE = "a large yellow square on a green background"
_STAR = "a small white star at the top on a purple background"
# Prompt of a mask, and its rectangle: left, top, right, bottom.
_MASKS = (
    ("a small orange circle on the left on a purple background", (0, 96, 128, 256)),
    ("a small green triangle on the right on a purple background", (128, 96, 256, 256)),
)


def draw_strengths(loaded: Loaded) -> list[Pixels]:
    """Return an image, and image to image from it with each of STRENGTHS."""
    image = _generate(loaded, _CIRCLE, seed=3)
    return [image, *(_generate(loaded, _SQUARE, 3, image=image, strength=strength) for strength in STRENGTHS)]


def draw_masks(loaded: Loaded) -> list[Pixels]:
    """Return an image, a mask, the result of repainting it, a second mask, and the result of both."""
    image = _generate(loaded, _STAR, seed=5)
    masks = [Mask(_rectangle(*box), prompt, None, strength=0.9999) for prompt, box in _MASKS]
    first, both = (_generate(loaded, _STAR, 1, image=image, masks=tuple(masks[:count])) for count in (1, 2))
    shown = [np.repeat(mask.levels[..., None], 3, axis=2) for mask in masks]
    return [image, shown[0], first, shown[1], both]


def _generate(loaded: Loaded, prompt: str, seed: int, **inputs: object) -> Pixels:
    request = GenerationRequest(prompt=prompt, seed=seed, width=_SIDE, height=_SIDE)
    params = replace(resolve(request, loaded.served), **inputs)  # type: ignore[arg-type]
    return generate(loaded.model, [params])[0][0]


def _rectangle(left: int, top: int, right: int, bottom: int) -> Pixels:
    levels = np.zeros((_SIDE, _SIDE), np.uint8)
    levels[top:bottom, left:right] = 255
    return levels


def write_row(images: Sequence[Pixels], path: Path) -> None:
    """Write images of one size next to each other as a PNG, with white gaps."""
    height, width = images[0].shape[:2]
    row = Image.new("RGB", (len(images) * (width + _GAP) - _GAP, height), "white")
    for number, image in enumerate(images):
        row.paste(Image.fromarray(image), (number * (width + _GAP), 0))
    row.save(path, optimize=True)


def main() -> None:
    arguments = release_parser(__doc__).parse_args()
    loaded = load_in_process(arguments.store, arguments.release)
    write_row(draw_strengths(loaded), FOLDER / "image-to-image.png")
    write_row(draw_masks(loaded), FOLDER / "inpainting.png")


if __name__ == "__main__":
    main()
