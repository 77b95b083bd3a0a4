"""The `preheat` commands for releases and stores: keygen, publish, releases, verify, copy, gc."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine_builder.stores.store import WritableStore
from model.errors import AdapterError, CorruptBlob, ManifestError, StoreError, UntrustedRelease
from model.pipeline.spec import UNET, VAE_DECODER
from model.store.adapter_record import AdapterRecord
from model.store.manifest import Blob, Manifest
from model.store.manifest_json import printable
from model.store.signature import check_signature, parse_public_keys
from model.store.store import Store
from preheat.console import (
    DEFAULT_STORE,
    CacheOption,
    SignOption,
    StoreOption,
    activity,
    console,
    meter,
    open_cli_store,
    plain,
    print_warning,
    save_report,
    say,
    tracked,
)

Entry = TypeVar("Entry", Manifest, AdapterRecord)


def keygen(file: Annotated[Path, typer.Argument(help="New file for the private key.")]) -> None:
    """Make a private key that signs releases. Prints its public key, as a line for a deployment's config."""
    from engine_builder.releases.signing import write_key

    key = write_key(file)
    say(
        f"Wrote the private key {key.key_id} to {plain(file)}.\nKeep it secret, and keep a copy.\n"
        f"For model_metadata.preheat in the config, or PREHEAT_PUBLIC_KEY:\npublic_key: {key}"
    )


def publish(
    name: Annotated[str, typer.Argument(help="MODEL/VERSION, or MODEL for the next number.")],
    store: StoreOption = DEFAULT_STORE,
    sign: SignOption = None,
    thresholds: Annotated[
        Path | None, typer.Option(help="TOML file: limits that the validation of FP8 engines must keep.")
    ] = None,
    accept: Annotated[
        bool, typer.Option("--accept", help="Publish FP8 engines that violate limits; the release lists them.")
    ] = False,
    without_fp8: Annotated[
        bool, typer.Option("--without-fp8", help="Leave out FP8 builds; a later release may have them.")
    ] = False,
) -> None:
    """Publish the builds of a model as one release, which is written once.

    FP8 engines need a stored validation that keeps all limits (`preheat check-fp8`).
    """
    if without_fp8 and (accept or thresholds):
        raise typer.BadParameter("contradicts --accept and --thresholds", param_hint="--without-fp8")
    run_publish(open_cli_store(store, must_exist=True), name, sign, thresholds, accept, without_fp8)


def run_publish(
    store: WritableStore,
    name: str,
    key_file: Path | None = None,
    threshold_file: Path | None = None,
    accept: bool = False,
    without_fp8: bool = False,
) -> Manifest:
    """Publish, and print the result."""
    from engine_builder.quantization.validation.thresholds import Thresholds
    from engine_builder.releases.publish import publish as publish_drafts

    thresholds = Thresholds.read(threshold_file) if threshold_file else None
    private_key = read_private_key(key_file)
    with activity(f"Publishing {name}"):
        manifest, is_new = publish_drafts(store, name, private_key, thresholds, accept, without_fp8, print_warning)
    _print_accepted(manifest)
    say(
        f"{published(manifest, is_new)}: {len(manifest.engines)} engines for {plain(', '.join(manifest.targets))}, "
        f"{_size(manifest)} in {len(manifest.blobs())} blobs, {_signer(manifest)}"
    )
    return manifest


def read_private_key(file: Path | None) -> Ed25519PrivateKey | None:
    from engine_builder.releases.signing import read_key

    return read_key(file) if file else None


def published(manifest: Manifest, is_new: bool) -> str:
    return f"{'Published' if is_new else 'Unchanged since'} [bold]{plain(manifest.name)}[/]"


def _size(manifest: Manifest) -> str:
    return f"{total_bytes(manifest) / 2**20:.0f} MiB"


def _signer(entry: Manifest | AdapterRecord) -> str:
    return f"signed by {plain(entry.signature.key_id)}" if entry.signature else "not signed"


def _print_accepted(manifest: Manifest) -> None:
    for violation in manifest.validation.violations if manifest.validation else ():
        say(f"[yellow]accepted[/] {plain(violation)}")


