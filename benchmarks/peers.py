"""Compare a release with diffusers' own pipeline on the same weights: both generate the same request alternately.

Each peer runs in its own process, so that it shares no state of PyTorch with the release. torch.compile's CUDA graphs
clear caches of the whole process, and use the memory pools of other captured graphs.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Work, encode_all, measure, precision_of, release_work, timed_row
from benchmarks.memory import MemoryGrowth
from benchmarks.rows import Row
from engine_builder.building.compare_schedulers import diffusers_scheduler
from engine_builder.checkpoints.find import find_checkpoints
from engine_builder.checkpoints.folder import Checkpoint, variant_of
from engine_builder.checkpoints.scheduler_config import read_scheduler
from engine_builder.worker_process import end_process, end_with_parent
from model.api.resolve import resolve
from model.errors import PreheatError, RequestRefused
from model.images.pixels import Pixels
from model.loading.load import Loaded
from model.pipeline.params import GenerationParams
from model.request_fields import GenerationRequest

PEERS = ("eager", "compiled")  # see `diffusers_pipeline`
_PLAIN = {"prompt_syntax": "plain", "clip_skip": 0, "guidance_rescale": 0.0}
"""Fields with one value that a peer serves. A release may have another default."""


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
        with start_peers(folder, precision, kinds) as peers:
            works = [release_work(loaded, params), *(peer.work(params) for peer in peers)]
            measured = measure(works, warm_ups, runs)
    except torch.OutOfMemoryError as error:
        raise out_of_memory() from error
    names = [loaded.release, *(f"diffusers {kind}" for kind in kinds)]
    rows = [timed_row(name, params, precision, *result) for name, result in zip(names, measured, strict=True)]
    return [rows[0], *(row.model_copy(update={"diffusers": version("diffusers")}) for row in rows[1:])]


def find_peer(model: str, params: GenerationParams) -> Checkpoint:
    """Find the model's folder as a build does, downloading a Hub id.

    Raises CheckpointError, and RequestRefused for a request for which diffusers would generate different images.
    """
    folder, _ = find_checkpoints(model, None)
    check_peer(params)
    return folder


def check_peer(params: GenerationParams) -> None:
    """Raise RequestRefused for a request for which diffusers would generate different images."""
    if params.use_refiner:
        raise RequestRefused("use_refiner", "a peer has no refiner: omit --refiner or --peer.")
    for field, plain in _PLAIN.items():
        if (value := getattr(params, field)) != plain:
            raise RequestRefused(field, f"the request or the release has {value}, and a peer serves {plain} only.")
    if params.guidance_scale > 1 and (params.guidance_start, params.guidance_end) != (0, 1):
        raise RequestRefused(
            "guidance_end",
            f"this release guides the steps from {params.guidance_start:g} to {params.guidance_end:g} only, and a peer "
            "guides all: publish it without that default (defaults.json).",
        )
    if params.forecast != "off":
        raise RequestRefused("forecast", f"a peer evaluates all steps, and the request has {params.forecast}: set off.")


def diffusers_pipeline(folder: Checkpoint, precision: str, compiled: bool) -> Any:
    """Return diffusers' pipeline in eager PyTorch, or `compiled`.

    Compiled means channels_last, fused projections, and torch.compile with CUDA graphs on UNet and decoder. diffusers
    would convert an fp16 SDXL decoder with `force_upcast` to fp32 and back for each image. CUDA graphs would be
    captured again each time. So a compiled decoder stays in fp32.
    """
    kind, is_sdxl = _pipeline_class(folder), folder.family == "sdxl"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"variant": variant_of(folder, "unet"), "use_safetensors": True}
    options |= {"add_watermarker": False} if is_sdxl else {"safety_checker": None, "requires_safety_checker": False}
    pipeline = kind.from_pretrained(folder.root, dtype=getattr(torch, precision), **options).to(device)
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


@cache
def _scheduler(folder: Checkpoint, sampler: str) -> Any:
    """Return the scheduler of diffusers that a release of the folder has for a sampler."""
    config = read_scheduler(folder)
    return diffusers_scheduler(config.config, config.schedule, sampler)


def _draw_in_fp32(pipeline: Any) -> None:
    """Let a pipeline draw noise in float32, as Preheat does, and round it.

    diffusers draws in the precision of the weights. On a CPU torch 2.11 draws unrelated numbers from a seed in fp16 and
    in fp32. torch 2.13 draws the same ones.
    """
    from diffusers.utils.torch_utils import randn_tensor

    def draw(*arguments: Any, **options: Any) -> Any:
        return randn_tensor(*arguments, **options | {"dtype": torch.float32}).to(options["dtype"])

    for part in (pipeline, pipeline.scheduler):
        module = sys.modules[type(part).__module__]
        if hasattr(module, "randn_tensor"):
            vars(module)["randn_tensor"] = draw


def _pipeline_class(folder: Checkpoint) -> Any:
    """Import diffusers, and return its pipeline for the family of a model."""
    import diffusers
    from diffusers.utils import logging
    from transformers.utils import logging as transformers_logging

    for noisy in (logging, transformers_logging):
        noisy.disable_progress_bar()
        noisy.set_verbosity_error()
    return diffusers.StableDiffusionXLPipeline if folder.family == "sdxl" else diffusers.StableDiffusionPipeline


def generate_by_diffusers(pipeline: Any, folder: Checkpoint, params: GenerationParams) -> list[Pixels]:
    """Return the images of this request, after encoding them as for a response. `folder`: of the pipeline."""
    pipeline.scheduler = _scheduler(folder, params.scheduler)
    _draw_in_fp32(pipeline)
    images = pipeline(
        prompt=params.prompt,
        negative_prompt=params.negative_prompt,
        width=params.width,
        height=params.height,
        num_inference_steps=params.num_inference_steps,
        guidance_scale=params.guidance_scale,
        num_images_per_prompt=params.num_images,
        generator=torch.Generator().manual_seed(params.seed),
    ).images
    pixels = [np.asarray(image.convert("RGB")) for image in images]
    encode_all(pixels, params)
    return pixels


@dataclass(frozen=True)
class Peer:
    """diffusers' pipeline in a process of its own. `load_seconds`: without imports."""

    kind: str
    connection: Connection
    load_seconds: float

    def generate(self, params: GenerationParams) -> tuple[list[Pixels], int | None]:
        """Return the images of a request, and the peak memory of the process so far. Raises PeerFailed.

        The memory is that of `benchmarks.memory`, with the libraries that diffusers imports.
        """
        images, memory = self._ask(params, returns_images=True)
        return images, memory

    def work(self, params: GenerationParams) -> Work:
        """Return a function that generates this request in the process, which keeps the images."""

        def work() -> dict[str, float]:
            self._ask(params, returns_images=False)
            return {}

        return work

    def _ask(self, params: GenerationParams, returns_images: bool) -> Any:
        with suppress(ConnectionError):  # `_receive` raises the error
            self.connection.send((params, returns_images))
        return _receive(self.connection, self.kind)


