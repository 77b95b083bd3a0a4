"""`preheat load`: the throughput and latency of one server."""

import asyncio
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from engine_builder.benchmarks.load import Outcome, closed_loop, open_loop, plot, rows
from engine_builder.benchmarks.rows import finish, percentile
from engine_builder.commands.console import (
    DEFAULT_PROMPT,
    DEFAULT_STORE,
    DEMO_CONFIG,
    ROOT,
    SERVERS,
    CacheOption,
    ConfigOption,
    ReleaseArgument,
    SizeOption,
    StepsOption,
    StoreOption,
    console,
    is_number,
    opened,
    plain,
    sides,
)
from engine_builder.files import check_writable
from engine_builder.local_server import demo
from model.errors import PreheatError
from model.pipeline.spec import UNET

_SHARES = (0.3, 0.5, 0.7, 0.9, 1.3)  # of the images/s that the closed loops reached


def load(
    release: ReleaseArgument,
    store: StoreOption = DEFAULT_STORE,
    config: ConfigOption = DEMO_CONFIG,
    url: Annotated[str | None, typer.Option(help="A running server of that release; default: a new one.")] = None,
    size: SizeOption = None,
    steps: StepsOption = 8,
    clients: Annotated[str, typer.Option(help="Numbers of clients of the closed loops.")] = "1,2,4,8,16,32",
    seconds: Annotated[float, typer.Option(min=1, help="Of each load.")] = 15,
    out: Annotated[Path | None, typer.Option(help="Write the rows to this JSON file, replacing its rows.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Draw them into this file.")] = None,
    cache_dir: CacheOption = None,
) -> None:
    """Drive the real server closed- and open-loop: images/s, latency, refusals. The last line is JSON."""
    counts = _parse_clients(clients)
    if not math.isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is not a finite number", param_hint="--seconds")
    for path in filter(None, (out, picture)):
        check_writable(path)
    holder = opened(store, cache_dir)
    manifest = holder.read_release(release)
    settings = manifest.settings
    width, height = sides(size) if size else (settings.native_width, settings.native_height)
    precision = next(engine.precision.name for engine in manifest.engines if engine.component == UNET)

    def request_of(number: int) -> dict[str, Any]:
        image = {"width": width, "height": height, "num_inference_steps": steps, "seed": number}
        return {"prompt": DEFAULT_PROMPT, **image}

    def drive(url: str) -> list[Outcome]:
        first = asyncio.run(closed_loop(url, request_of, 2, 2))
        if not first.latencies:
            raise PreheatError(f"The server generated no image: {first.first_error}.")
        outcomes = []
        for count in counts:
            with console.status(f"{count} clients"):
                outcomes.append(asyncio.run(closed_loop(url, request_of, count, seconds)))
        capacity = max(outcome.images_per_second for outcome in outcomes)
        for share in _SHARES:
            with console.status(f"{share:.0%} of {capacity:.2f} requests/s"):
                outcomes.append(asyncio.run(open_loop(url, request_of, share * capacity, seconds)))
        return outcomes

    if url is not None:
        outcomes = drive(url)
    else:
        with demo.serving(ROOT, config, SERVERS, holder.url, release) as server:
            with console.status(f"Starting {plain(release)}"):
                server.wait_ready(600)
            outcomes = drive(server.url)
    table = Table(Column("load", no_wrap=True), "images/s", "p50 s", "p90 s", "p99 s", "200", "429", "other")
    for one in outcomes:
        spread = [f"{percentile(one.latencies, share):.2f}" if one.latencies else "" for share in (0.5, 0.9, 0.99)]
        answers = [str(len(one.latencies)), str(one.refused), str(one.failed)]
        table.add_row(one.case, f"{one.images_per_second:.2f}", *spread, *answers)
    console.print(table)
    kept = rows(outcomes, precision, steps, f"{width}x{height}")
    console.print(
        f"{kept[0].gpu}, torch {kept[0].torch}, {precision}, {width}x{height}, {steps} steps, {plain(release)}"
    )
    if picture is not None:
        plot(outcomes, picture, f"{release}, {width}x{height}, {steps} steps, {precision}: {kept[0].gpu}")
    if out is not None:
        out.unlink(missing_ok=True)
    finish(kept, out)


def _parse_clients(clients: str) -> list[int]:
    counts = [int(count) for count in clients.split(",") if is_number(count)]
    if len(counts) < len(clients.split(",")) or not all(counts):
        raise typer.BadParameter(f"{clients!r} is not a list of positive integers, as 1,2,4", param_hint="--clients")
    return counts
