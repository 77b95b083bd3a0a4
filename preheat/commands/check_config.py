"""`preheat check-config`: find before a push what would fail after it."""

from pathlib import Path
from typing import Annotated

import typer

from preheat.console import activity, plain, print_warning, say


def check_config(
    config: Annotated[Path, typer.Argument(help="The deployment's config.yaml.")],
    store: Annotated[str | None, typer.Option(help="Check against this store instead of the config's.")] = None,
) -> None:
    """Check a config.yaml and the release that it names before `truss push`. Exit status 1 if it would not serve."""
    with activity(f"Checking {config}"):
        from engine_builder.releases.deployment import check_deployment

        check = check_deployment(config, store)
    for error in check.refusals:
        say(f"[red]refused[/] {plain(error)}")
    for warning in check.warnings:
        print_warning(warning)
    for line in check.served:
        say(plain(line))
    if check.refusals:
        raise typer.Exit(1)
