"""`preheat plan-replicas`: simulate from measurements how many replicas a traffic needs."""

import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.rows import read_rows
from benchmarks.server_load import two_panels
from engine_builder.files import check_writable, write_file
from model.denoising.forecast import evaluation_count
from model.errors import PreheatError
from model.validation import Forecast
from preheat.console import console, plain, print_numbers, tracked
from preheat.replicas.simulation import Autoscaling, Result, Server, candidates, recommend, simulate
from preheat.replicas.traffic import Traffic, read_traffic

_MAX_REQUESTS = 10_000_000
_MAX_BATCH_IMAGES = 1024
_MAX_STEP_SECONDS = 600
_Simulated = tuple[Autoscaling, Result]
_CLOSED_LOOP = re.compile(r"closed loop, (\d+) clients?")


def plan_replicas(
    traffic: Annotated[
        str,
        typer.Argument(
            help="constant:RATE, wave:MEAN:SHARE, spike:BASE:PEAK:MINUTES (requests a second), or a CSV file of lines "
            "second,rate."
        ),
    ],
    cold_start: Annotated[
        float, typer.Option(min=0, max=86_400, help="Measured seconds from a replica's start to its first image.")
    ],
    p99: Annotated[float, typer.Option(help="Seconds within which 99 % of the requests must be answered.")],
    measured: Annotated[
        Path | None, typer.Option("--load", help="File of rows of `preheat load`, which give the step time by batch.")
    ] = None,
    curve: Annotated[
        str | None,
        typer.Option(help="The step time by batch, instead of --load: IMAGES:SECONDS,..., e.g. 1:0.05,8:0.11."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Denoising steps of a request.")] = 30,
    forecast: Annotated[
        Forecast,
        typer.Option(
            help="The requests' `forecast`, if the step time was measured without; also shortens text and decoding."
        ),
    ] = "off",
    hours: Annotated[float, typer.Option(min=0.01, max=8784, help="Hours of traffic; a CSV file has its own.")] = 24,
    max_replica: Annotated[int, typer.Option(min=1, max=1000, help="The largest number of replicas.")] = 8,
    max_queue: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="limits.max_queue of the deployment's config.")
    ] = 64,
    per_hour: Annotated[
        float | None, typer.Option(min=0, max=1e6, help="Price of a replica's hour: also print what 1,000 images cost.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the recommended settings to this JSON file.")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Write a plot of traffic and replicas to this file.")
    ] = None,
) -> None:
    """Simulate the autoscaler under a traffic, and recommend the cheapest setting that meets the p99."""
    if not math.isfinite(p99):  # typer refuses NaN for options with a range
        raise typer.BadParameter(f"{p99} is not a finite number", param_hint="--p99")
    for path in filter(None, (out, plot_file)):
        check_writable(path)
    if measured is not None and curve is None:
        points = read_curve(measured)
    elif curve is not None and measured is None:
        points = _parse_curve(curve)
    else:
        raise typer.BadParameter("give one of --load and --curve", param_hint="--load or --curve")
    server = Server(points, evaluation_count(forecast, steps), cold_start, max_queue)
    requests = read_traffic(traffic, hours)
    if requests.peak * requests.seconds > _MAX_REQUESTS:
        raise PreheatError(
            f"{requests.name} for {requests.seconds / 3600:g} h may be more than {_MAX_REQUESTS:,} requests, which "
            "takes too long to simulate.",
            "Simulate fewer --hours, or a part of the traffic.",
        )
    console.print(
        f"{plain(requests.name)} for {requests.seconds / 3600:g} h; one replica generates at most "
        f"{server.images_per_second:.2f} images/s, {server.most_efficient} at once, and starts in {cold_start:g} s"
    )
    settings = candidates(server, requests, max_replica)
    simulated = ((setting, simulate(requests, server, setting)) for setting in settings)
    results = list(tracked(simulated, len(settings), "Simulating settings"))
    best = recommend(results, p99)
    price = [] if per_hour is None else ["1,000 images cost"]
    headers = ("min replica", "target", "delay s", "p50 s", "p99 s", "refused", "GPU hours", *price, "most replicas")
    rows = []
    for setting, result in sorted(results, key=lambda pair: pair[1].gpu_hours):
        images = max(1, len(result.latencies))
        row = (
            "best" if best is not None and result is best[1] else "",
            str(setting.min_replica),
            f"{setting.target_utilization_percentage:g} %",
            f"{setting.scale_down_delay:g}",
            f"{result.latency(0.5):.2f}",
            f"{result.latency(0.99):.2f}",
            f"{result.refused_share:.2%}",
            f"{result.gpu_hours:.1f}",
            *([] if per_hour is None else [f"{1000 * per_hour * result.gpu_hours / images:.2f}"]),
            str(max(count for _, count in result.replicas)),
        )
        rows.append(row)
    print_numbers("", headers, rows)
    if best is None:
        console.print(
            f"No setting keeps p99 within {p99:g} s. Allow more replicas (--max-replica), shorten the cold start, or "
            "raise --p99."
        )
        raise typer.Exit(1)
    if plot_file is not None:
        _plot(requests, results, best, p99, plot_file)
    recommended = {name: int(value) for name, value in asdict(best[0]).items()}
    if out is not None:
        write_file(out, (json.dumps(recommended, indent=2) + "\n").encode())
    print(json.dumps(recommended))


