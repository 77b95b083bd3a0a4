"""`preheat generate` and `save`: request images from a server, a gateway or a deployed model, and write them."""

import base64
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from engine_builder.files import check_writable, write_file
from gateway.endpoint import BASETEN_KEY_VARIABLE, DESCRIBE, KEY_VARIABLE, Endpoint, parse_endpoint
from preheat.commands.request_options import (
    ControlImages,
    ControlModes,
    ControlScales,
    parse_fields,
    with_field_options,
)
from preheat.console import (
    activity,
    console,
    notify,
    notify_later,
    parse_lora,
    plain,
    print_warning,
    progress_console,
    say,
    steps_bar,
)
from preheat.local_server.client import CallFailed, check_output_paths, save_images, save_predicted
from preheat.local_server.client import generate as call
from preheat.local_server.input_images import controls_of, ip_adapters_of, masks_of, read_image_file

_WAKING = " (a deployed model that has scaled to zero takes minutes to start)"
_PREVIEW_SUFFIXES = (".jpg", ".jpeg")
Event = dict[str, Any]


@with_field_options
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Description of the image.")] = None,
    url: Annotated[
        str,
        typer.Option(help="A server or gateway without a path, or the URL of a deployed model's predict."),
    ] = "http://127.0.0.1:8080",
    api_key: Annotated[
        str | None,
        typer.Option(
            help=f"Key of a gateway or a deployed model. Others on this machine can read it here: prefer the variable "
            f"{KEY_VARIABLE}, or {BASETEN_KEY_VARIABLE} for Baseten."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Output file; several images get numbers.")] = Path("image.png"),
    previews: Annotated[
        Path | None, typer.Option(help="JPEG file for the preview, replaced while the images are made.")
    ] = None,
    stream: Annotated[bool, typer.Option(help="Show the progress, or wait for the whole answer.")] = True,
    describe: Annotated[bool, typer.Option("--describe", help="Print as JSON what the server serves.")] = False,
    images: Annotated[int, typer.Option(help="Number of images.")] = 1,
    lora: Annotated[list[str] | None, typer.Option(help="An adapter as NAME or NAME:SCALE, repeatable.")] = None,
    image: Annotated[Path | None, typer.Option(help="PNG, JPEG or WebP file to start from.")] = None,
    mask: Annotated[list[Path] | None, typer.Option(help="File whose white part is repainted; repeatable.")] = None,
    mask_prompt: Annotated[list[str] | None, typer.Option(help="Prompt of each mask, in the same order.")] = None,
    mask_negative_prompt: Annotated[list[str] | None, typer.Option(help="What to avoid in each mask.")] = None,
    mask_strength: Annotated[list[float] | None, typer.Option(help="Strength of each mask.")] = None,
    feather: Annotated[float, typer.Option(help="Blur the masks by this many pixels, for --composite.")] = 0,
    control: ControlImages = None,
    control_scale: ControlScales = None,
    control_start: Annotated[
        list[str] | None, typer.Option(help="Share of the steps before a ControlNet starts, NAME=NUMBER.")
    ] = None,
    control_end: Annotated[
        list[str] | None, typer.Option(help="Share of the steps after which a ControlNet ends, NAME=NUMBER.")
    ] = None,
    control_mode: ControlModes = None,
    canny: Annotated[bool, typer.Option("--canny", help="Use the edges of the control images.")] = False,
    ip_adapter: Annotated[
        list[str] | None, typer.Option(help="An IP-Adapter and a reference image, NAME=FILE; repeatable.")
    ] = None,
    ip_adapter_scale: Annotated[
        list[str] | None, typer.Option(help="Strength of an IP-Adapter, NAME=NUMBER; repeatable.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for a model that is starting, and for each sign of progress.")
    ] = 300,
    **fields: Any,
) -> None:
    """Request images from a server, a gateway or a deployed model, and save them."""
    if prompt is None and not describe:
        raise typer.BadParameter("describe the image", param_hint="PROMPT")
    if previews is not None:
        _check_previews(previews, stream)
    if not describe:
        check_output_paths(out, suffix_of(out), images)
    request = parse_fields(fields) | {
        "prompt": prompt,
        "num_images": images,
        "output_format": format_of(out),
        "image": None if image is None else read_image_file(image),
        "masks": masks_of(
            mask or [],
            feather,
            {"prompt": mask_prompt, "negative_prompt": mask_negative_prompt, "strength": mask_strength},
        ),
        "controls": controls_of(
            control or [],
            canny,
            {
                "scale": control_scale or [],
                "start": control_start or [],
                "end": control_end or [],
                "mode": control_mode or [],
            },
        ),
        "ip_adapters": ip_adapters_of(ip_adapter or [], ip_adapter_scale or []),
        "loras": [parse_lora(text) for text in lora or []],
    }
    endpoint = parse_endpoint(url, api_key)
    if endpoint.exposes_key:
        print_warning(f"The key is sent to {endpoint.url} unencrypted. Use an https URL where others can listen.")
    if describe:
        with activity(f"Waiting for {endpoint.url}"):
            named = {"model": name} if (name := request.get("model")) is not None else {}
            described = call(endpoint, DESCRIBE | named, timeout)
        print(json.dumps(described, indent=2))
        return
    given = {name: value for name, value in request.items() if value is not None and value != []}
    if stream:
        with request_progress(endpoint, previews) as progress:
            response = call(endpoint, given, timeout, progress)
    else:
        with activity(f"Waiting for {endpoint.url}"):
            response = call(endpoint, given, timeout)
    print_response(response, save_images(response, out))


def save(out: Annotated[Path, typer.Option(help="Output file.")] = Path("image.png")) -> None:
    """Save the images of an answer from standard input: of a server, the gateway or `truss predict`."""
    check_writable(out)
    if sys.stdin is None:
        raise CallFailed("Standard input is closed.", remedy="Pipe the output of `truss predict` into this command.")
    for path in save_predicted(sys.stdin.buffer, out):
        say(plain(path))


def _check_previews(path: Path, stream: bool) -> None:
    if path.suffix.lower() not in _PREVIEW_SUFFIXES:
        raise typer.BadParameter(f"previews are JPEG files: {path} must end in .jpg", param_hint="--previews")
    if not stream:
        raise typer.BadParameter("needs a stream: leave out --no-stream", param_hint="--previews")
    check_writable(path)


def print_response(response: dict[str, Any], paths: list[Path]) -> None:
    """Print the times, warnings and saved files of a response. Raises CallFailed for one of another server."""
    table = Table("stage", "ms")
    try:
        for stage, milliseconds in response["timings"].items():
            table.add_row(plain(stage), f"{milliseconds:.0f}")
        table.add_row("request", f"{response['time'] * 1000:.0f}")
        warnings = [str(warning) for warning in response["warnings"]]
        notes = [f"seed {image['seed']}, {image['width']}x{image['height']}" for image in response["images"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CallFailed(
            f"{', '.join(map(str, paths))} is saved, but the rest of the response is invalid: {error!r}.",
            remedy="Check that --url is the URL of a Preheat server.",
        ) from error
    console.print(table)
    for warning in warnings:
        print_warning(warning)
    for path, note in zip(paths, notes, strict=True):
        say(f"[bold]{plain(path.resolve())}[/]  {plain(note)}")


@contextmanager
def request_progress(endpoint: Endpoint, previews: Path | None = None) -> Iterator[Callable[[Event], None]]:
    """Show a bar of a request's steps on a terminal, elsewhere lines. Yields a function that takes the events.

    `previews`: a file that is replaced by each preview.
    """
    waiting = f"Waiting for {endpoint.url}{_WAKING if endpoint.is_deployed else ''}"
    is_terminal = progress_console.is_terminal
    shown: set[str] = set()

    def show_state(sentence: str) -> None:
        if is_terminal:
            bar.update(task, description=plain(sentence))
        elif sentence not in shown:
            shown.add(sentence)
            notify(sentence)

    def show(event: Event) -> None:
        later.cancel()
        kind = event["event"]
        if kind == "starting":
            show_state(f"The model is starting, so the request is repeated ({event['reason']})")
        elif kind in ("accepted", "heartbeat") and is_terminal:
            show_state(f"Waiting behind {event['ahead']} images" if event["ahead"] else "Waiting")
            bar.update(task, total=event.get("steps"))
        elif kind == "step":
            done = max(event["step"], int(bar.tasks[0].completed))
            bar.update(task, description="Denoising", completed=done, total=event["steps"])
            if previews is not None and "preview" in event:
                write_file(previews, base64.b64decode(event["preview"], validate=True))
                if not is_terminal:
                    show_state(f"Step {event['step']} of {event['steps']}: {previews}")

    with notify_later(waiting) as later, steps_bar(transient=True, disable=not is_terminal) as bar:
        task = bar.add_task(plain(waiting), total=None)
        yield show


def format_of(out: Path) -> str:
    """Return the format of a request that the suffix of its file selects."""
    return {".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}.get(out.suffix.lower(), "png")


def suffix_of(out: Path) -> str:
    """Return the suffix of an image that is requested for `out`."""
    return {"jpeg": ".jpg", "webp": ".webp"}.get(format_of(out), ".png")
