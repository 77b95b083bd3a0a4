"""The `preheat` commands for Triton Inference Server: export-triton and triton-client."""

import base64
import math
import secrets
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from engine_builder.files import check_folder, check_writable, read_file, write_file
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
    model: Annotated[
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
    control: Annotated[
        list[str] | None, typer.Option(help="Control image of a ControlNet, NAME=FILE; repeatable.")
    ] = None,
    control_scale: Annotated[list[str] | None, typer.Option(help="A ControlNet's scale, NAME=NUMBER.")] = None,
    control_mode: Annotated[list[str] | None, typer.Option(help="A Union network's type, NAME=NUMBER.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.")] = 300,
) -> None:
    """Generate an image on a Triton server that serves a repository of `preheat export-triton`."""
    check_writable(out)
    protocol: client.Protocol = "grpc" if grpc else "http"
    address = address or ("127.0.0.1:8001" if grpc else "127.0.0.1:8000")
    of_version = "" if version is None else str(version)
    controls = _controls(control or [], control_scale or [], control_mode or [])
    if model != GENERATE_LOOP:
        if steps is not None:
            raise typer.BadParameter(f"the steps of {model} are fixed", param_hint="--steps")
        seed = secrets.randbelow(SEED_COUNT) if seed is None or seed == RANDOM_SEED else seed
        if not 0 <= seed < SEED_COUNT:
            raise typer.BadParameter(f"{seed} is not 0 to {SEED_COUNT - 1}, or -1", param_hint="--seed")
        scale = DEFAULT_GUIDANCE if guidance_scale is None else guidance_scale
        if not math.isfinite(scale):
            raise typer.BadParameter(f"{scale} is not a number", param_hint="--guidance-scale")
        pixels = client.generate_pixels(
            protocol,
            address,
            model,
            prompt,
            seed,
            scale,
            timeout,
            negative_prompt,
            of_version,
            _ensemble_inputs(image, mask, strength, controls),
        )
        write_file(out, encode(pixels, "png", 100))
        console.print(f"Wrote {plain(out)} with seed {seed} of {plain(model)}")
        return
    optional: dict[str, Any] = {"negative_prompt": negative_prompt, "num_inference_steps": steps, "seed": seed}
    optional |= {"guidance_scale": guidance_scale, "strength": strength}
    optional |= {"image": None if image is None else _base64(image)}
    optional |= {"masks": None if mask is None else [{"image": _base64(mask)}]}
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


def _controls(images: list[str], scales: list[str], modes: list[str]) -> list[dict[str, Any]]:
    """Return the use of each ControlNet as a request has it. Raises BadParameter."""
    found: dict[str, dict[str, Any]] = {
        name: {"name": name, "image": _base64(Path(path))} for name, path in _named("--control", images).items()
    }
    for option, values, field, number in (
        ("--control-scale", scales, "scale", float),
        ("--control-mode", modes, "mode", int),
    ):
        for name, text in _named(option, values).items():
            if name not in found:
                raise typer.BadParameter(f"{name} has no control image: give --control {name}=FILE", param_hint=option)
            try:
                found[name][field] = number(text)
            except ValueError as error:
                raise typer.BadParameter(f"{text!r} is not a number", param_hint=option) from error
    return list(found.values())


def _named(option: str, values: list[str]) -> dict[str, str]:
    """Return values of an option by name, each NAME=VALUE. Raises BadParameter."""
    named: dict[str, str] = {}
    for given in values:
        name, _, value = given.partition("=")
        if not (name and value):
            raise typer.BadParameter(f"{given!r} is not NAME=VALUE", param_hint=option)
        if name in named:
            raise typer.BadParameter(f"{name} is named twice", param_hint=option)
        named[name] = value
    return named


def _ensemble_inputs(
    image: Path | None, mask: Path | None, strength: float | None, controls: list[dict[str, Any]]
) -> dict[str, NDArray[Any]]:
    """Return the optional inputs of an ensemble by name. Raises RequestRefused for a file that is no image."""
    inputs: dict[str, NDArray[Any]] = {}
    if image is not None:
        inputs[INPUT_IMAGE] = decode_rgb(read_image(_base64(image), "image"))
    if mask is not None:
        inputs[MASK] = np.asarray(decode_mask(read_image(_base64(mask), "mask")))
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


def _base64(path: Path) -> str:
    try:
        return base64.b64encode(read_file(path)).decode()
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read: {error.strerror or error}") from error