def _parse_curve(curve: str) -> dict[int, float]:
    try:
        pairs = [pair.partition(":") for pair in curve.split(",")]
        points = {int(images): float(seconds) for images, _, seconds in pairs}
    except ValueError as error:
        raise typer.BadParameter(f"{curve!r} is not IMAGES:SECONDS,...: {error}", param_hint="--curve") from error
    if not all(0 < count <= _MAX_BATCH_IMAGES and 0 < time <= _MAX_STEP_SECONDS for count, time in points.items()):
        raise typer.BadParameter(
            f"{curve!r} has a number that is not above 0, or above {_MAX_BATCH_IMAGES} images or {_MAX_STEP_SECONDS} s",
            param_hint="--curve",
        )
    return points


def read_curve(path: Path) -> dict[int, float]:
    """Return images at once -> seconds of a step. The seconds include a share of all other stages.

    n clients without pause keep n images in flight, so each step takes n / (images/s * steps) seconds. The curve ends
    at the smallest n that reaches 95 % of the best images/s. Only the file's last measurement without --requests is
    read: the steps of different requests take different times.
    """
    rows = [row for row in read_rows(path) if "requests" not in row.extra]
    found = [(match, row) for row in rows if (match := _CLOSED_LOOP.match(row.case)) is not None]
    if not found:
        raise typer.BadParameter(
            f"{path} has no closed loops of equal requests: measure them with `preheat load`, without --requests",
            param_hint="--load",
        )
    _, last = found[-1]
    rates = {
        int(match[1]): (float(row.extra["images_per_second"]), row.steps)
        for match, row in found
        if (row.commit, row.command, row.precision) == (last.commit, last.command, last.precision)
    }
    best = max(rate for rate, _ in rates.values())
    largest = min(count for count, (rate, _) in rates.items() if rate >= 0.95 * best)
    return {count: count / (rate * steps) for count, (rate, steps) in sorted(rates.items()) if count <= largest}


def _plot(traffic: Traffic, results: list[_Simulated], best: _Simulated, p99: float, path: Path) -> None:
    hours = [traffic.seconds * i / 600 / 3600 for i in range(601)]
    counts = [count for _, count in best[1].replicas]
    edges = [*(second / 3600 for second, _ in best[1].replicas), max(hours[-1], best[1].replicas[-1][0] / 3600)]
    with two_panels(path, traffic.name) as (left, right):
        left.plot(hours, [traffic.rate(hour * 3600) for hour in hours], color="tab:gray", label="requests/s")
        left.stairs(counts, edges, color="tab:blue", label="replicas")
        left.set(xlabel="hours", ylim=(0, None))
        left.legend()
        right.scatter([result.gpu_hours for _, result in results], [result.latency(0.99) for _, result in results])
        right.scatter([best[1].gpu_hours], [best[1].latency(0.99)], color="tab:red", label="recommended")
        right.axhline(p99, color="tab:gray", linestyle="--", label="target")
        right.set(xlabel="GPU-hours", ylabel="p99, seconds", ylim=(0, None))
        right.legend()
