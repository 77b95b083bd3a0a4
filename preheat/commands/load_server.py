"""`preheat load`: measure the throughput and latency of one server."""

import asyncio
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import ValidationError

from benchmarks.gpu_use import GpuUse, gpu_ids
from benchmarks.rows import check_rows_file, finish, percentile
from benchmarks.server_load import Outcome, RequestOf, closed_loop, count_clients, open_loop, outcome_rows, plot
from engine_builder.files import check_writable
from gateway.endpoint import DESCRIBE
from model.errors import PreheatError
from model.request_fields import GenerationRequest
from preheat.console import (
    DEFAULT_PROMPT,
    DEMO_CONFIG,
    ROOT,
    SERVERS,
    CacheOption,
    ConfigOption,
    ReleaseArgument,
    ServedStoreOption,
    SizeOption,
    StepsOption,
    activity,
    console,
    open_served_store,
    parse_size,
    plain,
    print_numbers,
    print_warning,
    read_served_settings,
    unet_precision,
)
from preheat.local_server import demo
from preheat.local_server.client import CallFailed, generate
from preheat.request_list import BadRequestFile, bad_request, read_request_list

_MAX_REQUESTS = 10_000
_DESCRIBE_SECONDS = 60.0
Number = TypeVar("Number", int, float)


