"""`preheat check-config` and `preheat weights`: find before a push what would fail after it, and what it mounts."""

from pathlib import Path
from typing import Annotated

import typer

from preheat.console import DEFAULT_STORE, StoreOption, activity, open_cli_store, plain, print_warning, say

_ABOUT_ENTRIES = """\
# For config.yaml. A private bucket needs its credentials in the entry of weights, such as `auth_secret_name: NAME` with
# the name of a secret of the platform. Print the entries again for another release, GPU, size or adapter.
"""


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


def weights(
    names: Annotated[list[str], typer.Argument(metavar="name", help="The releases, MODEL/VERSION.")],
    store: StoreOption = DEFAULT_STORE,
    config: Annotated[
        Path | None,
        typer.Option(help="A deployment's config.yaml: only the files for its GPU, sizes and adapters."),
    ] = None,
    mount: Annotated[str, typer.Option(help="The folder in the replica.")] = "/app/preheat-store",
) -> None:
    """Print the entries of a config.yaml with which the platform mounts releases before a replica starts."""
    import yaml

    from engine_builder.releases.deployment import check_deployment
    from engine_builder.releases.mounts import files_of, mounting_entries

    if config is None:
        opened = open_cli_store(store, must_exist=True)
        files = [*dict.fromkeys(key for name in names for key in files_of(opened.read_release(name)))]
    else:
        check = check_deployment(config, store, names)
        for error in check.refusals:
            say(f"[red]refused[/] {plain(error)}")
        if check.refusals:
            raise typer.Exit(1)
        files = check.files
    print(_ABOUT_ENTRIES + yaml.safe_dump(mounting_entries(store, names, mount, files), sort_keys=False), end="")
