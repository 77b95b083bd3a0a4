"""`preheat gateway` and `playground`: OpenAI's Images API and a page in front of Preheat's servers."""

from pathlib import Path
from typing import Annotated

import typer

from engine_builder.commands.build import run_build
from engine_builder.commands.build_arguments import parse_plan
from engine_builder.commands.console import (
    DEFAULT_STORE,
    DEMO_CONFIG,
    ROOT,
    SERVERS,
    StoreOption,
    console,
    open_cli_store,
    plain,
)
from engine_builder.commands.store import run_publish
from engine_builder.local_server import demo
from model.errors import PreheatError

PortOption = Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")]


def gateway(
    backend: Annotated[
        list[str] | None,
        typer.Option(help="A server without a path, or the URL of a deployed model's predict; repeatable."),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="File of API keys, one NAME KEY [IMAGES_PER_MINUTE] on each line.")
    ] = None,
    history: Annotated[
        Path | None, typer.Option(help="SQLite file for the finished requests; default: no history.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; another one than 127.0.0.1 needs keys.")
    ] = "127.0.0.1",
    port: PortOption = 8090,
) -> None:
    """Serve OpenAI's Images API and the playground page until interrupted."""
    _run(backend or ["http://127.0.0.1:8080"], key_file, host, port, history)


def playground(
    port: PortOption = 8090,
    store: StoreOption = DEFAULT_STORE,
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = ROOT / "data" / "tiny-sdxl",
) -> None:
    """Build and publish the demo model, start its server, and serve the playground page until interrupted."""
    opened_store = open_cli_store(store)
    manifest = run_publish(opened_store, run_build(opened_store, parse_plan(str(model), with_refiner=False)).model)
    with demo.serving(ROOT, DEMO_CONFIG, SERVERS, opened_store.url, manifest.name) as server:
        with console.status("Starting the Truss server"):
            server.wait_ready(300)
        _run([server.url], None, "127.0.0.1", port)


def _run(backends: list[str], key_file: Path | None, host: str, port: int, history: Path | None = None) -> None:
    try:
        from engine_builder.gateway.serve import prepare, run
    except ImportError as error:
        raise PreheatError(
            f"{error.name} is not installed.", "Install the extra: pip install 'preheat[gateway]'."
        ) from error

    prepared = prepare(backends, key_file, host, port, history)
    console.print(f"Playground at http://{plain(host)}:{port}/, OpenAI's API at http://{plain(host)}:{port}/v1")
    try:
        run(prepared)
    except KeyboardInterrupt:
        console.print("Stopping")