def releases(
    store: StoreOption = DEFAULT_STORE,
    validation: Annotated[
        str | None, typer.Option(help="MODEL/VERSION: show the validation of its FP8 engines instead.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="With --validation: folder for report.json and pairs.png.")] = None,
) -> None:
    """List the releases and the adapters of a store. Exit status 1 if one of them cannot be read."""
    if out is not None and validation is None:
        raise typer.BadParameter("is an option of --validation", param_hint="--out")
    opened_store = open_cli_store(store, must_exist=True)
    if validation is not None:
        _show_validation(opened_store, validation, out)
        return
    with activity(f"Reading {opened_store.url}"):
        names, adapter_names = opened_store.releases(), [*opened_store.adapters()]
        manifests = _read_each(opened_store.read_release, names)
        adapters = _read_each(opened_store.read_adapter, adapter_names)
    for manifest in manifests:
        size = f"{len(manifest.components)} components, {_size(manifest)}"
        created = f"{printable(manifest.created[:10])} {printable(manifest.created[11:16])} UTC"
        facts = f"{created}, {_precisions(manifest)}, {size}, {_signer(manifest)}"
        lines = [facts, *manifest.targets]
        if manifest.validation is not None:
            lines.append("validated" if not manifest.validation.accepted else "published with violated limits")
        say("\n    ".join([f"[bold]{plain(manifest.name)}[/]", *map(plain, lines)]))
    if not names:
        say(f"{plain(opened_store.url)} has no release. Run preheat build and preheat publish.")
    for record in adapters:
        say(f"[bold]{plain(record.name)}[/]\n    adapter, {plain(describe_adapter(record))}")
    if len(manifests) + len(adapters) < len(names) + len(adapter_names):
        raise typer.Exit(1)


def _show_validation(store: Store, name: str, out: Path | None) -> None:
    """Print the report of a release's validation, and write its files into a folder."""
    from engine_builder.files import check_folder
    from engine_builder.quantization.validation.report import describe
    from engine_builder.quantization.validation.stored import read_report

    manifest = store.read_release(name)
    if manifest.validation is None:
        say(f"{plain(name)} has no validation: only FP8 engines need one.")
        return
    files = {"report.json": manifest.validation.report, "pairs.png": manifest.validation.pictures}
    if out is not None:
        check_folder(out, *files)
    report = read_report(store, manifest.validation.report)
    console.print(describe(report))
    _print_accepted(manifest)
    if out is not None:
        save_report(out, {file: store.get(blob.sha256, blob.bytes).read_bytes() for file, blob in files.items()})


def _read_each(read: Callable[[str], Entry], names: list[str], is_requested: bool = False) -> list[Entry]:
    """Return what `read` returns for the names that can be read. Prints the errors of the others.

    `is_requested`: the user named the entry, so StoreError is raised, also if the entry is missing.
    """
    entries = []
    for name in names:
        try:
            entries.append(read(name))
        except (ManifestError, AdapterError, StoreError) as error:
            if is_requested and isinstance(error, StoreError):
                raise
            say(f"[red]unreadable[/] {plain(error)}")
    return entries


def describe_adapter(record: AdapterRecord) -> str:
    """Return "700 layers of rank 16, 90.1 MiB, signed by 1a2b3c4d"."""
    ranks = sorted({layer.rank for layer in record.layers.values() if layer.rank is not None})
    shown = f" of rank {ranks[0]}{f' to {ranks[-1]}' if len(ranks) > 1 else ''}" if ranks else ""
    merged = sum(layer.rank is None for layer in record.layers.values())
    merged_only = f" ({merged} only to merge)" if merged else ""
    size = f"{record.total_bytes / 2**20:.1f} MiB"
    return f"{len(record.layers)} layers{shown}{merged_only}, {size}, {_signer(record)}"


def _precisions(manifest: Manifest) -> str:
    """Return the UNet's precisions and, if they differ, the VAE decoder's: "fp16, VAE fp32"."""
    unet, vae = (
        " ".join(sorted({engine.precision.name for engine in manifest.engines if engine.component == component}))
        for component in (UNET, VAE_DECODER)
    )
    return unet if vae == unet else f"{unet}, VAE {vae}"


def verify(
    name: Annotated[
        str | None,
        typer.Argument(help="MODEL/VERSION, or the name of an adapter; default: every release and adapter."),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    public_key: Annotated[
        str | None,
        typer.Option(envvar="PREHEAT_PUBLIC_KEY", help="Also check signatures with these keys, separated by commas."),
    ] = None,
) -> None:
    """Hash every blob of releases and adapters, in the store itself, and check signatures. Exit status 1 if anything is
    damaged, unreadable, or not signed by --public-key, or if the store is empty."""
    keys = parse_public_keys(public_key)
    opened_store = open_cli_store(store, must_exist=True)
    with activity(f"Reading {opened_store.url}"):
        names = [name] if name else [*opened_store.releases(), *opened_store.adapters()]
        release_names = [name for name in names if _is_release(name)]
        adapter_names = [name for name in names if not _is_release(name)]
        manifests = _read_each(opened_store.read_release, release_names, bool(name))
        adapters = _read_each(opened_store.read_adapter, adapter_names, bool(name))
    if not names:
        raise StoreError(
            f"{opened_store.url} has no release and no adapter.", "Check --store and the variable PREHEAT_STORE."
        )
    blobs = {digest: blob for manifest in manifests for digest, blob in manifest.blobs().items()}
    blobs |= {blob.sha256: blob for record in adapters for blob in record.blobs}
    untrusted = 0
    entries: list[Manifest | AdapterRecord] = [*manifests, *adapters]
    for entry in entries:
        try:
            check_signature(entry, keys)
            unchecked = " (not checked: give --public-key)" if entry.signature and not keys else ""
            say(f"{plain(entry.name)} is {_signer(entry)}{unchecked}")
        except UntrustedRelease as error:
            untrusted += 1
            say(f"[red]untrusted[/] {plain(error)}")

    def check(blob: Blob) -> str | None:
        try:
            opened_store.check(blob.sha256, blob.bytes)
        except CorruptBlob as error:
            return str(error)
        return None

    with ThreadPoolExecutor(4) as pool:
        checked = tracked(pool.map(check, blobs.values()), len(blobs), "Hashing blobs")
        damaged = [message for message in checked if message]
    for message in damaged:
        console.print(f"[red]damaged[/] {plain(message)}")
    kinds = [(len(manifests), "release"), (len(adapters), "adapter")]
    counted = " and ".join(f"{count} {kind}{'s' if count > 1 else ''}" for count, kind in kinds if count)
    console.print(f"{len(blobs) - len(damaged)} of {len(blobs)} blobs of {counted or 'nothing'} are intact.")
    if damaged or untrusted or len(manifests) + len(adapters) < len(names):
        raise typer.Exit(1)


def copy(
    name: Annotated[str, typer.Argument(help="MODEL/VERSION, or the name of an adapter.")],
    source: Annotated[str, typer.Option("--from", help="The store that has it.")] = DEFAULT_STORE,
    store: StoreOption = DEFAULT_STORE,
    cache_dir: CacheOption = None,
) -> None:
    """Copy a release or an adapter to another store, for example from this machine's folder to s3://bucket."""
    from engine_builder.releases.mirror import copy_adapter, copy_release

    stores = open_cli_store(source, cache_dir, must_exist=True), open_cli_store(store, cache_dir)
    if stores[0].url == stores[1].url:
        raise typer.BadParameter(f"both stores are {stores[0].url}", param_hint="--from and --store")
    transfers = sum(store.url.startswith("s3:") for store in stores)  # of every byte, which the meter counts
    began = time.perf_counter()
    with meter.show(f"Copying {name}") as set_total:
        if _is_release(name):
            manifest, is_new = copy_release(
                *stores, name, lambda manifest: set_total(transfers * total_bytes(manifest))
            )
            size = total_bytes(manifest)
        else:
            record, is_new = copy_adapter(*stores, name, lambda record: set_total(transfers * record.total_bytes))
            size = record.total_bytes
    if is_new:
        seconds = time.perf_counter() - began
        say(f"Copied [bold]{plain(name)}[/] to {plain(stores[1].url)}: {size / 2**20:.0f} MiB in {seconds:.1f} s")
    else:
        say(f"[bold]{plain(name)}[/] already exists in {plain(stores[1].url)}.")


def _is_release(name: str) -> bool:
    """True for MODEL/VERSION. Names of adapters have no slash."""
    return "/" in name


def total_bytes(manifest: Manifest) -> int:
    """Return the bytes of all blobs that a release names."""
    return sum(blob.bytes for blob in manifest.blobs().values())


def gc(
    store: StoreOption = DEFAULT_STORE,
    older_than: Annotated[
        str, typer.Option(help="Keep younger blobs, which may belong to a running build, e.g. 24h or 7d.")
    ] = "24h",
    delete: Annotated[bool, typer.Option("--delete", help="Delete them; without this option nothing changes.")] = False,
) -> None:
    """Find the blobs that no release, adapter or record names, and delete them with --delete."""
    from engine_builder.releases.gc import delete_garbage, find_garbage, read_age

    opened_store = open_cli_store(store, must_exist=True)
    with activity(f"Reading {opened_store.url}"):
        garbage = find_garbage(opened_store, read_age(older_than))
    for digest, size in sorted(garbage.blobs.items(), key=lambda entry: -entry[1]):
        console.print(f"{digest}  {size / 2**20:10.2f} MiB")
    unnamed = f"{len(garbage.blobs)} blobs, {garbage.bytes / 2**20:.1f} MiB, are unnamed"
    others = f"{garbage.named_count} are named and {garbage.young_count} are younger than {plain(older_than)}"
    if not delete:
        console.print(f"{unnamed} ({others}). Nothing was deleted: add --delete.")
        return
    with activity(f"Deleting {len(garbage.blobs)} blobs"):
        freed = delete_garbage(opened_store, garbage)
    console.print(f"{unnamed} ({others}); {freed / 2**20:.1f} MiB freed in {plain(opened_store.url)}.")