def load(
    release: ReleaseArgument,
    store: ServedStoreOption = None,
    config: ConfigOption = DEMO_CONFIG,
    url: Annotated[str | None, typer.Option(help="A running server of that release; default: a new one.")] = None,
    size: SizeOption = None,
    steps: StepsOption = 8,
    clients: Annotated[
        str, typer.Option(help="Numbers of clients of the closed loops, separated by commas.")
    ] = "1,2,4,8,16,32",
    shares: Annotated[
        str,
        typer.Option(
            help="Rates of the open loops, as shares of the requests/s that the closed loops reached; empty: none."
        ),
    ] = "0.3,0.5,0.7,0.9,1.3",
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of each load.")] = 15,
    open_seconds: Annotated[
        float | None, typer.Option(min=1, help="Seconds of each open loop; default: --seconds.")
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option(help="JSON list of requests, sent in turns. --size and --steps complete the requests."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Append the rows to this JSON file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write a plot of the rows to this file.")] = None,
    cache_dir: CacheOption = None,
) -> None:
    """Send closed-loop and open-loop load to the real server: images/s, latency, refusals. The last line is JSON."""
    counts = _parse_numbers(clients, "--clients", int)
    rates = _parse_numbers(shares, "--shares", float) if shares else []
    for option, value in {"--seconds": seconds, "--open-seconds": open_seconds}.items():
        if value is not None and not math.isfinite(value):
            raise typer.BadParameter(f"{value} is not a finite number", param_hint=option)
    check_rows_file(out)
    if plot_file is not None:
        check_writable(plot_file)
    given_size = parse_size(size) if size else None
    settings = read_served_settings(config)
    opened_store = open_served_store(store, settings, cache_dir)
    manifest = opened_store.read_release(release)
    width, height = given_size or (manifest.settings.native_width, manifest.settings.native_height)
    base: dict[str, Any] = {"prompt": DEFAULT_PROMPT, "width": width, "height": height, "num_inference_steps": steps}
    entries = [base] if requests is None else _read_requests(requests, base)
    precision = unet_precision(manifest).name
    if url is not None and _serves_others(url, manifest.name):  # older servers of one release take no `model`
        entries = [entry | {"model": manifest.name} for entry in entries]

    def request_of(number: int) -> dict[str, Any]:
        return {"seed": number, **entries[number % len(entries)]}

    loads = _Loads(request_of, counts, rates, seconds, open_seconds or seconds)
    if url is not None:
        outcomes = loads.send(url, [])
    else:
        precision = settings.precision or precision
        gpus = gpu_ids(settings.workers and settings.workers * settings.gpus_per_image)
        with demo.serving(ROOT, config, SERVERS, opened_store.url, [release]) as server:
            with activity(f"Starting {release}"):
                server.wait_ready(600)
            outcomes = loads.send(server.url, gpus)
    _print_outcomes(outcomes)
    kind, extra = f"{width}x{height}", {}
    if requests is not None:
        kind, extra = f"{kind}, {requests.stem}", {"requests": requests.stem}
        steps, *others = {entry["num_inference_steps"] for entry in entries}
        steps = 0 if others else steps
    rows = outcome_rows(outcomes, precision, steps, kind, **extra)
    request = f"{kind}, {f'{steps} steps' if steps else 'different steps'}, {precision}"
    console.print(f"{rows[0].gpu}, torch {rows[0].torch}, {plain(request)}, {plain(release)}")
    if plot_file is not None:
        plot(outcomes, plot_file, f"{release}, {request}: {rows[0].gpu}")
    finish(rows, out)


def _serves_others(url: str, release: str) -> bool:
    """Return whether a server has further releases. Raises CallFailed if it does not have this one."""
    described = generate(url, DESCRIBE, _DESCRIBE_SECONDS)
    served = described.get("models") or [described.get("release")]
    if release not in served:
        raise CallFailed(
            f"{url} serves {', '.join(map(str, served))}, and not {release}.", remedy="Name a release that it serves."
        )
    return len(served) > 1


@dataclass(frozen=True)
class _Loads:
    """Loads that are sent to a server one after the other.

    counts: clients of each closed loop, for `seconds`. rates: of each open loop, for `open_seconds`, as shares of the
    requests/s that the closed loops reached.
    """

    request_of: RequestOf
    counts: Sequence[int]
    rates: Sequence[float]
    seconds: float
    open_seconds: float

    def send(self, url: str, gpus: Sequence[str]) -> list[Outcome]:
        """Return the outcome of each load. Raises PreheatError if no request returns an image."""
        warm_up = asyncio.run(closed_loop(url, self.request_of, 2, 2))
        if not warm_up.latencies:
            raise PreheatError(
                f"{url} generated no image: {warm_up.first_error.rstrip('.')}.",
                "Check that the server runs there, and send it the request with `preheat generate`.",
            )
        outcomes = []
        for count in self.counts:
            load = closed_loop(url, self.request_of, count, self.seconds)
            outcomes.append(_send(load, count_clients(count), gpus))
        capacity = max(outcome.answers_per_second for outcome in outcomes)
        for rate in self.rates:
            load = open_loop(url, self.request_of, rate * capacity, self.open_seconds)
            outcomes.append(_send(load, f"{rate:.0%} of {capacity:.2f} requests/s", gpus))
        return outcomes


def _send(load: Coroutine[Any, Any, Outcome], text: str, gpus: Sequence[str]) -> Outcome:
    with activity(text), GpuUse(gpus) as use:
        outcome = asyncio.run(load)
    outcome.gpu = use.entries
    return outcome


def _read_requests(path: Path, base: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the requests of a file, completed by the fields of `base`. Raises BadRequestFile."""
    requests = []
    for number, entry in enumerate(read_request_list(path, _MAX_REQUESTS), start=1):
        request, where = base | entry, f"{path}, request {number}"
        try:
            parsed = GenerationRequest.model_validate(request)
        except ValidationError as error:
            raise bad_request(where, error) from error
        if parsed.stream or parsed.describe:
            raise BadRequestFile(f"{where} asks for a stream or a description.", "Leave out `stream` and `describe`.")
        requests.append(request)
    return requests


def _print_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Print a table, and why requests failed."""
    columns = ("images/s", "p50 s", "p90 s", "p99 s", "200", "429", "other", "GPU idle", "GPU memory")
    rows = []
    for outcome in outcomes:
        times = outcome.latencies
        percentiles = [f"{percentile(times, share):.2f}" if times else "" for share in (0.5, 0.9, 0.99)]
        statuses = map(str, (len(times), outcome.refused, outcome.failed))
        gpu = [f"{outcome.gpu['gpu_idle_percent']} %", f"{outcome.gpu['memory_gib']} GiB"] if outcome.gpu else []
        rows.append((outcome.case, f"{outcome.images_per_second:.2f}", *percentiles, *statuses, *gpu))
    print_numbers("load", columns[: None if outcomes[0].gpu else -2], rows)
    if failed := next((outcome for outcome in outcomes if outcome.failed), None):
        print_warning(f"{failed.case}: {failed.failed} requests failed. The first: {failed.first_error}")


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
