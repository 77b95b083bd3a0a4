"""The `preheat` commands for Triton Inference Server: export-triton and triton-client."""

import math
import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from engine_builder.commands.console import DEFAULT_STORE, CacheOption, StoreOption, console, open_cli_store, plain
from engine_builder.files import check_writable, write_file
from engine_builder.local_server.client import CallFailed
from engine_builder.triton_repository import client, export
from engine_builder.triton_repository.loop_model import GENERATE_LOOP, loop_model
from engine_builder.triton_repository.unrolled import unrolled_repository
from model.images.encode import encode
from model.validation import SEED_COUNT

DEFAULT_GUIDANCE = 7.5


def export_triton(
    releases: Annotated[list[str], typer.Argument(help="MODEL/VERSION; several versions are served side by side.")],
    out: Annotated[Path, typer.Option(help="New folder of the model repository.")],
    unrolled: Annotated[
        bool, typer.Option("--unrolled/--loop", help="Separate models and an ensemble, or one model with the loop.")
    ] = True,
    steps: Annotated[int, typer.Option(help="Denoising steps of the ensemble.")] = 20,
    store: StoreOption = DEFAULT_STORE,
    cache_dir: CacheOption = None,
) -> None:
    """Write a model repository for Triton Inference Server. Weights and engines are linked, not copied."""
    opened = open_cli_store(store, cache_dir)
    manifests = export.read_releases(opened, releases)
    if unrolled:
        models = unrolled_repository(manifests, steps)
    else:
        loop = loop_model(any(engine.signature.extra_channels for m in manifests.values() for engine in m.engines))
        models = [{version: (loop, list(manifest.blobs().values())) for version, manifest in manifests.items()}]
    export.write_repository(opened, manifests, models, out)
    names = [next(iter(versions.values()))[0].name for versions in models]
    console.print(f"Wrote {plain(', '.join(names))} of {plain(', '.join(releases))} to {plain(out)}")


def triton_client(
    prompt: Annotated[str, typer.Argument(help="Description of the image.")],
    address: Annotated[str | None, typer.Option(help="HOST:PORT; default: this machine, Triton's port.")] = None,
    grpc: Annotated[bool, typer.Option("--grpc", help="Call over gRPC, with previews.")] = False,
    model: Annotated[
        str, typer.Option(help="generate_loop, or an ensemble such as generate_20_pipeline.")
    ] = GENERATE_LOOP,
    version: Annotated[int | None, typer.Option(min=1, help="The model's version; default: the newest.")] = None,
    out: Annotated[Path, typer.Option(help="Output file (PNG).")] = Path("image.png"),
    negative_prompt: str | None = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    guidance_scale: float | None = None,
    seed: int | None = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.")] = 300,
) -> None:
    """Generate an image on a Triton server that serves a repository of `preheat export-triton`."""
    check_writable(out)
    protocol: client.Protocol = "grpc" if grpc else "http"
    address = address or ("127.0.0.1:8001" if grpc else "127.0.0.1:8000")
    of_version = "" if version is None else str(version)
    if model != GENERATE_LOOP:
        if steps is not None:
            raise typer.BadParameter(f"the steps of {model} are fixed", param_hint="--steps")
        if seed is not None and not 0 <= seed < SEED_COUNT:
            raise typer.BadParameter(f"{seed} is not 0 to {SEED_COUNT - 1}", param_hint="--seed")
        seed = secrets.randbelow(SEED_COUNT) if seed is None else seed
        scale = DEFAULT_GUIDANCE if guidance_scale is None else guidance_scale
        if not math.isfinite(scale):
            raise typer.BadParameter(f"{scale} is not a number", param_hint="--guidance-scale")
        pixels = client.generate_pixels(
            protocol, address, model, prompt, seed, scale, timeout, negative_prompt, of_version
        )
        write_file(out, encode(pixels, "png", 100))
        console.print(f"Wrote {plain(out)} with seed {seed} of {plain(model)}")
        return
    optional: dict[str, Any] = {"negative_prompt": negative_prompt, "num_inference_steps": steps, "seed": seed}
    optional |= {"guidance_scale": guidance_scale}
    request: dict[str, Any] = {"prompt": prompt, "output_format": "png", "stream": grpc}
    request |= {name: value for name, value in optional.items() if value is not None}

    def show(event: dict[str, Any], preview: bytes) -> None:
        console.print(f"Step {event['step']} of {event['steps']}: a preview of {len(preview)} bytes")

    images = client.generate(protocol, address, request, timeout, of_version, show)
    if not images:
        raise CallFailed(f"{address} returned no image.")
    event, file = images[0]
    write_file(out, file)
    console.print(f"Wrote {plain(out)} with seed {event['seed']} of {plain(event['release'])}")
