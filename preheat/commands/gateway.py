"""`preheat gateway` and `playground`: OpenAI's Images API and a page in front of Preheat's servers."""

import asyncio
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from engine_builder.error_text import cause_of
from gateway.listening import listen
from model.errors import PreheatError
from preheat.commands.build import run_build
from preheat.commands.build_arguments import parse_plan
from preheat.commands.releases import run_publish
from preheat.console import (
    DEFAULT_STORE,
    DEMO_CONFIG,
    ROOT,
    SERVERS,
    StoreOption,
    activity,
    console,
    open_cli_store,
    plain,
    print_warning,
    say,
)
from preheat.local_server import demo

DEFAULT_BACKEND = "http://127.0.0.1:8080"
_STATE_SECONDS = 2.0  # in which a server must state whether it is ready
PortOption = Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")]


def gateway(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            show_default=DEFAULT_BACKEND,
            help="A server without a path, or the URL of a deployed model's predict; repeatable.",
        ),
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
    _run(backend or [DEFAULT_BACKEND], key_file, host, port, history)


def playground(
    port: PortOption = 8090,
    store: StoreOption = DEFAULT_STORE,
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = ROOT / "data" / "tiny-sdxl",
) -> None:
    """Build and publish the demo model, start its server, and serve the playground page until interrupted."""
    # Before the build, which takes minutes.
    listen("127.0.0.1", port, _import_serve().GatewayConfigError).close()
    opened_store = open_cli_store(store)
    manifest = run_publish(opened_store, run_build(opened_store, parse_plan(str(model), with_refiner=False)).model)
    with demo.serving(ROOT, DEMO_CONFIG, SERVERS, opened_store.url, [manifest.name]) as server:
        with activity("Starting the Truss server"):
            server.wait_ready(300)
        _run([server.url], None, "127.0.0.1", port)


def _run(backends: list[str], key_file: Path | None, host: str, port: int, history: Path | None = None) -> None:
    serve = _import_serve()
    prepared = serve.prepare(backends, key_file, host, port, history)
    with activity("Asking the backends whether they are ready"):
        states = asyncio.run(_describe_states(prepared.backends.all))
    for problem, sentence in states:
        print_warning(sentence) if problem else say(plain(sentence))
    console.print(f"Playground at http://{plain(host)}:{port}/, OpenAI's API at http://{plain(host)}:{port}/v1")
    try:
        serve.run(prepared)
    except KeyboardInterrupt:
        console.print("Stopping")


def _import_serve() -> Any:
    try:
        return importlib.import_module("gateway.serve")
    except ImportError as error:
        raise PreheatError(
            f"{error.name} is not installed.", "Install the extra: pip install 'preheat[gateway]'."
        ) from error


async def _describe_states(backends: Sequence[Any]) -> list[tuple[bool, str]]:
    return await asyncio.gather(*map(_describe_state, backends))


async def _describe_state(backend: Any) -> tuple[bool, str]:
    """Return True for a backend that cannot be used now, and a sentence on its state."""
    if backend.health_url is None and not backend.headers:
        return True, f"Backend {backend.name} gets no API key: the variable PREHEAT_BACKEND_API_KEY is not set."
    if backend.health_url is None:
        return False, f"Backend {backend.name} is a deployed model, which is not asked: that would start a replica."
    try:
        async with (
            asyncio.timeout(_STATE_SECONDS),
            httpx.AsyncClient(trust_env=not backend.is_loopback) as client,
            client.stream("GET", backend.health_url) as answer,  # its body may be of any size
        ):
            status = answer.status_code
    except (httpx.HTTPError, TimeoutError) as error:
        cause = cause_of(error) if isinstance(error, httpx.HTTPError) else "no answer"
        fix = "Start it with `preheat serve`" if backend.is_loopback else "Check its URL"
        return True, f"Backend {backend.name} does not answer: {cause}. {fix}; it is asked again every few seconds."
    if status == 200:
        return False, f"Backend {backend.name} is ready."
    if status == 503:
        return True, f"Backend {backend.name} is not ready yet (status 503); it is asked again every few seconds."
    return True, f"Backend {backend.name} answers with status {status}, not as a server of Preheat."
