"""`preheat gateway`: OpenAI's Images API and a playground page in front of Preheat's servers."""

from pathlib import Path
from typing import Annotated

import typer

from engine_builder.commands.console import console, plain
from model.errors import PreheatError


def gateway(
    backend: Annotated[
        list[str] | None,
        typer.Option(help="A server without a path, or the URL of a deployed model's predict; repeatable."),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="File of API keys, one NAME KEY [IMAGES_PER_MINUTE] on each line.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; another one than 127.0.0.1 needs keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8090,
) -> None:
    """Serve OpenAI's Images API and the playground page until interrupted."""
    try:
        from engine_builder.gateway.serve import prepare, run
    except ImportError as error:
        raise PreheatError(
            f"{error.name} is not installed.", "Install the extra: pip install 'preheat[gateway]'."
        ) from error

    prepared = prepare(backend or ["http://127.0.0.1:8080"], key_file, host, port)
    console.print(f"Playground at http://{plain(host)}:{port}/, OpenAI's API at http://{plain(host)}:{port}/v1")
    try:
        run(prepared)
    except KeyboardInterrupt:
        console.print("Stopping")
    except OSError as error:
        raise PreheatError(f"The gateway failed: {error.strerror or error}.") from error
