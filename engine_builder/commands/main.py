"""The `preheat` command: builds, releases, benchmarks, a local server and its client."""

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from engine_builder.commands.bench import bench_app, report
from engine_builder.commands.build import build, run_build
from engine_builder.commands.build_arguments import parse_plan
from engine_builder.commands.calibrate import calibrate
from engine_builder.commands.check_config import check_config
from engine_builder.commands.check_fp8 import check_fp8
from engine_builder.commands.console import (
    DEFAULT_PROMPT,
    DEFAULT_STORE,
    DEMO_CONFIG,
    ROOT,
    SERVERS,
    CacheOption,
    ConfigOption,
    StoreOption,
    console,
    open_cli_store,
    parse_lora,
    plain,
    steps_bar,
)
from engine_builder.commands.export import export_onnx
from engine_builder.commands.gateway import gateway, playground
from engine_builder.commands.load import load
from engine_builder.commands.plan import plan_replicas
from engine_builder.commands.store import (
    add_embedding,
    add_lora,
    copy,
    gc,
    keygen,
    publish,
    releases,
    run_publish,
    verify,
)
from engine_builder.commands.triton import export_triton, triton_client
from engine_builder.files import check_writable
from engine_builder.local_server import demo as demo_run
from engine_builder.local_server.client import CallFailed, check_output_paths, save_images, save_predicted
from engine_builder.local_server.client import generate as call
from engine_builder.local_server.input_images import controls_of, ip_adapters_of, masks_of, read_image_file
from model.child_process import exit_now, hangs_at_exit
from model.errors import PreheatError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(bench_app)
for command in (
    build,
    calibrate,
    check_config,
    check_fp8,
    export_onnx,
    report,
    load,
    gateway,
    playground,
    plan_replicas,
    keygen,
    publish,
    add_embedding,
    add_lora,
    releases,
    verify,
    copy,
    gc,
    export_triton,
    triton_client,
):
    app.command()(command)


def main() -> None:
    """Run the command. A PreheatError ends it with status 1 and no traceback."""
    try:
        _run()
    except SystemExit as end:
        if hangs_at_exit():
            exit_now(end.code if isinstance(end.code, int) else 1)
        raise


def _run() -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported; see truss/configs/cpu-demo.yaml
    for stream in (sys.stdout, sys.stderr):
        # A name may hold bytes that are not UTF-8.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # otherwise the interpreter flushes at exit, and a full disk gives a traceback
    except PreheatError as error:
        _print_error(str(error))
        sys.exit(1)
    except BrokenPipeError:
        _discard_output()
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _discard_output()
        _print_error(f"The output cannot be written: {error.strerror}. Free some disk space.")
        sys.exit(1)


def _print_error(message: str) -> None:
    Console(stderr=True, highlight=False, emoji=False, soft_wrap=True).print(f"[bold red]preheat:[/] {plain(message)}")


