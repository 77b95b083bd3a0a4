"""What a replica runs before it says that it is ready, so that no request pays for lazy loading or finds memory full.

Every loop that requests can ask for is made, every UNet bucket runs at its full rows, and a picture is drawn and
decoded at every size: the most device memory that serving takes has then been taken once.
"""

import torch

from model import components
from model.engines import EngineSet
from model.errors import NoEngineForTarget
from model.loading import Loaded
from model.loop import Row
from model.pipeline import LoadedModel, base_rows, denoise, generate, refiner_row, refiner_text, request_tables
from model.preview import PreviewMap, fit_preview_map
from model.request import GenerationRequest, GenerationSettings, SizeList, resolve

_STEPS = 4


def warm_up(loaded: Loaded) -> PreviewMap:
    """Warm every size listed, or the native one. Returns the map for previews, which the decoder gives on the way.

    Raises NoEngineForTarget where the GPU's memory does not hold what the config asks for.
    """
    served = loaded.served
    native = (served.native_width, served.native_height)
    try:
        for width, height in served.sizes.sizes if isinstance(served.sizes, SizeList) else (native,):
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
            _fill_buckets(loaded.model, settings)
        return fit_preview_map(loaded.model, served.native_height, served.native_width)
    except torch.OutOfMemoryError as error:
        raise NoEngineForTarget(_no_room(loaded)) from error


def _fill_buckets(model: LoadedModel, settings: GenerationSettings) -> None:
    """Run each static bucket of the UNets at this size once, at its full rows."""
    base, rest = request_tables(model, settings)
    [row] = base_rows(model, settings, base)
    parts = [(components.UNET, row)]
    if rest:
        parts.append((components.REFINER_UNET, refiner_row(settings, rest, row, refiner_text(model, settings, rest))))
    for component, first in parts:
        loop = model.loop(component, settings.height, settings.width)
        for images in _bucket_images(model.engines[component], settings, loop.capacity):
            denoise(loop, [_again(first) for _ in range(images)])


def _bucket_images(engines: EngineSet, settings: GenerationSettings, capacity: int) -> list[int]:
    """How many guided images fill each static bucket; a dynamic engine was loaded by its first picture."""
    rows = {engine.bucket.rows.max for engine in engines.serving(settings.height, settings.width)}
    return sorted({max(1, count // 2) for count in rows if count // 2 <= capacity}) if len(rows) > 1 else []


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
