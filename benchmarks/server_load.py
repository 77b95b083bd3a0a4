"""Send load to a running server over HTTP. This module knows only the server's URL.

Closed loop: each of several clients sends its next request when the last one is answered. Open loop: requests arrive
as a Poisson process, however many are in flight. Every answer is counted by its status. Only answers with images have
latencies.
"""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.rows import Row, make_row, percentile
from engine_builder.error_text import cause_of
from gateway.endpoint import Endpoint, parse_endpoint
from preheat.replicas.traffic import poisson_arrivals

RequestOf = Callable[[int], dict[str, Any]]
"""Makes the JSON body of a request from the request's number."""

_TIMEOUT_SECONDS = 600


@dataclass
class Outcome:
    """The result of one load.

    `load`: number of clients, or arrivals a second. `seconds`: duration. `latencies`: seconds of answers with images.
    `first_error`: the reason of the first request without an image. `gpu`: entries of `GpuUse`.
    """

    case: str
    load: float
    seconds: float = 0.0
    images: int = 0
    latencies: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    first_error: str = ""
    gpu: dict[str, Any] = field(default_factory=dict)

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds if self.seconds else 0.0

    @property
    def answers_per_second(self) -> float:
        """Requests that returned images, a second."""
        return len(self.latencies) / self.seconds if self.seconds else 0.0

    @property
    def refused(self) -> int:
        """Number of requests that a full queue refused."""
        return self.statuses[429]

    @property
    def failed(self) -> int:
        """Number of requests with any other status, or without an answer."""
        return sum(count for status, count in self.statuses.items() if status not in (200, 429))


def connect(endpoint: Endpoint) -> httpx.AsyncClient:
    """Return a client with as many connections as requests."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(
        headers=endpoint.headers, limits=limits, timeout=_TIMEOUT_SECONDS, trust_env=not endpoint.is_local
    )


async def _send(client: httpx.AsyncClient, url: str, request: dict[str, Any], outcome: Outcome) -> None:
    began = time.perf_counter()
    try:
        answer = await client.post(url, json=request)
    except httpx.TransportError as error:
        outcome.statuses[0] += 1
        outcome.first_error = outcome.first_error or cause_of(error)
        return
    outcome.statuses[answer.status_code] += 1
    if answer.status_code == 200:
        outcome.latencies.append(time.perf_counter() - began)
        outcome.images += len(answer.json()["images"])
    else:
        outcome.first_error = outcome.first_error or f"{answer.status_code}: {answer.text[:300]}"


def count_clients(count: int) -> str:
    return "1 client" if count == 1 else f"{count} clients"


async def closed_loop(url: str, request_of: RequestOf, clients: int, seconds: float) -> Outcome:
    """Send requests from `clients` clients without pause for `seconds`. Returns when all are answered."""
    outcome = Outcome(f"closed loop, {count_clients(clients)}", clients)
    numbers = itertools.count()
    endpoint = parse_endpoint(url)
    async with connect(endpoint) as client:
        began = time.perf_counter()

        async def send_repeatedly() -> None:
            while time.perf_counter() - began < seconds:
                await _send(client, endpoint.predict_url, request_of(next(numbers)), outcome)

        await asyncio.gather(*(send_repeatedly() for _ in range(clients)))
        outcome.seconds = time.perf_counter() - began
    return outcome


async def open_loop(url: str, request_of: RequestOf, rate: float, seconds: float) -> Outcome:
    """Send `rate` requests a second as a Poisson process for `seconds`. Returns when all are answered."""
    outcome = Outcome(f"open loop, {rate:.2f} requests/s", rate)
    endpoint = parse_endpoint(url)
    async with connect(endpoint) as client, asyncio.TaskGroup() as group:
        began = time.perf_counter()
        for number, arrival in enumerate(poisson_arrivals(rate, seconds, random.Random(0))):
            await asyncio.sleep(max(0.0, began + arrival - time.perf_counter()))
            group.create_task(_send(client, endpoint.predict_url, request_of(number), outcome))
    outcome.seconds = time.perf_counter() - began
    return outcome


def outcome_rows(outcomes: Sequence[Outcome], precision: str, steps: int, kind: str, **extra: Any) -> list[Row]:
    """Return a row for each load that returned images: latencies in seconds, images/s, and counts.

    `kind`: end of the rows' names. `extra`: entries of all rows.
    """
    return [
        make_row(
            f"{outcome.case} {kind}", outcome.latencies, "s", precision, steps, 1, digits=3,
            images_per_second=round(outcome.images_per_second, 3), refused=outcome.refused, failed=outcome.failed,
            **outcome.gpu, **extra,
        )
        for outcome in outcomes
        if outcome.latencies
    ]  # fmt: skip


@contextmanager
def two_panels(path: Path, title: str) -> Iterator[tuple[Any, Any]]:
    """Yield the left and right axes of a figure to draw on. Then write the figure to `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    yield left, right
    figure.savefig(path, dpi=110)


def plot(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Draw two panels: images/s against clients, and latency against the rate of arrivals."""
    closed_loops, open_loops = (
        [outcome for outcome in outcomes if outcome.case.startswith(kind) and outcome.latencies]
        for kind in ("closed", "open")
    )
    with two_panels(path, title) as (left, right):
        loads = [outcome.load for outcome in closed_loops]
        left.plot(loads, [outcome.images_per_second for outcome in closed_loops], marker="o")
        left.set(xlabel="clients without pause", ylabel="images/s", ylim=(0, None), xscale="log")
        left.set_xticks(loads, [f"{load:g}" for load in loads], minor=False)
        left.minorticks_off()
        for share in (0.5, 0.9, 0.99):
            latencies = [percentile(outcome.latencies, share) for outcome in open_loops]
            right.plot([outcome.load for outcome in open_loops], latencies, marker="o", label=f"p{share * 100:g}")
        right.set(xlabel="requests/s, Poisson", ylabel="seconds to the image", ylim=(0, None))
        right.legend()
