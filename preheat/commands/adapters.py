"""The `preheat` commands for adapters and embeddings: add-lora, remove-lora, add-embedding."""

from pathlib import Path
from typing import Annotated

import typer

from preheat.commands.releases import describe_adapter, published, read_private_key
from preheat.console import (
    DEFAULT_STORE,
    CacheOption,
    SignOption,
    StoreOption,
    activity,
    open_cli_store,
    plain,
    print_warning,
    say,
)


def add_lora(
    name: Annotated[str, typer.Argument(help="Name of the adapter in the store and in requests.")],
    path: Annotated[Path, typer.Argument(help="Its safetensors file, or the folder that PEFT or diffusers wrote.")],
    store: StoreOption = DEFAULT_STORE,
    release: Annotated[
        str | None, typer.Option(help="MODEL/VERSION that it must fit; default: any release of the store.")
    ] = None,
    embeddings: Annotated[
        str | None,
        typer.Option(
            help="MODEL/VERSION, built with --embedding-rows: publish its next version with the file's embeddings."
        ),
    ] = None,
    sign: SignOption = None,
    cache_dir: CacheOption = None,
) -> None:
    """Add an adapter to a store, for all releases of its architecture: LoRA, LoHa, LoKr, DoRA. It is written once."""
    from engine_builder.adapters.add import add_adapter
    from engine_builder.adapters.read import AdapterFile
    from engine_builder.embeddings.add import add_embeddings

    private_key = read_private_key(sign)
    opened_store = open_cli_store(store, cache_dir)
    lines: list[str] = []

    def add_bundled(file: AdapterFile) -> None:
        if not file.embeddings:
            raise typer.BadParameter(f"{path} has no embeddings", param_hint="--embeddings")
        assert embeddings is not None
        manifest, is_new = add_embeddings(opened_store, embeddings, file.embeddings, private_key, print_warning)
        lines.append(f"{published(manifest, is_new)} with {plain(', '.join(file.embeddings))}.")

    with activity(f"Adding {path}"):
        record, fitting, is_new = add_adapter(
            opened_store, name, path, release or embeddings, private_key, print_warning,
            None if embeddings is None else add_bundled,
        )  # fmt: skip
    for line in lines:
        say(line)
    say(
        f"{'Added' if is_new else 'Unchanged:'} [bold]{plain(name)}[/], {plain(describe_adapter(record))}. "
        f"It fits {plain(fitting)}."
    )


def remove_lora(
    name: Annotated[str, typer.Argument(help="Name of the adapter.")],
    store: StoreOption = DEFAULT_STORE,
    cache_dir: CacheOption = None,
) -> None:
    """Remove an adapter from a store. Servers whose `loras` has a pattern of its name refuse it some seconds later.

    Requests that have begun finish. `preheat gc` deletes its tensors.
    """
    open_cli_store(store, cache_dir).delete_adapter(name)
    say(f"Removed [bold]{plain(name)}[/].")


def add_embedding(
    release: Annotated[str, typer.Argument(help="MODEL/VERSION, built with --embedding-rows.")],
    embeddings: Annotated[list[str], typer.Argument(help="TOKEN=FILE or TOKEN=FILE,FILE of each embedding.")],
    store: StoreOption = DEFAULT_STORE,
    sign: SignOption = None,
    cache_dir: CacheOption = None,
) -> None:
    """Publish the next version of a release with embeddings, whose tokens prompts may use."""
    from engine_builder.embeddings.add import add_embeddings, open_embeddings

    private_key = read_private_key(sign)
    files = open_embeddings(embeddings)
    with activity(f"Adding {', '.join(files)}"):
        manifest, is_new = add_embeddings(open_cli_store(store, cache_dir), release, files, private_key, print_warning)
    say(f"{published(manifest, is_new)} with {plain(', '.join(files))}.")
