"""Draw the pictures of the pages about input images from a release of the tiny model.

    preheat build data/tiny-sdxl --controlnet edges=data/tiny-sdxl-controlnet \\
        --ip-adapter colour=data/tiny-sdxl-ip-adapter/colour.safetensors
    python -m preheat.docs_pages.image_pictures STORE RELEASE

Each image is the server's answer to the request that a page shows. Pictures of ControlNets and IP-Adapters are drawn if
the release has those of the build above.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from benchmarks.measure import load_in_process, release_parser
from model.api.resolve import resolve
from model.images.canny import canny
from model.images.fit import reference_square
from model.images.pixels import Pixels
from model.loading.load import Loaded
from model.pipeline.params import Control, ImagePrompt, Mask
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest

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
# Prompts, and the boxes of the circles in their control images.
_CONTROLLED = (
    ("a red circle on a white background", (24, 24, 104, 104)),
    ("a yellow circle on a blue background", (120, 100, 240, 220)),
    ("a white circle on a green background", (96, 140, 176, 220)),
)
_REFERENCES = ("a large red circle on a blue background", "a large green star on a white background")
_RECOLOURED = "a square on a purple background"


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


def draw_controls(loaded: Loaded) -> list[Pixels]:
    """Return pairs of a control image, the edges of a circle, and the image that follows it."""
    images = []
    for number, (prompt, box) in enumerate(_CONTROLLED):
        picture = Image.new("RGB", (_SIDE, _SIDE), "black")
        ImageDraw.Draw(picture).ellipse(box, fill="white")
        edges = canny(np.asarray(picture))
        control = Control("edges", edges, scale=1.0, start=0.0, end=1.0, mode=None)
        images += [edges, _generate(loaded, prompt, number, controls=(control,))]
    return images


def draw_references(loaded: Loaded) -> list[Pixels]:
    """Return pairs of a reference image and the image that has its figure's colour."""
    side = loaded.served.ip_adapters["colour"].side
    images = []
    for seed, prompt in enumerate(_REFERENCES, start=3):
        reference = _generate(loaded, prompt, seed)
        levels = np.stack([reference_square(Image.fromarray(reference), side)])
        image_prompt = ImagePrompt("colour", levels, scale=1.0)
        images += [reference, _generate(loaded, _RECOLOURED, seed, image_prompts=(image_prompt,))]
    return images


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
    if "edges" in loaded.served.controlnets:
        write_row(draw_controls(loaded), FOLDER / "controlnet.png")
    if "colour" in loaded.served.ip_adapters:
        write_row(draw_references(loaded), FOLDER / "ip-adapter.png")


if __name__ == "__main__":
    main()
