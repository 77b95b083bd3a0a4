"""Peers of a release: diffusers' own pipeline on the same weights."""

from typing import Any

import numpy as np
import torch

from engine_builder.benchmarks.bench import Work, encode_all
from engine_builder.building.compare_schedulers import diffusers_scheduler
from engine_builder.checkpoints.find import find_checkpoints
from engine_builder.checkpoints.folder import Checkpoint, variant_of
from engine_builder.checkpoints.scheduler_config import read_scheduler
from model.errors import RequestRefused
from model.images.encode import Pixels
from model.pipeline.params import GenerationParams

PEERS = ("eager", "compiled")  # see `diffusers_pipeline`


def find_peer(model: str, params: GenerationParams) -> Checkpoint:
    """Find the model's folder as a build does, downloading a Hub id.

    Raises CheckpointError, and RequestRefused for a request for which diffusers would generate different images.
    """
    folder, _ = find_checkpoints(model, None)
    if params.use_refiner:
        raise RequestRefused("use_refiner", "a peer has no refiner: omit --refiner or --peer.")
    if params.guidance_scale > 1 and params.end_cfg_frac < 1:
        raise RequestRefused(
            "end_cfg_frac",
            f"this release ends its guidance after {params.end_cfg_frac:g} of the steps, and a peer does not: publish "
            "it without that default (defaults.json).",
        )
    peer_sampler = read_scheduler(folder).sampler
    if params.scheduler != peer_sampler:
        raise RequestRefused(
            "scheduler",
            f"this release uses {params.scheduler} and {folder.root} uses {peer_sampler}: name a folder whose "
            "scheduler/scheduler_config.json has the release's.",
        )
    return folder


def diffusers_pipeline(folder: Checkpoint, precision: str, compiled: bool) -> Any:
    """Return diffusers' pipeline in eager PyTorch, or `compiled`.

    Compiled means channels_last, fused projections, and torch.compile with CUDA graphs on UNet and decoder. diffusers
    would convert an fp16 SDXL decoder with `force_upcast` to fp32 and back for each image. CUDA graphs would be
    captured again each time. So a compiled decoder stays in fp32. The scheduler is that of the release.
    """
    import diffusers
    from diffusers.utils import logging
    from transformers.utils import logging as transformers_logging

    for noisy in (logging, transformers_logging):
        noisy.disable_progress_bar()
    is_sdxl = folder.family == "sdxl"
    kind: Any = diffusers.StableDiffusionXLPipeline if is_sdxl else diffusers.StableDiffusionPipeline
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"variant": variant_of(folder, "unet"), "use_safetensors": True}
    options |= {"add_watermarker": False} if is_sdxl else {"safety_checker": None, "requires_safety_checker": False}
    pipeline = kind.from_pretrained(folder.root, dtype=getattr(torch, precision), **options).to(device)
    scheduler = read_scheduler(folder)
    pipeline.scheduler = diffusers_scheduler(scheduler.config, scheduler.schedule, scheduler.sampler)
    pipeline.set_progress_bar_config(disable=True)
    if not compiled:
        return pipeline
    vae: Any = pipeline.vae
    if is_sdxl and vae.dtype == torch.float16 and vae.config.force_upcast:
        torch.nn.Module.to(vae, torch.float32)  # not diffusers' own `to`, which warns
    for network in (pipeline.unet, vae):
        network.to(memory_format=torch.channels_last)
    pipeline.fuse_qkv_projections()
    pipeline.unet = torch.compile(pipeline.unet, mode="reduce-overhead", fullgraph=True)
    decode: Any = torch.compile(vae.decode, mode="reduce-overhead", fullgraph=True)
    vae.decode = lambda latents, **options: decode(latents.to(vae.dtype), **options)
    return pipeline


def generate_by_diffusers(pipeline: Any, params: GenerationParams) -> list[Pixels]:
    """Return the images of this request."""
    images = pipeline(
        prompt=params.prompt,
        width=params.width,
        height=params.height,
        num_inference_steps=params.num_inference_steps,
        guidance_scale=params.guidance_scale,
        num_images_per_prompt=params.num_images,
        generator=torch.Generator().manual_seed(params.seed),
    ).images
    return [np.asarray(image.convert("RGB")) for image in images]


def diffusers_work(pipeline: Any, params: GenerationParams) -> Work:
    """Return a function that generates this request with diffusers' pipeline."""

    def work() -> dict[str, float]:
        encode_all(generate_by_diffusers(pipeline, params), params)
        return {}

    return work