@contextmanager
def start_peers(folder: Checkpoint, precision: str, kinds: Sequence[str]) -> Iterator[list[Peer]]:
    """Start a process for each of `kinds`, and yield the peers in them. They load concurrently. Raises PeerFailed."""
    context = get_context("spawn")
    connections: list[Connection] = []
    with ExitStack() as stack:
        for kind in kinds:
            connection, peer_end = context.Pipe()
            process = context.Process(target=_run_peer, args=(peer_end, folder, precision, kind == "compiled"))
            process.start()
            peer_end.close()
            stack.callback(end_process, process)
            connections.append(stack.enter_context(connection))
        yield [
            Peer(kind, connection, load_seconds=_receive(connection, kind))
            for connection, kind in zip(connections, kinds, strict=True)
        ]


def _receive(connection: Connection, kind: str) -> Any:
    """Return the answer of a peer's process. Raises the error that it sent, or PeerFailed."""
    try:
        answer = connection.recv()
    except (EOFError, ConnectionError) as ended:
        raise PeerFailed(
            f"The process of diffusers ({kind}) ended before it answered.", "If memory was short, measure fewer peers."
        ) from ended
    if isinstance(answer, PreheatError):
        raise answer
    return answer


def _run_peer(connection: Connection, folder: Checkpoint, precision: str, compiled: bool) -> None:
    """Load the peer and send the seconds. Then send images and memory, or None, for each received request.

    An error is sent in place of an answer.
    """
    end_with_parent()
    memory = MemoryGrowth()
    pipelines: list[Any] = []

    def load() -> float:
        _pipeline_class(folder)
        began = time.perf_counter()
        pipelines.append(diffusers_pipeline(folder, precision, compiled))
        return time.perf_counter() - began

    def generate(params: GenerationParams, returns_images: bool) -> tuple[list[Pixels], int | None] | None:
        images = generate_by_diffusers(pipelines[0], folder, params)
        return (images, memory.peak_bytes()) if returns_images else None

    with suppress(EOFError, ConnectionError):
        connection.send(_answer(load))
        while pipelines:
            connection.send(_answer(generate, *connection.recv()))


def _answer(work: Callable[..., object], *arguments: Any) -> object:
    """Return what `work` returns, or its error."""
    try:
        return work(*arguments)
    except PreheatError as error:
        return error
    except torch.OutOfMemoryError:
        return out_of_memory()
    except Exception as error:
        return PeerFailed(
            f"diffusers failed: {type(error).__name__}: {error}", "Measure without --peer, or --against a server."
        )


def out_of_memory() -> PeerFailed:
    """Return the error for torch.OutOfMemoryError."""
    return PeerFailed(
        "This GPU's memory is too small for the release and its peers, which are loaded together.",
        "Measure without --compiled, or on a larger GPU.",
    )
