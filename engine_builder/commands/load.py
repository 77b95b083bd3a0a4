"""`preheat load`: how much one server takes."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from engine_builder.benchmarks.load import Outcome, closed_loop, open_loop, plot, rows, run
from engine_builder.benchmarks.rows import append_rows, percentile
from engine_builder.commands.console import (
    DEFAULT_STORE,
    DEMO_CONFIG,
    ROOT,
    CacheOption,
    ConfigOption,
    StoreOption,
    console,
    opened,
    sides,
)
from engine_builder.local_server import demo
from model.errors import PreheatError

_SHARES = (0.3, 0.5, 0.7, 0.9, 1.3)  # of the images/s that the closed loops reached


def load(
    release: Annotated[str, typer.Argument(help="MODEL/VERSION.")],
    store: StoreOption = DEFAULT_STORE,
    config: ConfigOption = DEMO_CONFIG,
    url: Annotated[str | None, typer.Option(help="A running server of that release; default: one of our own.")] = None,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT; default: the release's own.")] = None,
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 8,
    clients: Annotated[str, typer.Option(help="Numbers of clients of the closed loops.")] = "1,2,4,8,16,32",
    seconds: Annotated[float, typer.Option(min=1, help="Of each load.")] = 15,
    out: Annotated[Path | None, typer.Option(help="Write the rows to this JSON file, over what it held.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Draw them into this file.")] = None,
    cache_dir: CacheOption = None,
) -> None:
    """Drive the real server closed- and open-loop: images/s, latency, refusals. The last line is JSON."""
    holder = opened(store, cache_dir)
    manifest = holder.read_release(release)
    settings = manifest.settings
    width, height = sides(size) if size else (settings.native_width, settings.native_height)
    precision = next(engine.precision for engine in manifest.engines if engine.component == "unet")

    def ask(number: int) -> dict[str, object]:
        return {
            "prompt": "a large red circle on a blue background",
            "width": width,
            "height": height,
            "num_inference_steps": steps,
            "seed": number,
        }

    counts = _counts(clients)

    def drive(url: str) -> list[Outcome]:
        outcomes = []
        _refuse_none(run(closed_loop(url, ask, 2, 2)))
        for count in counts:
            with console.status(f"{count} clients"):
                outcomes.append(run(closed_loop(url, ask, count, seconds)))
        capacity = max(outcome.images_per_second for outcome in outcomes)
        for share in _SHARES:
            with console.status(f"{share:.0%} of {capacity:.2f} requests/s"):
                outcomes.append(run(open_loop(url, ask, share * capacity, seconds)))
        return outcomes

    if url is not None:
        outcomes = drive(url)
    else:
        work = ROOT / ".preheat" / "load"
        with demo.serving(ROOT, config, work, holder.url, release, log=work / "server.log") as server:
            with console.status(f"Starting {release}"):
                server.wait_ready(600)
            outcomes = drive(server.url)
    table = Table(Column("load", no_wrap=True), "images/s", "p50 s", "p90 s", "p99 s", "200", "429", "other")
    for one in outcomes:
        spread = [f"{percentile(one.latencies, share):.2f}" if one.latencies else "" for share in (0.5, 0.9, 0.99)]
        counts_ = [str(len(one.latencies)), str(one.refused), str(one.failed)]
        table.add_row(one.case, f"{one.images_per_second:.2f}", *spread, *counts_)
    console.print(table)
    kept = rows(outcomes, precision, steps, f"{width}x{height}")
    console.print(f"{kept[0].gpu}, torch {kept[0].torch}, {precision}, {width}x{height}, {steps} steps, {release}")
    if picture is not None:
        plot(outcomes, picture, f"{release}, {width}x{height}, {steps} steps, {precision}: {kept[0].gpu}")
    if out is not None:
        out.unlink(missing_ok=True)
        append_rows(out, kept)
    print(json.dumps([row.to_dict() for row in kept]))


def _counts(clients: str) -> list[int]:
    counts = [int(count) for count in clients.split(",") if count.isdigit()]
    if len(counts) < len(clients.split(",")) or not all(counts):
        raise typer.BadParameter(f"{clients!r} is not numbers from 1 on, for example 1,2,4", param_hint="--clients")
    return counts


def _refuse_none(first: Outcome) -> None:
    """Raises PreheatError where nothing was drawn: there is no load to measure then."""
    if not first.latencies:
        raise PreheatError(f"The server draws nothing of what is asked ({first.said}).")
