"""The console, options and helpers that the commands of `preheat` share."""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Annotated, Any, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Column, Table
from rich.text import Text

from engine_builder.files import make_folder, write_file
from engine_builder.stores.store import WritableStore, check_local_folder, open_writable_store
from model.pipeline.spec import UNET
from model.settings import STORE_SETTINGS, Settings, read_settings
from model.store.manifest import Manifest
from model.store.options import expand_cache_folder
from model.store.precision import Precision

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
console = Console(highlight=False, emoji=False)
progress_console = Console(highlight=False, emoji=False, stderr=True)
_QUIET_SECONDS = 1.5  # before a command without a terminal writes what it does
_LINE_SECONDS = 10.0  # between two lines of progress without a terminal

StoreOption = Annotated[
    str,
    typer.Option("--store", envvar="PREHEAT_STORE", help="Folder, file:// or s3:// URL that holds blobs and releases."),
]
ServedStoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="PREHEAT_STORE",
        help="Folder, file:// or s3:// URL that holds blobs and releases; default: the config's, or .preheat/store.",
    ),
]
CacheOption = Annotated[
    Path | None, typer.Option(envvar="PREHEAT_CACHE_DIR", help="Cache folder of blobs fetched from s3://.")
]
ConfigOption = Annotated[Path, typer.Option(exists=True, dir_okay=False, help="The deployment's config.yaml.")]
SignOption = Annotated[Path | None, typer.Option(help="Private key file from `preheat keygen`.")]
ReleaseArgument = Annotated[str, typer.Argument(help="MODEL/VERSION.")]
SizeOption = Annotated[str | None, typer.Option(help="WIDTHxHEIGHT; default: the release's native size.")]
StepsOption = Annotated[int, typer.Option(help="Denoising steps.")]
DEFAULT_PROMPT = "a large red circle on a blue background"
DEFAULT_STORE = str(ROOT / ".preheat" / "store")
SERVERS = ROOT / ".preheat" / "servers"  # contains a folder for each running server
DEMO_CONFIG = ROOT / "truss" / "configs" / "cpu-demo.yaml"


@contextmanager
def activity(description: str) -> Iterator[None]:
    """Show on standard error what the command does: a spinner on a terminal, elsewhere a line if it takes long."""
    if progress_console.is_terminal:
        with progress_console.status(plain(description)):
            yield
        return
    with notify_later(description):
        yield


@contextmanager
def notify_later(sentence: str) -> Iterator[Timer]:
    """Print a line without a terminal if what follows takes long. Yields the timer, which may be cancelled."""
    timer = Timer(_QUIET_SECONDS, notify, (sentence,))
    timer.daemon = True
    if not progress_console.is_terminal:
        timer.start()
    try:
        yield timer
    finally:
        timer.cancel()


def notify(sentence: str, is_warning: bool = False) -> None:
    """Print a line about the progress of the command on standard error, or a warning."""
    if is_warning:
        return print_warning(sentence)
    progress_console.print(plain(sentence), soft_wrap=True)


def tracked(items: Iterable[T], total: int, description: str) -> Iterator[T]:
    """Yield the items, and show how many were used: a bar on a terminal, elsewhere a line every few seconds."""
    if progress_console.is_terminal:
        with Progress(console=progress_console, transient=True) as progress:
            yield from progress.track(items, total=total, description=plain(description))
        return
    written = time.monotonic()
    with notify_later(f"{description}: {total} in all"):
        for number, item in enumerate(items):
            yield item
            if time.monotonic() - written >= _LINE_SECONDS:
                written = time.monotonic()
                notify(f"{description}: {number + 1} of {total}")


class Meter:
    """Shows the bytes moved to and from a bucket on a progress bar, while `show` is active."""

    def __init__(self) -> None:
        self._task: tuple[Progress, TaskID] | None = None

    def advance(self, count: int) -> None:
        """Advance the bar by `count` bytes. Passed as `StoreOptions.report`."""
        if (task := self._task) is not None:
            task[0].advance(task[1], count)

    @contextmanager
    def show(self, description: str) -> Iterator[Callable[[int], None]]:
        """Show the bar. Yields a function that sets the total number of bytes."""
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        is_terminal = progress_console.is_terminal
        quiet = nullcontext() if is_terminal else activity(description)
        with quiet, Progress(*columns, console=progress_console, transient=True, disable=not is_terminal) as progress:
            task = progress.add_task(plain(description), total=None)
            self._task = (progress, task)
            try:
                yield lambda total: progress.update(task, total=total)
            finally:
                self._task = None


meter = Meter()


def steps_bar(note: Callable[[], str] = lambda: "", **options: Any) -> Progress:
    """Return a bar on standard error that counts steps and shows a note after the time. `options`: of Progress."""
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(), _Note(note),
    )  # fmt: skip
    return Progress(*columns, console=progress_console, **options)


class _Note(ProgressColumn):
    """Shows the text that `note` returns."""

    def __init__(self, note: Callable[[], str]) -> None:
        super().__init__()
        self._note = note

    def render(self, task: Task) -> Text:
        return Text(self._note())


