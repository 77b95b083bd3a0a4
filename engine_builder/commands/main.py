"""The `preheat` command: builds, releases, benchmarks, a local server and its client."""

import errno
import io
import os
import sys
import tomllib
from pathlib import Path
from typing import Annotated

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
    activity,
    console,
    open_cli_store,
    plain,
)
from engine_builder.commands.export import export_onnx
from engine_builder.commands.gateway import gateway, playground
from engine_builder.commands.generate import format_of, generate, print_response, request_progress, save, suffix_of
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
from engine_builder.interrupts import handle_signals, last_signal
from engine_builder.local_server import demo as demo_run
from engine_builder.local_server.client import check_output_paths, save_images
from engine_builder.local_server.client import generate as call
from engine_builder.local_server.endpoint import parse_endpoint
from model.child_process import exit_now, hangs_at_exit
from model.errors import PreheatError

_INTERRUPTED = 130  # typer's exit code after KeyboardInterrupt
PROGRAM = "preheat"  # also where it is started as a module
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench_app)
for command in (
    build, calibrate, check_config, check_fp8, export_onnx, report, load, gateway, playground, plan_replicas, keygen,
    publish, add_embedding, add_lora, releases, verify, copy, gc, export_triton, triton_client, generate, save,
):  # fmt: skip
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        console.print(f"{PROGRAM} {project['version']}")
        raise typer.Exit


@app.callback()
def preheat(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Build, publish, serve and call engines of Stable Diffusion."""


@app.command(name="help")
def help_page(command: Annotated[list[str] | None, typer.Argument(help="The command; default: all.")] = None) -> None:
    """Show the help of a command."""
    app([*(command or ()), "--help"], prog_name=PROGRAM)


def main() -> None:
    """Run the command. A PreheatError ends it with status 1 and no traceback, a signal with 128 and its number."""
    handle_signals()
    try:
        _run()
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            _print_error(f"Stopped by {last_signal().name}.")
            end.code = 128 + last_signal()
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
            app(prog_name=PROGRAM)
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
    """Run the real Truss server on this machine until it is interrupted.

    Ctrl-C and SIGTERM let accepted requests finish within the grace period (PREHEAT_GRACE_SECONDS). A second Ctrl-C
    ends it, and a third one kills the server.
    """
    opened_store = open_cli_store(store, cache_dir)
    opened_store.read_release(release)  # a missing release is refused before the server's files are laid out
    with demo_run.serving(ROOT, config, SERVERS, opened_store.url, release, port) as server:
        with activity(f"Starting {release}"):
            server.wait_ready(600)
        console.print(f"Serving [bold]{plain(release)}[/] at {server.url}/v1/models/model:predict (Ctrl-C ends it)")
        _print_cold_start(demo_run.cold_start_phases(server.url))
        try:
            code = server.wait()
        except KeyboardInterrupt:
            console.print("Stopping after the accepted requests")
            return
    raise PreheatError(f"The server ended unexpectedly (exit code {code}).")


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
    check_output_paths(out, suffix_of(out), 1)
    store = open_cli_store(DEFAULT_STORE)
    draft = run_build(store, parse_plan(str(model), with_refiner=refiner))
    manifest = run_publish(store, draft.model)
    request = {"prompt": prompt, "seed": seed, "output_format": format_of(out), "use_refiner": refiner}
    log = ROOT / ".preheat" / "demo" / "server.log"
    with demo_run.serving(ROOT, DEMO_CONFIG, SERVERS, store.url, manifest.name, kept_log=log) as server:
        with activity("Starting the Truss server"):
            server.wait_ready(300)
        endpoint = parse_endpoint(server.url, variables={})
        with request_progress(endpoint) as progress:
            response = call(endpoint, request, 300, progress)
        cold_start = demo_run.cold_start_phases(server.url)
    _print_cold_start(cold_start)
    print_response(response, save_images(response, out))


def _print_cold_start(phases: dict[str, float]) -> None:
    names = {"first_image": "process start to first image"}
    table = Table("cold start", "seconds", title_justify="left")
    for phase, seconds in phases.items():
        table.add_row(names.get(phase, phase), f"{seconds:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
