"""`preheat load`: measure the throughput and latency of one server."""

import asyncio
import math
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.table import Column, Table

from benchmarks.gpu_use import GpuUse
from benchmarks.rows import check_rows_file, finish, percentile
from benchmarks.server_load import Outcome, closed_loop, open_loop, outcome_rows, plot
from engine_builder.files import check_writable
from engine_builder.releases.deployment import read_preheat_settings
from engine_builder.truss_config import read_truss_config
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
    open_cli_store,
    parse_size,
    plain,
    print_warning,
)
from preheat.local_server import demo
from preheat.request_list import read_request_list

_MAX_REQUESTS = 10_000
Number = TypeVar("Number", int, float)


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
    shares: Annotated[
        str, typer.Option(help="Rates of the open loops, of the images/s that the closed loops reached.")
    ] = "0.3,0.5,0.7,0.9,1.3",
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of each load.")] = 15,
    open_seconds: Annotated[
        float | None, typer.Option(min=1, help="Seconds of each open loop; default: those of --seconds.")
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option(help="JSON list of requests, sent in turns. --size and --steps are for those that state none."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Append the rows to this JSON file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write a plot of the rows to this file.")] = None,
    cache_dir: CacheOption = None,
) -> None:
    """Send closed-loop and open-loop load to the real server: images/s, latency, refusals. The last line is JSON."""
    counts, rates = _parse_numbers(clients, "--clients", int), _parse_numbers(shares, "--shares", float)
    if not math.isfinite(seconds) or not math.isfinite(open_seconds or 0):
        raise typer.BadParameter("is not a finite number", param_hint="--seconds")
    check_rows_file(out)
    if plot_file is not None:
        check_writable(plot_file)
    entries: list[dict[str, Any]] = [{}] if requests is None else read_request_list(requests, _MAX_REQUESTS)
    requested_size = parse_size(size) if size else None
    opened_store = open_cli_store(store, cache_dir)
    manifest = opened_store.read_release(release)
    settings = manifest.settings
    width, height = requested_size or (settings.native_width, settings.native_height)
    wanted = None if url else read_preheat_settings(read_truss_config(config), os.environ).precision
    precision: str = wanted or next(engine.precision.name for engine in manifest.engines if engine.component == UNET)

    def request_of(number: int) -> dict[str, Any]:
        image = {"width": width, "height": height, "num_inference_steps": steps, "seed": number}
        return {"prompt": DEFAULT_PROMPT, **image, **entries[number % len(entries)]}

    def send(load: Coroutine[Any, Any, Outcome], text: str) -> Outcome:
        with activity(text), GpuUse() as gpu:
            outcome = asyncio.run(load)
        outcome.gpu = gpu.entries
        return outcome

    def drive(url: str) -> list[Outcome]:
        warm_up = asyncio.run(closed_loop(url, request_of, 2, 2))
        if not warm_up.latencies:
            raise PreheatError(f"The server generated no image: {warm_up.first_error.rstrip('.')}.")
        outcomes = [send(closed_loop(url, request_of, count, seconds), f"{count} clients") for count in counts]
        capacity = max(outcome.images_per_second for outcome in outcomes)
        for share in rates:
            text = f"{share:.0%} of {capacity:.2f} requests/s"
            outcomes.append(send(open_loop(url, request_of, share * capacity, open_seconds or seconds), text))
        return outcomes

    if url is not None:
        outcomes = drive(url)
    else:
        with demo.serving(ROOT, config, SERVERS, opened_store.url, [release]) as server:
            with activity(f"Starting {release}"):
                server.wait_ready(600)
            outcomes = drive(server.url)
    columns = ("images/s", "p50 s", "p90 s", "p99 s", "200", "429", "other", "GPU idle", "GPU memory")
    table = Table(Column("load", no_wrap=True), *columns[: None if outcomes[0].gpu else -2])
    for outcome in outcomes:
        times = outcome.latencies
        percentiles = [f"{percentile(times, share):.2f}" if times else "" for share in (0.5, 0.9, 0.99)]
        statuses = map(str, (len(times), outcome.refused, outcome.failed))
        gpu = [f"{outcome.gpu['gpu_idle_percent']} %", f"{outcome.gpu['memory_gib']} GiB"] if outcome.gpu else []
        table.add_row(outcome.case, f"{outcome.images_per_second:.2f}", *percentiles, *statuses, *gpu)
    console.print(table)
    if failed := next((outcome for outcome in outcomes if outcome.failed), None):
        print_warning(
            f"{failed.case}: {failed.failed} requests failed. The first without an image: {failed.first_error}"
        )
    kind = f"{width}x{height}" if requests is None else f"{width}x{height}, {requests.stem}"
    rows = outcome_rows(outcomes, precision, steps, kind)
    request = f"{width}x{height}, {steps} steps, {precision}"
    console.print(f"{rows[0].gpu}, torch {rows[0].torch}, {request}, {plain(release)}")
    if plot_file is not None:
        plot(outcomes, plot_file, f"{release}, {request}: {rows[0].gpu}")
    finish(rows, out)


def _parse_numbers(text: str, option: str, kind: type[Number]) -> list[Number]:
    """Return the positive numbers of a list with commas. Raises typer.BadParameter."""
    try:
        numbers = [kind(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < math.inf for number in numbers):
        names = {int: "integers, for example 1,2,4", float: "numbers, for example 0.5,0.9"}
        raise typer.BadParameter(f"{text!r} is not a list of positive {names[kind]}", param_hint=option)
    return numbers
