"""What a replica runs before it says that it is ready, so that no request pays for lazy loading or finds memory full.

Every loop that requests can ask for is made, and with it the graphs of all of its buckets, and a picture is drawn and
decoded at every size, and text is read in every way: the most device memory that serving takes has then been taken
once. On the way each size's loop is asked how many rows it runs efficiently.
"""

import math
import time
from dataclasses import replace

import torch

from model.api.request import (
    GenerationRequest,
    GenerationSettings,
    SizeList,
    resolve,
)
from model.denoising.loop import (
    Loop,
    Row,
)
from model.engines import components
from model.engines.engine import EngineSet
from model.errors import NoEngineForTarget
from model.loading.load import Loaded
from model.pipeline.preview import (
    PreviewMap,
    fit_preview_map,
)
from model.pipeline.text_to_image import (
    LoadedModel,
    base_rows,
    generate,
    is_guided,
    refiner_text,
    request_tables,
)
from model.scheduling.admission import efficient_images

_FASTER = 0.98  # of the fastest step so far: less of a difference is chance
_STEPS = 2  # of the picture: one of the base and one of the refiner, where there is one


def warm_up(loaded: Loaded) -> PreviewMap:
    """Warm every size listed, or the native one. Returns the map for previews, which the decoder gives on the way.

    Raises NoEngineForTarget where the GPU's memory does not hold what the config asks for.
    """
    served = loaded.served
    native = (served.native_width, served.native_height)
    refusals = _refusals(loaded.model)
    listed = served.sizes.sizes if isinstance(served.sizes, SizeList) else None
    try:
        for width, height in listed or (native,):
            request = GenerationRequest(
                prompt="warm up",
                width=width,
                height=height,
                num_inference_steps=_STEPS,
                seed=0,
                use_refiner=served.has_refiner,
                denoising_frac=0.5,
            )
            settings = resolve(request, served)
            generate(loaded.model, [settings])
            _find_efficient(loaded.model, replace(settings, use_refiner=False))
        if listed is None:
            loop = loaded.model.loop(components.UNET, served.native_height, served.native_width)
            loaded.model.efficient_pixels = loop.efficient * served.native_height * served.native_width
        _read_every_text(loaded, settings)
        return fit_preview_map(loaded.model, served.native_height, served.native_width)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or _refusals(loaded.model) > refusals:
            raise NoEngineForTarget(_no_room(loaded)) from error
        raise


def _read_every_text(loaded: Loaded, settings: GenerationSettings) -> None:
    """With a negative prompt, and without guidance: between them these take all rows of the networks that read text."""
    for negative_prompt, guidance_scale in (("warm up", 2.0), (None, 1.0)):
        asked = replace(settings, negative_prompt=negative_prompt, guidance_scale=guidance_scale)
        base, rest = request_tables(loaded.model, asked)
        base_rows(loaded.model, asked, base)
        if rest:
            refiner_text(loaded.model, asked, rest)


def _refusals(model: LoadedModel) -> int:
    """How often PyTorch has had no memory to give. An engine's own code does not say so: what it raises is any
    RuntimeError."""
    return int(torch.cuda.memory_stats(model.device).get("num_ooms", 0)) if model.device.type == "cuda" else 0


def efficient_by_size(model: LoadedModel) -> dict[str, int]:
    """WIDTHxHEIGHT -> how many rows the base's loop of that size runs efficiently, for those made so far."""
    bases = {key: loop for key, loop in model.loops.items() if key[0] == components.UNET}
    return {f"{width}x{height}": loop.efficient for (_, height, width), loop in bases.items()}


def _find_efficient(model: LoadedModel, settings: GenerationSettings) -> None:
    """Measure the base's loop of this size with copies of one image. The refiner's need not know: see `Scheduler`."""
    height, width = settings.height, settings.width
    loop = model.loop(components.UNET, height, width)
    each = 2 if is_guided(model, settings, False) else 1
    buckets = _buckets(model.engines[components.UNET], height, width, loop.capacity)
    counts = sorted({max(1, rows // each) for rows in buckets})
    if len(counts) == 1:
        return  # fewer would cost as much
    [row] = base_rows(model, settings, request_tables(model, settings)[0])
    seconds = ((images, _step_seconds(model, loop, row, images)) for images in counts)
    loop.efficient = each * efficient_images(seconds)


def _buckets(unet: EngineSet, height: int, width: int, capacity: int) -> list[int]:
    """The rows of each static bucket; for a dynamic engine 1, 2, 4 and so on."""
    if unet.is_static(height, width):
        return [engine.bucket.rows.max for engine in unet.serving(height, width)]
    return [2**power for power in range(capacity.bit_length())]


def _step_seconds(model: LoadedModel, loop: Loop, row: Row, images: int) -> float:
    """The fastest step of so many copies of `row`: of one, or of as many as it takes until one is no faster."""
    fastest = math.inf
    while (seconds := _one_step(model, loop, row, images)) < _FASTER * fastest and _clocks_rise(model):
        fastest = seconds
    return min(fastest, seconds)


def _clocks_rise(model: LoadedModel) -> bool:
    """Whether the device is faster once it has begun to work. A CPU's steps are long, and a start waits for each."""
    return model.device.type == "cuda"


def _one_step(model: LoadedModel, loop: Loop, row: Row, images: int) -> float:
    for _ in range(images):
        loop.join(_again(row))
    _synchronize(model)
    began = time.perf_counter()
    try:
        loop.step()
        _synchronize(model)
        return time.perf_counter() - began
    finally:
        for left in list(loop.rows):
            loop.leave(left)


def _synchronize(model: LoadedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def _again(row: Row) -> Row:
    return Row(
        row.latents.clone(), row.table, row.guidance, torch.Generator().manual_seed(0), row.conditional,
        row.unconditional,
    )  # fmt: skip


def _no_room(loaded: Loaded) -> str:
    return (
        f"{loaded.release} does not fit into this GPU's memory with every configured bucket running: "
        "configure fewer rows or sizes (model_metadata.preheat.buckets in config.yaml), or use a larger GPU."
    )