def open_cli_store(store: str, cache_dir: Path | None = None, must_exist: bool = False) -> WritableStore:
    """Open a store with the settings of the environment. The meter shows its transfers.

    `cache_dir` is also set in the environment, for child processes. `must_exist`: raise StoreError for a local store
    whose folder is missing.
    """
    if must_exist:
        check_local_folder(store)
    return _open_store(store, read_settings(variables=STORE_SETTINGS), cache_dir)


def open_served_store(store: str | None, settings: Settings, cache_dir: Path | None = None) -> WritableStore:
    """Open the store of a server on this machine: the given one, else that of its settings, else the default.

    `settings`: see `read_served_settings`. The placeholder of a shipped config counts as no store. `cache_dir`: as in
    `open_cli_store`. Raises StoreError, also for a local store whose folder is missing.
    """
    from engine_builder.truss_config import PLACEHOLDER_STORES  # imports yaml

    own = "" if settings.store.rstrip("/") in PLACEHOLDER_STORES else settings.store
    chosen = store or own or DEFAULT_STORE
    check_local_folder(chosen)
    return _open_store(chosen, settings, cache_dir)


def read_served_settings(config: Path) -> Settings:
    """Return the settings of a server on this machine: of the environment, else of the config. Raises ConfigError."""
    from engine_builder.truss_config import read_preheat_settings, read_truss_config  # imports yaml

    return read_preheat_settings(read_truss_config(config), os.environ)


def _open_store(store: str, settings: Settings, cache_dir: Path | None) -> WritableStore:
    options = replace(settings.store_options(), report=meter.advance)
    if cache_dir is not None:
        folder = expand_cache_folder(str(cache_dir)).absolute()
        os.environ["PREHEAT_CACHE_DIR"] = str(folder)
        options = replace(options, cache_dir=folder)
    return open_writable_store(store, options)


def parse_size(size: str, option: str = "--size") -> tuple[int, int]:
    """Parse "1024x768" into (width, height) in pixels. Raises typer.BadParameter."""
    width, _, height = size.partition("x")
    if not (is_number(width) and is_number(height)):
        raise typer.BadParameter(f"{size!r} is not WIDTHxHEIGHT, for example 1024x1024", param_hint=option)
    return int(width), int(height)


def parse_lora(text: str) -> dict[str, str | float]:
    """Parse "NAME:SCALE", or "NAME" for the scale 1, into an entry of a request. Raises typer.BadParameter."""
    name, colon, scale = text.partition(":")
    try:
        return {"name": name, "scale": float(scale) if colon else 1.0}
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not NAME:SCALE, for example style:0.8", param_hint="--lora") from None


def parse_bucket(text: str, option: str = "--size") -> tuple[int, int, int]:
    """Parse "1024x768@2" (width x height @ batch) into (batch, height, width). Without a batch it is 2.

    Raises typer.BadParameter.
    """
    size, _, batch = text.partition("@")
    width, _, height = size.partition("x")
    if not (is_number(width) and is_number(height) and is_number(batch or "2")):
        raise typer.BadParameter(f"{text!r} is not WIDTHxHEIGHT@BATCH, for example 1024x1024@2", param_hint=option)
    return int(batch or 2), int(height), int(width)


def is_number(text: str) -> bool:
    """True for a whole number of at most nine ASCII digits. str.isdigit also accepts "²", which int() does not."""
    return re.fullmatch("[0-9]{1,9}", text) is not None


def print_numbers(label: str, headers: Sequence[str], rows: Sequence[Sequence[str]], text: str | None = None) -> None:
    """Print a table of labels, numbers and, with the header `text`, a text: one of each row's cells for each.

    The words of a header are below each other, so that 80 columns suffice. No number is wrapped or cut off.
    """
    table = Table(Column(label, overflow="fold"), box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for number, header in enumerate(headers, start=1):
        cells = [*header.split(), *(row[number] for row in rows)]
        table.add_column(header.replace(" ", "\n"), justify="right", min_width=max(map(len, cells)))
    if text is not None:
        table.add_column(text, overflow="fold")
    for row in rows:
        table.add_row(*map(plain, row))
    console.print(table, crop=False)


def say(markup: str) -> None:
    """Print lines that the terminal wraps, so that nothing of them is cut off: people copy names and paths."""
    console.print(markup, soft_wrap=True)


def unet_precision(manifest: Manifest) -> Precision:
    """Return the precision of a release's first UNet engine."""
    return next(engine.precision for engine in manifest.engines if engine.component == UNET)


def save_report(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder, and print its path and their names. Raises NotWritable."""
    make_folder(folder)
    for name, content in files.items():
        write_file(folder / name, content)
    say(f"[bold]{plain(folder.resolve())}[/]  {', '.join(files)}")


def plain(text: object) -> str:
    """Escape text so that rich does not parse it as markup."""
    return escape(str(text))


def print_warning(sentence: str) -> None:
    """Print a sentence that does not end the command."""
    say(f"[yellow]warning[/] {plain(sentence)}")
