"""diffusers' own pipeline on the same weights: what a release is measured beside."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine_builder.benchmarks.bench import (
    Work,
    encode_all,
    measure,
    precision_of,
    release_row,
    release_work,
    timed_row,
)
from engine_builder.benchmarks.rows import Row
from engine_builder.checkpoints.find import find_folders
from engine_builder.networks.network import (
    ModelFolder,
    variant_of,
)
from model.api.request import (
    GenerationRequest,
    GenerationSettings,
    resolve,
)
from model.denoising.samplers import configured_sampler
from model.errors import PreheatError, RequestRefused
from model.images.encode import Pixels
from model.loading.load import Loaded

PEERS = ("eager", "compiled")  # how it is run


def bench_beside_diffusers(
    loaded: Loaded, request: GenerationRequest, model: str, kinds: Sequence[str], warm_ups: int, runs: int
) -> list[Row]:
    """The release, then diffusers' pipeline on the weights of `model`, a folder or a Hub id, in each of `kinds` (some
    of `PEERS`): the same request in turns, in to encoded picture out.

    Raises ModelFolderError or RequestRefused where it cannot be the same; PreheatError where a device has no room for
    all of them.
    """
    settings, precision = resolve(request, loaded.served), precision_of(loaded)
    folder = find_peer(model, settings)
    try:
        peers = [diffusers_work(diffusers_pipeline(folder, precision, kind == "compiled"), settings) for kind in kinds]
        first, *others = measure([release_work(loaded, settings), *peers], warm_ups, runs)
    except torch.OutOfMemoryError as error:
        raise PreheatError(
            "This GPU has no room for the release and its peers at once, which take turns: measure without --compiled, "
            "or on a larger one."
        ) from error
    rows = [release_row(loaded, settings, *first)]
    for kind, measured in zip(kinds, others, strict=True):
        case = f"diffusers {kind} {settings.width}x{settings.height}"
        rows.append(timed_row(case, settings, precision, *measured))
    return rows


def find_peer(model: str, like: GenerationSettings) -> ModelFolder:
    """The model's folder, or a download from the Hub, as a build finds it.

    Raises ModelFolderError, and RequestRefused for what diffusers would draw in another way than the release does.
    """
    folder, _ = find_folders(model, None)
    if like.use_refiner:
        raise RequestRefused("use_refiner", "a peer has no refiner: leave out --refiner, or the peer.")
    if like.guidance_scale > 1 and like.end_cfg_frac < 1:
        raise RequestRefused(
            "end_cfg_frac",
            f"this release ends its guidance after {like.end_cfg_frac:g} of the steps, and a peer does not: publish it "
            "without that default (defaults.json) to measure it beside one.",
        )
    own = configured_sampler(folder.config("scheduler", "scheduler_config.json"))
    if like.scheduler != own:
        raise RequestRefused(
            "scheduler",
            f"this release draws with {like.scheduler} and {folder.root} with {own}: name a folder whose "
            "scheduler/scheduler_config.json has the release's.",
        )
    return folder


def diffusers_pipeline(folder: ModelFolder, precision: str, compiled: bool) -> Any:
    """diffusers' pipeline in eager PyTorch, or `compiled`: channels_last, fused projections, torch.compile with CUDA
    graphs on UNet and decoder. A decoder that diffusers would move to fp32 and back for each picture
    (`force_upcast` in fp16), which a graph would have to be captured anew for, then stays in fp32."""
    from diffusers import StableDiffusionXLPipeline
    from diffusers.utils import logging
    from transformers.utils import logging as transformers_logging

    for noisy in (logging, transformers_logging):
        noisy.disable_progress_bar()
    load: Any = StableDiffusionXLPipeline.from_pretrained
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"variant": variant_of(folder, "unet"), "use_safetensors": True, "add_watermarker": False}
    pipeline = load(folder.root, dtype=getattr(torch, precision), **options).to(device)
    pipeline.set_progress_bar_config(disable=True)
    if not compiled:
        return pipeline
    vae: Any = pipeline.vae
    if vae.dtype == torch.float16 and vae.config.force_upcast:
        torch.nn.Module.to(vae, torch.float32)  # diffusers' own `to` warns of what from_pretrained does
    for network in (pipeline.unet, vae):
        network.to(memory_format=torch.channels_last)
    pipeline.fuse_qkv_projections()
    pipeline.unet = torch.compile(pipeline.unet, mode="reduce-overhead", fullgraph=True)
    decode: Any = torch.compile(vae.decode, mode="reduce-overhead", fullgraph=True)
    vae.decode = lambda latents, **given: decode(latents.to(vae.dtype), **given)
    return pipeline


def draw_by_diffusers(pipeline: Any, like: GenerationSettings) -> list[Pixels]:
    """The pictures of that request."""
    images = pipeline(
        prompt=like.prompt,
        width=like.width,
        height=like.height,
        num_inference_steps=like.num_inference_steps,
        guidance_scale=like.guidance_scale,
        num_images_per_prompt=like.num_images,
        generator=torch.Generator().manual_seed(like.seed),
    ).images
    return [np.asarray(image.convert("RGB")) for image in images]


def diffusers_work(pipeline: Any, like: GenerationSettings) -> Work:
    """Drawing that request by diffusers' pipeline."""

    def work() -> dict[str, float]:
        encode_all(draw_by_diffusers(pipeline, like), like)
        return {}

    return work
