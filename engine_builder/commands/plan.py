"""`preheat plan-replicas`: how many replicas a traffic needs, simulated from what was measured."""

import itertools
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from engine_builder.benchmarks.rows import read_rows
from engine_builder.commands.console import console
from engine_builder.replicas.simulation import Autoscaling, Result, Server, candidates, paid_hours, recommend, simulate
from engine_builder.replicas.traffic import Traffic, read_traffic

_BINS = 96
_CLOSED = re.compile(r"closed loop, (\d+) clients")


def plan_replicas(
    traffic: Annotated[
        str,
        typer.Argument(
            help="constant:RATE, wave:MEAN:SHARE, spike:BASE:PEAK:MINUTES (requests a second), or a CSV file of lines "
            "second,rate."
        ),
    ],
    cold_start: Annotated[
        float, typer.Option(min=0, help="Seconds from a replica's start to its first picture, measured.")
    ],
    p99: Annotated[float, typer.Option(help="Seconds that 99 % of the requests may take.")],
    measured: Annotated[
        Path | None, typer.Option("--load", help="Rows of `preheat load`: the curve of rows to rate is read from them.")
    ] = None,
    curve: Annotated[
        str | None, typer.Option(help="The curve by hand, IMAGES:SECONDS of a step, as 1:0.05,8:0.11.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps of a request.")] = 30,
    hours: Annotated[float, typer.Option(min=0.01, help="Of traffic; a CSV file has its own.")] = 24,
    max_replica: Annotated[int, typer.Option(min=1, help="The most replicas there may be.")] = 8,
    max_queue: Annotated[int, typer.Option(min=1, help="limits.max_queue of the deployment's config.")] = 64,
    out: Annotated[Path | None, typer.Option(help="Write the recommended settings to this JSON file.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Draw the traffic and the replicas.")] = None,
) -> None:
    """Simulate the autoscaler under a traffic, and name the cheapest setting whose p99 is good enough."""
    if (measured is None) == (curve is None):
        raise typer.BadParameter("give one of --load and --curve", param_hint="--load or --curve")
    points = _points(curve) if curve is not None else _measured_points(measured)
    server = Server(points, steps, cold_start, max_queue)
    asked = read_traffic(traffic, hours)
    console.print(
        f"{asked.name} for {asked.seconds / 3600:g} h; one replica draws at most {server.images_per_second:.2f} "
        f"images/s, {server.capacity} at once, and starts in {cold_start:g} s"
    )
    results: list[tuple[Autoscaling, Result]] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for setting in progress.track(candidates(server, asked, max_replica), description="Simulating"):
            results.append((setting, simulate(asked, server, setting)))
    best = recommend(results, p99)
    table = Table("min", "utilization", "delay s", "p50 s", "p99 s", "refused", "GPU-hours", "most replicas", "")
    for setting, result in sorted(results, key=lambda pair: pair[1].gpu_hours):
        table.add_row(
            str(setting.min_replica),
            f"{setting.target_utilization_percentage:g} %",
            f"{setting.scale_down_delay:g}",
            f"{result.latency(0.5):.2f}",
            f"{result.latency(0.99):.2f}",
            f"{result.refused_share:.2%}",
            f"{result.gpu_hours:.1f}",
            str(max(count for _, count in result.replicas)),
            "recommended" if best is not None and result is best[1] else "",
        )
    console.print(table)
    if best is None:
        console.print(
            f"No setting keeps p99 within {p99:g} s: allow more replicas (--max-replica), start them faster, or ask "
            "for less."
        )
        raise typer.Exit(1)
    if picture is not None:
        _plot(asked, results, best, p99, picture)
    recommended = {name: int(value) for name, value in asdict(best[0]).items()}
    if out is not None:
        out.write_text(json.dumps(recommended, indent=2) + "\n")
    print(json.dumps(recommended))


def _points(curve: str) -> dict[int, float]:
    try:
        points = {
            int(images): float(seconds) for images, _, seconds in (pair.partition(":") for pair in curve.split(","))
        }
    except ValueError as error:
        raise typer.BadParameter(f"{curve!r} is not IMAGES:SECONDS,...: {error}", param_hint="--curve") from error
    if not all(images > 0 and seconds > 0 for images, seconds in points.items()):
        raise typer.BadParameter(f"{curve!r} holds a number that is not above 0", param_hint="--curve")
    return points


def _measured_points(path: Path | None) -> dict[int, float]:
    """Images at once -> seconds a step, all stages of a request included: n clients that ask without pause keep n
    images on their way, and n / (images/s * steps) is what each step of theirs took.

    The curve ends where more clients stop paying: at the fewest that reach 95 % of the best images/s.
    """
    assert path is not None
    rates: dict[int, tuple[float, int]] = {}
    for row in read_rows(path):
        if (found := _CLOSED.match(row["case"])) is not None:
            rates[int(found[1])] = (float(row["images_per_second"]), int(row["steps"]))
    if not rates:
        raise typer.BadParameter(f"{path} holds no closed loops: measure them with `preheat load`", param_hint="--load")
    best = max(rate for rate, _ in rates.values())
    most = min(count for count, (rate, _) in rates.items() if rate >= 0.95 * best)
    return {count: count / (rate * steps) for count, (rate, steps) in sorted(rates.items()) if count <= most}


def _plot(
    traffic: Traffic,
    results: list[tuple[Autoscaling, Result]],
    best: tuple[Autoscaling, Result],
    p99: float,
    path: Path,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    figure.suptitle(traffic.name)
    moments = [traffic.seconds * i / 600 for i in range(601)]
    left.plot([t / 3600 for t in moments], [traffic.rate(t) for t in moments], color="tab:gray", label="requests/s")
    edges = [traffic.seconds * i / _BINS for i in range(_BINS + 1)]
    hours = [0.0, *(paid_hours(best[1].replicas, edge) for edge in edges[1:])]
    means = [(after - before) * 3600 * _BINS / traffic.seconds for before, after in itertools.pairwise(hours)]
    left.stairs(means, [edge / 3600 for edge in edges], color="tab:blue", label=f"replicas, mean of {_BINS} parts")
    left.set(xlabel="hours", ylim=(0, None))
    left.legend()
    right.scatter([result.gpu_hours for _, result in results], [result.latency(0.99) for _, result in results])
    right.scatter([best[1].gpu_hours], [best[1].latency(0.99)], color="tab:red", label="recommended")
    right.axhline(p99, color="tab:gray", linestyle="--", label="target")
    right.set(xlabel="GPU-hours", ylabel="p99, seconds", ylim=(0, None))
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
