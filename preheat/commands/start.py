"""`preheat demo` and `preheat serve`: the first image, and a server on this machine."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from gateway.endpoint import LOOPBACK, parse_endpoint
from model.deployment import resolve_releases
from model.errors import PreheatError
from model.settings import read_settings
from preheat.commands.build import run_build
from preheat.commands.build_arguments import parse_plan
from preheat.commands.generate import format_of, print_response, request_progress, suffix_of
from preheat.commands.releases import run_publish
from preheat.console import (
    DEFAULT_PROMPT,
    DEFAULT_STORE,
    DEMO_CONFIG,
    ROOT,
    SERVERS,
    CacheOption,
    ConfigOption,
    ServedStoreOption,
    activity,
    console,
    open_cli_store,
    open_served_store,
    plain,
    print_warning,
    read_served_settings,
)
from preheat.local_server import demo as demo_run
from preheat.local_server.client import check_output_paths, save_images
from preheat.local_server.client import generate as call


def serve(
    releases: Annotated[
        list[str] | None,
        typer.Argument(
            envvar="PREHEAT_RELEASE", help="MODEL/VERSION; MODEL/* stands for all versions. Default: the config's."
        ),
    ] = None,
    store: ServedStoreOption = None,
    config: ConfigOption = DEMO_CONFIG,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0: every address of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8080,
    cache_dir: CacheOption = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            help="An adapter of the store that requests may use, repeatable; style-* stands for all that begin with "
            "style-, also later ones. Default: `loras` of the config."
        ),
    ] = None,
) -> None:
    """Run the real Truss server on this machine until it is interrupted.

    Ctrl-C and SIGTERM let accepted requests finish within the grace period (PREHEAT_GRACE_SECONDS). A second Ctrl-C
    ends it, and a third one kills the server.
    """
    read_settings({"loras": lora or []}, variables=())  # a wrong name is refused before the server's files are laid out
    settings = read_served_settings(config)
    opened_store = open_served_store(store, settings, cache_dir)
    names = resolve_releases(releases or settings.release_patterns(), opened_store)
    for name in names:
        opened_store.read_release(name)
    listed = ", ".join(names)
    with demo_run.serving(ROOT, config, SERVERS, opened_store.url, names, port, host, loras=lora or ()) as server:
        if host not in LOOPBACK:
            print_warning(
                f"Everyone who reaches port {port} of {host} can request images. `preheat gateway` in front of a "
                "server on 127.0.0.1 asks for API keys."
            )
        with activity(f"Starting {listed}"):
            server.wait_ready(600)
        console.print(f"Serving [bold]{plain(listed)}[/] at {server.url}/v1/models/model:predict (Ctrl-C ends it)")
        _print_cold_start(demo_run.cold_start_phases(server.url))
        try:
            code = server.wait()
        except KeyboardInterrupt:
            console.print("Stopping after the accepted requests")
            return
    raise PreheatError(f"The server ended unexpectedly (exit code {code}).")


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
    with demo_run.serving(ROOT, DEMO_CONFIG, SERVERS, store.url, [manifest.name], kept_log=log) as server:
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