def _discard_output() -> None:
    """Discard the buffered output, which would otherwise raise an error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.command()
def serve(
    release: Annotated[str, typer.Argument(envvar="PREHEAT_RELEASE", help="MODEL/VERSION.")],
    store: StoreOption = DEFAULT_STORE,
    config: ConfigOption = DEMO_CONFIG,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on 127.0.0.1.")] = 8080,
    cache_dir: CacheOption = None,
) -> None:
    """Run the real Truss server on this machine until it is interrupted."""
    opened_store = open_cli_store(store, cache_dir)
    opened_store.read_release(release)  # a missing release is refused before the server's files are laid out
    with demo_run.serving(ROOT, config, SERVERS, opened_store.url, release, port) as server:
        with console.status(f"Starting {plain(release)}"):
            server.wait_ready(600)
        console.print(f"Serving [bold]{plain(release)}[/] at {server.url}/v1/models/model:predict (Ctrl-C ends it)")
        _print_cold_start(demo_run.cold_start_phases(server.url))
        try:
            code = server.wait()
        except KeyboardInterrupt:
            console.print("Stopping")
            return
    raise PreheatError(f"The server ended unexpectedly (exit code {code}).")


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Description of the image.")],
    url: Annotated[str, typer.Option(help="The server, without a path.")] = "http://127.0.0.1:8080",
    out: Annotated[Path, typer.Option(help="Output file; several images get numbers.")] = Path("image.png"),
    negative_prompt: str | None = None,
    width: int | None = None,
    height: int | None = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    guidance_scale: float | None = None,
    scheduler: str | None = None,
    refiner: Annotated[bool | None, typer.Option(help="Finish with the refiner.")] = None,
    seed: int | None = None,
    lora: Annotated[list[str] | None, typer.Option(help="An adapter as NAME or NAME:SCALE, repeatable.")] = None,
    images: Annotated[int, typer.Option(help="Number of images.")] = 1,
    image: Annotated[Path | None, typer.Option(help="PNG, JPEG or WebP file to start from.")] = None,
    strength: Annotated[float | None, typer.Option(help="Share of the steps that run, from 0 to 1.")] = None,
    mask: Annotated[list[Path] | None, typer.Option(help="File whose white part is repainted; repeatable.")] = None,
    mask_prompt: Annotated[list[str] | None, typer.Option(help="Prompt of each mask, in the same order.")] = None,
    feather: Annotated[float, typer.Option(help="Blur the masks by this many pixels, for --composite.")] = 0,
    resize: Annotated[str | None, typer.Option(help="Fit the image: refuse, stretch, crop or pad.")] = None,
    composite: Annotated[bool, typer.Option("--composite", help="Keep the pixels outside of the masks.")] = False,
    color_match: Annotated[bool, typer.Option("--color-match", help="Match the colours around the masks.")] = False,
    control: Annotated[
        list[str] | None, typer.Option(help="A ControlNet and its control image as NAME=FILE, repeatable.")
    ] = None,
    control_scale: Annotated[
        list[float] | None, typer.Option(help="Strength of each ControlNet, in the same order.")
    ] = None,
    canny: Annotated[bool, typer.Option("--canny", help="Use the edges of the control images.")] = False,
    ip_adapter: Annotated[
        list[str] | None,
        typer.Option(help="An IP-Adapter and a reference image as NAME=FILE or NAME=FILE@SCALE, repeatable."),
    ] = None,
    upscale: Annotated[int | None, typer.Option(help="2: twice the width and height.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 300,
) -> None:
    """Request images from a running server and save them."""
    check_output_paths(out, _suffix_of(out), images)
    options = {
        "negative_prompt": negative_prompt,
        "width": width,
        "height": height,
        "num_inference_steps": steps,
        "guidance_scale": guidance_scale,
        "scheduler": scheduler,
        "use_refiner": refiner,
        "seed": seed,
        "image": None if image is None else read_image_file(image),
        "strength": strength,
        "masks": masks_of(mask or [], mask_prompt or [], feather) or None,
        "resize": resize,
        "composite": composite or None,
        "color_match": color_match or None,
        "upscale": upscale,
        "controls": controls_of(control or [], control_scale or [], canny) or None,
        "ip_adapters": ip_adapters_of(ip_adapter or []) or None,
        "loras": [parse_lora(text) for text in lora] if lora else None,
    }
    request: dict[str, Any] = {"prompt": prompt, "num_images": images, "output_format": _format_of(out)}
    request |= {key: value for key, value in options.items() if value is not None}
    with _progress() as progress:
        response = call(url, request, timeout, progress)
    _print_response(response, save_images(response, out))


@app.command()
def save(out: Annotated[Path, typer.Option(help="Output file.")] = Path("image.png")) -> None:
    """Save the images in the output of `truss predict`, read from standard input."""
    check_writable(out)
    if sys.stdin is None:
        raise CallFailed("Standard input is closed.", remedy="Pipe the output of `truss predict` into this command.")
    for path in save_predicted(sys.stdin.buffer, out):
        console.print(plain(path), soft_wrap=True)


@app.command()
def demo(
    prompt: Annotated[str, typer.Option(envvar="PROMPT")] = DEFAULT_PROMPT,
    seed: Annotated[int, typer.Option(envvar="SEED")] = 7,
    out: Annotated[Path, typer.Option(envvar="OUT")] = Path("demo.png"),
    refiner: Annotated[bool, typer.Option(help="Finish with the refiner.")] = False,
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = ROOT / "data" / "tiny-sdxl",
) -> None:
    """Build, publish, start the real server, request one image over HTTP, and print the times.

    Compiles only what the image needs: the refiner only with --refiner.
    """
    check_output_paths(out, _suffix_of(out), 1)
    store = open_cli_store(DEFAULT_STORE)
    draft = run_build(store, parse_plan(str(model), with_refiner=refiner))
    manifest = run_publish(store, draft.model)
    request = {"prompt": prompt, "seed": seed, "output_format": _format_of(out), "use_refiner": refiner}
    log = ROOT / ".preheat" / "demo" / "server.log"
    with demo_run.serving(ROOT, DEMO_CONFIG, SERVERS, store.url, manifest.name, kept_log=log) as server:
        with console.status("Starting the Truss server"):
            server.wait_ready(300)
        with _progress() as progress:
            response = call(server.url, request, 300, progress)
        cold_start = demo_run.cold_start_phases(server.url)
    _print_cold_start(cold_start)
    _print_response(response, save_images(response, out))


def _print_cold_start(phases: dict[str, float]) -> None:
    names = {"first_image": "process start to first image"}
    table = Table("cold start", "seconds", title_justify="left")
    for phase, seconds in phases.items():
        table.add_row(names.get(phase, phase), f"{seconds:.2f}")
    console.print(table)


def _print_response(response: dict[str, Any], paths: list[Path]) -> None:
    table = Table("stage", "ms")
    try:
        for stage, milliseconds in response["timings"].items():
            table.add_row(plain(stage), f"{milliseconds:.0f}")
        table.add_row("request", f"{response['time'] * 1000:.0f}")
        warnings = [plain(warning) for warning in response["warnings"]]
        notes = [f"seed {image['seed']}, {image['width']}x{image['height']}" for image in response["images"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CallFailed(
            f"{', '.join(map(str, paths))} is saved, but the rest of the response is invalid: {error!r}.",
            remedy="Check that --url is the URL of a Preheat server.",
        ) from error
    console.print(table)
    for warning in warnings:
        console.print(f"[yellow]warning[/] {warning}")
    for path, note in zip(paths, notes, strict=True):
        console.print(f"[bold]{plain(path.resolve())}[/]  {plain(note)}")


@contextmanager
def _progress() -> Iterator[Callable[[dict[str, Any]], None]]:
    """Show a bar of one request's steps. Yields the function that receives the server's events."""
    with steps_bar(transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Sending the request", total=None)

        def show(event: dict[str, Any]) -> None:
            if event["event"] in ("accepted", "heartbeat"):
                ahead = f" behind {event['ahead']} images" if event["ahead"] else ""
                progress.update(task, description=f"Waiting{ahead}", total=event.get("steps"))
            elif event["event"] == "step":
                done = max(event["step"], int(progress.tasks[0].completed))
                progress.update(task, description="Denoising", completed=done, total=event["steps"])

        yield show


def _format_of(out: Path) -> str:
    return {".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}.get(out.suffix.lower(), "png")


def _suffix_of(out: Path) -> str:
    return {"jpeg": ".jpg", "webp": ".webp"}.get(_format_of(out), ".png")


if __name__ == "__main__":
    main()
