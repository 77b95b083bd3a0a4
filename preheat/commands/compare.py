"""The command `preheat compare`: a release next to diffusers, or next to a server, on the user's own weights."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from engine_builder.files import NotWritable, check_folder
from engine_builder.stores.store import WritableStore
from gateway.endpoint import Endpoint, parse_endpoint
from model.deployment import version_number
from model.errors import ReleaseNotFound
from model.validation import MAX_STEPS
from preheat.commands.build_arguments import default_name
from preheat.commands.model_options import ConfigOption, ModelArgument, find_parts
from preheat.console import (
    DEFAULT_PROMPT,
    DEFAULT_STORE,
    CacheOption,
    StoreOption,
    activity,
    console,
    notify,
    open_cli_store,
    plain,
    print_warning,
    progress_console,
    save_report,
    say,
)
from preheat.request_list import BadRequestFile, bad_request, read_request_list

if TYPE_CHECKING:
    from engine_builder.checkpoints.folder import Checkpoint
    from model.request_fields import GenerationRequest

PROMPTS = (
    DEFAULT_PROMPT,
    "two green squares on a white background",
    "three small yellow triangles on a black background",
)
FILES = ("report.html", "pictures.png", "report.json")
_DIFFUSERS = "diffusers"
_MAX_REQUESTS = 32


def compare(
    model: ModelArgument,
    against: Annotated[
        str, typer.Option(help="diffusers, or the URL of a server with this API, whose pictures are the reference.")
    ] = _DIFFUSERS,
    requests: Annotated[
        Path | None, typer.Option(help="JSON list of requests with fields of docs/requests.md; default: three prompts.")
    ] = None,
    release: Annotated[
        str | None, typer.Option(help="MODEL/VERSION; default: the newest release of MODEL in the store.")
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Also measure diffusers under torch.compile, which takes minutes.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, max=MAX_STEPS, help="Denoising steps of requests that state none.")] = 20,
    runs: Annotated[int, typer.Option(min=1, help="Number of counted runs of the first request.")] = 8,
    per_hour: Annotated[
        float | None,
        typer.Option(min=0, max=1e6, help="Price of this machine per hour, for the cost of 1,000 images."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for report.html, pictures.png and report.json; default: compare-NAME."),
    ] = None,
    config: ConfigOption = None,
    store: StoreOption = DEFAULT_STORE,
    cache_dir: CacheOption = None,
) -> None:
    """Compare a release with diffusers on the same weights: pictures, seconds, memory and cost.

    The variants are diffusers, the release, the release in 8 bits, and with forecasts. Needs no server.
    """
    endpoint = None if against == _DIFFUSERS else parse_endpoint(against)
    if compiled and endpoint is not None:
        raise typer.BadParameter("needs --against diffusers", param_hint="--compiled")
    opened = open_cli_store(store, cache_dir, must_exist=True)
    manifest = opened.read_release(release or find_newest(opened, model))
    folder = out if out is not None else Path(f"compare-{manifest.model}")
    _check_new(folder)
    with activity("Loading PyTorch and the model libraries"):
        from benchmarks.compare import compare as compare_variants
        from benchmarks.compare import compare_weights
        from preheat import compare_report

        listed = read_requests(requests, steps)
    reference: Checkpoint | Endpoint
    if endpoint is not None:
        reference, note = endpoint, f"The reference is {endpoint.url}, whose weights were not compared."
    else:
        reference, refiner = find_parts(model, None, False, None, config)
        with activity(f"Hashing {reference.root}"):
            difference = compare_weights(manifest, reference, refiner)
        if difference is not None:
            print_warning(difference)
        note = difference or f"{manifest.name} was built from these weights."
    with _progress() as report:
        comparison = compare_variants(
            opened.url, manifest, listed, reference, compiled=compiled, runs=runs, notes=[note], report=report
        )
    console.print(compare_report.describe(comparison, per_hour))
    for variant, reason in comparison.unavailable.items():
        say(f"Not measured: {plain(variant)}. {plain(reason)}")
    for line in compare_report.facts(comparison, per_hour):
        say(plain(line))
    contents = (
        compare_report.to_html(comparison, per_hour).encode(),
        compare_report.contact_sheet(comparison),
        compare_report.to_json(comparison, per_hour),
    )
    save_report(folder, dict(zip(FILES, contents, strict=True)))


def find_newest(store: WritableStore, model: str) -> str:
    """Return the release of a model with the highest number. Raises ReleaseNotFound."""
    name = default_name(model)
    *_, newest = ["", *sorted(store.releases(name), key=version_number)]
    if newest and version_number(newest) >= 0:
        return newest
    if newest:
        raise ReleaseNotFound(f"{store.url} has no numbered release of {name}.", f"Name one with --release: {newest}.")
    raise ReleaseNotFound(
        f"{store.url} has no release of {name}.",
        f"Run `preheat build {shlex.quote(model)} --store {store.url}` and `preheat publish {name} --store "
        f"{store.url}`, or name another release with --release.",
    )


def read_requests(path: Path | None, steps: int) -> "list[GenerationRequest]":
    """Return the requests of a file, or the default ones. Entries without a seed have their number as seed.

    Raises BadRequestFile.
    """
    from benchmarks.compare import FIELDS
    from model.request_fields import GenerationRequest

    default = [{"prompt": prompt} for prompt in PROMPTS]
    entries: list[dict[str, Any]] = default if path is None else read_request_list(path, _MAX_REQUESTS)
    found = []
    for number, entry in enumerate(entries, start=1):
        where = f"{path}, request {number}"
        try:
            request = GenerationRequest.model_validate({"seed": number, "num_inference_steps": steps} | entry)
        except ValidationError as error:
            raise bad_request(where, error) from error
        if others := entry.keys() - {*FIELDS}:
            raise BadRequestFile(f"{where}, {min(others)}: is not compared.", f"Leave it out. Use {', '.join(FIELDS)}.")
        found.append(request)
    return found


def _check_new(folder: Path) -> None:
    """Raise NotWritable unless the folder is missing or empty, and can be written."""
    check_folder(folder, *FILES)
    if folder.is_dir() and any(folder.iterdir()):
        raise NotWritable(f"{folder} is not empty.", "Name another folder with --out, or delete this one.")


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is being done: a spinner on a terminal, lines elsewhere."""
    if not progress_console.is_terminal:
        yield notify
        return
    with progress_console.status("") as status:
        yield lambda sentence: status.update(plain(sentence))
