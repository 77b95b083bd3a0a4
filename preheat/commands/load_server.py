"""`preheat load`: measure the throughput and latency of one server."""

import asyncio
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from benchmarks.rows import finish, percentile
from benchmarks.server_load import Outcome, closed_loop, open_loop, outcome_rows, plot
from engine_builder.files import check_writable
from model.errors import PreheatError
from model.pipeline.spec import UNET
from preheat.console import (
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
    activity,
    console,
    is_number,
    open_cli_store,
    parse_size,
    plain,
)
from preheat.local_server import demo

_OPEN_LOOP_SHARES = (0.3, 0.5, 0.7, 0.9, 1.3)  # of the images/s that the closed loops reached


def load(
    release: ReleaseArgument,
    store: StoreOption = DEFAULT_STORE,
    config: ConfigOption = DEMO_CONFIG,
    url: Annotated[str | None, typer.Option(help="A running server of that release; default: a new one.")] = None,
    size: SizeOption = None,
    steps: StepsOption = 8,
    clients: Annotated[
        str, typer.Option(help="Numbers of clients of the closed loops, separated by commas.")
    ] = "1,2,4,8,16,32",
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of each load.")] = 15,
    out: Annotated[Path | None, typer.Option(help="Write the rows to this JSON file, replacing its rows.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write a plot of the rows to this file.")] = None,
    cache_dir: CacheOption = None,
) -> None:
    """Send closed-loop and open-loop load to the real server: images/s, latency, refusals. The last line is JSON."""
    counts = _parse_clients(clients)
    if not math.isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is not a finite number", param_hint="--seconds")
    for path in filter(None, (out, plot_file)):
        check_writable(path)
    requested_size = parse_size(size) if size else None
    opened_store = open_cli_store(store, cache_dir)
    manifest = opened_store.read_release(release)
    settings = manifest.settings
    width, height = requested_size or (settings.native_width, settings.native_height)
    precision = next(engine.precision.name for engine in manifest.engines if engine.component == UNET)

    def request_of(number: int) -> dict[str, Any]:
        image = {"width": width, "height": height, "num_inference_steps": steps, "seed": number}
        return {"prompt": DEFAULT_PROMPT, **image}

    def drive(url: str) -> list[Outcome]:
        warm_up = asyncio.run(closed_loop(url, request_of, 2, 2))
        if not warm_up.latencies:
            raise PreheatError(f"The server generated no image: {warm_up.first_error.rstrip('.')}.")
        outcomes = []
        for count in counts:
            with activity(f"{count} clients"):
                outcomes.append(asyncio.run(closed_loop(url, request_of, count, seconds)))
        capacity = max(outcome.images_per_second for outcome in outcomes)
        for share in _OPEN_LOOP_SHARES:
            with activity(f"{share:.0%} of {capacity:.2f} requests/s"):
                outcomes.append(asyncio.run(open_loop(url, request_of, share * capacity, seconds)))
        return outcomes

    if url is not None:
        outcomes = drive(url)
    else:
        with demo.serving(ROOT, config, SERVERS, opened_store.url, [release]) as server:
            with activity(f"Starting {release}"):
                server.wait_ready(600)
            outcomes = drive(server.url)
    table = Table(Column("load", no_wrap=True), "images/s", "p50 s", "p90 s", "p99 s", "200", "429", "other")
    for outcome in outcomes:
        times = outcome.latencies
        percentiles = [f"{percentile(times, share):.2f}" if times else "" for share in (0.5, 0.9, 0.99)]
        statuses = map(str, (len(times), outcome.refused, outcome.failed))
        table.add_row(outcome.case, f"{outcome.images_per_second:.2f}", *percentiles, *statuses)
    console.print(table)
    rows = outcome_rows(outcomes, precision, steps, f"{width}x{height}")
    request = f"{width}x{height}, {steps} steps, {precision}"
    console.print(f"{rows[0].gpu}, torch {rows[0].torch}, {request}, {plain(release)}")
    if plot_file is not None:
        plot(outcomes, plot_file, f"{release}, {request}: {rows[0].gpu}")
    if out is not None:
        out.unlink(missing_ok=True)
    finish(rows, out)


def _parse_clients(clients: str) -> list[int]:
    counts = [int(count) for count in clients.split(",") if is_number(count)]
    if len(counts) < len(clients.split(",")) or not all(counts):
        raise typer.BadParameter(
            f"{clients!r} is not a list of positive integers, for example 1,2,4", param_hint="--clients"
        )
    return counts
