"""The `preheat` commands for Triton Inference Server: export-triton and triton-client."""

from pathlib import Path
from typing import Annotated, Any

import typer

from engine_builder.commands.console import DEFAULT_STORE, CacheOption, StoreOption, console, open_cli_store, plain
from engine_builder.files import check_writable, write_file
from engine_builder.local_server.client import CallFailed
from engine_builder.triton_repository import client, export
from engine_builder.triton_repository.loop_model import loop_model


def export_triton(
    releases: Annotated[list[str], typer.Argument(help="MODEL/VERSION; several versions are served side by side.")],
    out: Annotated[Path, typer.Option(help="New folder of the model repository.")],
    store: StoreOption = DEFAULT_STORE,
    cache_dir: CacheOption = None,
) -> None:
    """Write a model repository for Triton Inference Server. Weights and engines are linked, not copied."""
    opened = open_cli_store(store, cache_dir)
    manifests = export.read_releases(opened, releases)
    model = loop_model(any(engine.signature.extra_channels for m in manifests.values() for engine in m.engines))
    versions = {version: (model, list(manifest.blobs().values())) for version, manifest in manifests.items()}
    export.write_repository(opened, manifests, [versions], out)
    console.print(f"Wrote {plain(model.name)} with versions {', '.join(map(str, manifests))} to {plain(out)}")


def triton_client(
    prompt: Annotated[str, typer.Argument(help="Description of the image.")],
    address: Annotated[str | None, typer.Option(help="HOST:PORT; default: this machine, Triton's port.")] = None,
    grpc: Annotated[bool, typer.Option("--grpc", help="Call over gRPC, with previews.")] = False,
    version: Annotated[int | None, typer.Option(min=1, help="The model's version; default: the newest.")] = None,
    out: Annotated[Path, typer.Option(help="Output file (PNG).")] = Path("image.png"),
    negative_prompt: str | None = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    seed: int | None = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.")] = 300,
) -> None:
    """Generate an image on a Triton server that serves a repository of `preheat export-triton`."""
    check_writable(out)
    optional = {"negative_prompt": negative_prompt, "num_inference_steps": steps, "seed": seed}
    request: dict[str, Any] = {"prompt": prompt, "output_format": "png", "stream": grpc}
    request |= {name: value for name, value in optional.items() if value is not None}

    def show(event: dict[str, Any], preview: bytes) -> None:
        console.print(f"Step {event['step']} of {event['steps']}: a preview of {len(preview)} bytes")

    protocol: client.Protocol = "grpc" if grpc else "http"
    address = address or ("127.0.0.1:8001" if grpc else "127.0.0.1:8000")
    images = client.generate(protocol, address, request, timeout, "" if version is None else str(version), show)
    if not images:
        raise CallFailed(f"{address} returned no image.")
    event, file = images[0]
    write_file(out, file)
    console.print(f"Wrote {plain(out)} with seed {event['seed']} of {plain(event['release'])}")
