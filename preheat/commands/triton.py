"""The `preheat` commands for Triton Inference Server: export-triton and triton-client."""

import math
import secrets
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from engine_builder.files import check_folder, check_writable, write_file
from engine_builder.triton_repository import write_repository as export
from engine_builder.triton_repository.loop_model import GENERATE_LOOP, loop_model
from engine_builder.triton_repository.unrolled import (
    CONTROL_IMAGE,
    CONTROL_MODE,
    CONTROL_SCALE,
    INPUT_IMAGE,
    MASK,
    STRENGTH,
    unrolled_repository,
)
from model.images.encode import encode
from model.images.inputs import decode_mask, decode_rgb, read_image
from model.validation import RANDOM_SEED, SEED_COUNT
from preheat.commands.request_options import ControlImages, ControlModes, ControlScales
from preheat.console import (
    DEFAULT_STORE,
    CacheOption,
    StoreOption,
    activity,
    console,
    open_cli_store,
    plain,
)
from preheat.local_server import triton_client as client
from preheat.local_server.client import CallFailed
from preheat.local_server.input_images import controls_of, read_image_file

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
    check_folder(out)
    manifests = export.read_releases(opened, releases)
    if unrolled:
        models = unrolled_repository(manifests, steps)
    else:
        loop = loop_model(any(engine.signature.extra_channels for m in manifests.values() for engine in m.engines))
        models = [{version: (loop, list(manifest.blobs().values())) for version, manifest in manifests.items()}]
    with activity(f"Checking the blobs of {', '.join(releases)}"):
        export.write_repository(opened, manifests, models, out)
    names = [next(iter(versions.values()))[0].name for versions in models]
    console.print(f"Wrote {plain(', '.join(names))} of {plain(', '.join(releases))} to {plain(out)}")


def triton_client(
    prompt: Annotated[str, typer.Argument(help="Description of the image.")],
    address: Annotated[str | None, typer.Option(help="HOST:PORT; default: this machine, Triton's port.")] = None,
    grpc: Annotated[bool, typer.Option("--grpc", help="Call over gRPC, with previews.")] = False,
    triton_model: Annotated[
        str, typer.Option(help="generate_loop, or an ensemble such as generate_20_pipeline.")
    ] = GENERATE_LOOP,
    version: Annotated[int | None, typer.Option(min=1, help="The model's version; default: the newest.")] = None,
    out: Annotated[Path, typer.Option(help="Output file (PNG).")] = Path("image.png"),
    negative_prompt: str | None = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    guidance_scale: float | None = None,
    seed: int | None = None,
    image: Annotated[Path | None, typer.Option(help="Image to start from.")] = None,
    mask: Annotated[Path | None, typer.Option(help="Where the image is repainted: white.")] = None,
    strength: Annotated[float | None, typer.Option(help="With an image: the share of the steps that run.")] = None,
    control: ControlImages = None,
    control_scale: ControlScales = None,
    control_mode: ControlModes = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.")] = 300,
) -> None:
    """Generate an image on a Triton server that serves a repository of `preheat export-triton`."""
    check_writable(out)
    protocol: client.Protocol = "grpc" if grpc else "http"
    address = address or ("127.0.0.1:8001" if grpc else "127.0.0.1:8000")
    of_version = "" if version is None else str(version)
    controls = controls_of(control or [], False, {"scale": control_scale or [], "mode": control_mode or []})
    if triton_model != GENERATE_LOOP:
        if steps is not None:
            raise typer.BadParameter(f"the steps of {triton_model} are fixed", param_hint="--steps")
        seed = secrets.randbelow(SEED_COUNT) if seed is None or seed == RANDOM_SEED else seed
        if not 0 <= seed < SEED_COUNT:
            raise typer.BadParameter(f"{seed} is not 0 to {SEED_COUNT - 1}, or -1", param_hint="--seed")
        scale = DEFAULT_GUIDANCE if guidance_scale is None else guidance_scale
        if not math.isfinite(scale):
            raise typer.BadParameter(f"{scale} is not a number", param_hint="--guidance-scale")
        pixels = client.generate_pixels(
            protocol,
            address,
            triton_model,
            prompt,
            seed,
            scale,
            timeout,
            negative_prompt,
            of_version,
            _ensemble_inputs(image, mask, strength, controls),
        )
        write_file(out, encode(pixels, "png", 100))
        console.print(f"Wrote {plain(out)} with seed {seed} of {plain(triton_model)}")
        return
    optional: dict[str, Any] = {"negative_prompt": negative_prompt, "num_inference_steps": steps, "seed": seed}
    optional |= {"guidance_scale": guidance_scale, "strength": strength}
    optional |= {"image": None if image is None else read_image_file(image)}
    optional |= {"masks": None if mask is None else [{"image": read_image_file(mask)}]}
    optional |= {"controls": controls or None}
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


def _ensemble_inputs(
    image: Path | None, mask: Path | None, strength: float | None, controls: list[dict[str, Any]]
) -> dict[str, NDArray[Any]]:
    """Return the optional inputs of an ensemble by name. Raises RequestRefused for a file that is no image."""
    inputs: dict[str, NDArray[Any]] = {}
    if image is not None:
        inputs[INPUT_IMAGE] = decode_rgb(read_image(read_image_file(image), "image"))
    if mask is not None:
        inputs[MASK] = np.asarray(decode_mask(read_image(read_image_file(mask), "mask")))
    if strength is not None:
        inputs[STRENGTH] = np.array([strength], np.float32)
    for control in controls:
        name = control["name"]
        inputs[f"{CONTROL_IMAGE}.{name}"] = decode_rgb(read_image(control["image"], f"control {name}"))
        if "scale" in control:
            inputs[f"{CONTROL_SCALE}.{name}"] = np.array([control["scale"]], np.float32)
        if "mode" in control:
            inputs[f"{CONTROL_MODE}.{name}"] = np.array([control["mode"]], np.int32)
    return inputs
