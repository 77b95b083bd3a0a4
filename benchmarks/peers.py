"""Compare a release with diffusers' own pipeline on the same weights: both generate the same request alternately.

Each peer runs in its own process, so that it shares no state of PyTorch with the release. torch.compile's CUDA graphs
clear caches of the whole process, and use the memory pools of other captured graphs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Work, encode_all, measure, precision_of, release_work, timed_row
from benchmarks.rows import Row
from engine_builder.building.compare_schedulers import diffusers_scheduler
from engine_builder.checkpoints.find import find_checkpoints
from engine_builder.checkpoints.folder import Checkpoint, variant_of
from engine_builder.checkpoints.scheduler_config import read_scheduler
from engine_builder.worker_process import end_process, end_with_parent
from model.api.resolve import resolve
from model.errors import PreheatError, RequestRefused
from model.images.encode import Pixels
from model.loading.load import Loaded
from model.pipeline.params import GenerationParams
from model.request_fields import GenerationRequest

PEERS = ("eager", "compiled")  # see `diffusers_pipeline`


class PeerFailed(PreheatError):
    """A peer's process ended, or diffusers failed in it."""


def bench_against_diffusers(
    loaded: Loaded, request: GenerationRequest, model: str, kinds: Sequence[str], warm_ups: int, runs: int
) -> list[Row]:
    """Measure the release and diffusers' pipeline alternately, from the request to the encoded image.

    `model`: folder or Hub id with the peers' weights. `kinds`: some of `PEERS`. The release's row comes first, and the
    others name the version of diffusers.
    Raises CheckpointError or RequestRefused if the images would differ, PeerFailed if a peer cannot be measured.
    """
    params, precision = resolve(request, loaded.served), precision_of(loaded)
    folder = find_peer(model, params)
    try:
        with peer_works(folder, precision, kinds, params) as peers:
            measured = measure([release_work(loaded, params), *peers], warm_ups, runs)
    except torch.OutOfMemoryError as error:
        raise _out_of_memory() from error
    names = [loaded.release, *(f"diffusers {kind}" for kind in kinds)]
    rows = [timed_row(name, params, precision, *result) for name, result in zip(names, measured, strict=True)]
    return [rows[0], *(row.model_copy(update={"diffusers": version("diffusers")}) for row in rows[1:])]


def find_peer(model: str, params: GenerationParams) -> Checkpoint:
    """Find the model's folder as a build does, downloading a Hub id.

    Raises CheckpointError, and RequestRefused for a request for which diffusers would generate different images.
    """
    folder, _ = find_checkpoints(model, None)
    if params.use_refiner:
        raise RequestRefused("use_refiner", "a peer has no refiner: omit --refiner or --peer.")
    if params.guidance_scale > 1 and (params.guidance_start, params.guidance_end) != (0, 1):
        raise RequestRefused(
            "guidance_end",
            f"this release guides the steps from {params.guidance_start:g} to {params.guidance_end:g} only, and a peer "
            "guides all: publish it without that default (defaults.json).",
        )
    if params.forecast != "off":
        raise RequestRefused("forecast", f"a peer evaluates all steps, and the request has {params.forecast}: set off.")
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


@contextmanager
def peer_works(
    folder: Checkpoint, precision: str, kinds: Sequence[str], params: GenerationParams
) -> Iterator[list[Work]]:
    """Start a process for each of `kinds`. Yields functions that each generate the request in one of them.

    The processes load concurrently. Raises PeerFailed.
    """
    context = get_context("spawn")
    connections: list[Connection] = []
    with ExitStack() as stack:
        for kind in kinds:
            connection, peer_end = context.Pipe()
            process = context.Process(target=_run_peer, args=(peer_end, folder, precision, kind == "compiled", params))
            process.start()
            peer_end.close()
            stack.callback(end_process, process)
            connections.append(stack.enter_context(connection))
        for connection, kind in zip(connections, kinds, strict=True):
            _receive(connection, kind)
        yield [_peer_work(connection, kind) for connection, kind in zip(connections, kinds, strict=True)]


def _peer_work(connection: Connection, kind: str) -> Work:
    def work() -> dict[str, float]:
        with suppress(ConnectionError):  # `_receive` raises the error
            connection.send(None)
        _receive(connection, kind)
        return {}

    return work


def _receive(connection: Connection, kind: str) -> None:
    try:
        error: PreheatError | None = connection.recv()
    except (EOFError, ConnectionError) as ended:
        raise PeerFailed(
            f"The process of diffusers ({kind}) ended before it answered.", "If memory was short, measure fewer peers."
        ) from ended
    if error is not None:
        raise error


def _run_peer(
    connection: Connection, folder: Checkpoint, precision: str, compiled: bool, params: GenerationParams
) -> None:
    """Load the peer, then generate the request for each received message. Sends None or an error after each."""
    end_with_parent()
    works: list[Work] = []
    with suppress(EOFError, ConnectionError):
        connection.send(
            _error_of(lambda: works.append(diffusers_work(diffusers_pipeline(folder, precision, compiled), params)))
        )
        while works:
            connection.recv()
            connection.send(_error_of(works[0]))


def _error_of(work: Callable[[], object]) -> PreheatError | None:
    try:
        work()
    except PreheatError as error:
        return error
    except torch.OutOfMemoryError:
        return _out_of_memory()
    except Exception as error:
        return PeerFailed(f"diffusers failed: {type(error).__name__}: {error}", "Measure without --peer.")
    return None


def _out_of_memory() -> PeerFailed:
    return PeerFailed(
        "This GPU's memory is too small for the release and its peers, which are loaded together.",
        "Measure without --compiled, or on a larger GPU.",
    )
