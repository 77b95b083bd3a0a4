"""Load on a running server, over HTTP: closed loop (so many clients, each asks again when it is answered) and open loop
(Poisson arrivals, sent at their moments whatever is under way).

Counts every answer, by status; latencies are those of pictures. Knows of the server only its URL.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from engine_builder.benchmarks.rows import Row, make_row, percentile

Ask = Callable[[int], dict[str, Any]]
"""The n-th request."""

PREDICT = "/v1/models/model:predict"
_TIMEOUT_SECONDS = 600


@dataclass
class Outcome:
    """What came of a load. `load`: clients, or arrivals a second. Latencies in seconds, of pictures only. `said`: why
    the first request that was not drawn was not."""

    case: str
    load: float
    seconds: float = 0.0
    images: int = 0
    latencies: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    said: str = ""

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds if self.seconds else 0.0

    @property
    def refused(self) -> int:
        """Answers that say to come again later."""
        return self.statuses[429]

    @property
    def failed(self) -> int:
        return sum(count for status, count in self.statuses.items() if status not in (200, 429))


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=_TIMEOUT_SECONDS, trust_env=False) as client:
        yield client


async def _send(client: httpx.AsyncClient, request: dict[str, Any], outcome: Outcome) -> None:
    began = time.perf_counter()
    try:
        answer = await client.post(PREDICT, json=request)
    except httpx.TransportError as error:
        outcome.statuses[0] += 1
        outcome.said = outcome.said or str(error)
        return
    outcome.statuses[answer.status_code] += 1
    if answer.status_code == 200:
        outcome.latencies.append(time.perf_counter() - began)
        outcome.images += len(answer.json()["images"])
    else:
        outcome.said = outcome.said or f"{answer.status_code}: {answer.text[:300]}"


async def closed_loop(url: str, ask: Ask, clients: int, seconds: float) -> Outcome:
    """`clients` that ask without pause for `seconds`; each ends with the request under way then."""
    outcome = Outcome(f"closed loop, {clients} clients", clients)
    numbers = iter(range(10**9))
    async with connected(url) as client:
        began = time.perf_counter()

        async def one() -> None:
            while time.perf_counter() - began < seconds:
                await _send(client, ask(next(numbers)), outcome)

        await asyncio.gather(*(one() for _ in range(clients)))
        outcome.seconds = time.perf_counter() - began
    return outcome


async def open_loop(url: str, ask: Ask, rate: float, seconds: float, seed: int = 0) -> Outcome:
    """Requests that arrive as a Poisson process, `rate` a second for `seconds`; all are waited for."""
    outcome = Outcome(f"open loop, {rate:.2f} requests/s", rate)
    chance = random.Random(seed)
    sent: list[asyncio.Task[None]] = []
    async with connected(url) as client:
        began, at = time.perf_counter(), 0.0
        while (at := at + chance.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            sent.append(asyncio.create_task(_send(client, ask(len(sent)), outcome)))
        await asyncio.gather(*sent)
        outcome.seconds = time.perf_counter() - began
    return outcome


def run(load: Coroutine[Any, Any, Outcome]) -> Outcome:
    """One load to its end, on an event loop of its own."""
    return asyncio.run(load)


def rows(outcomes: Sequence[Outcome], precision: str, steps: int, size: str) -> list[Row]:
    """One row a load: its latencies in seconds, images/s and counts beside. A load without a picture has none."""
    return [
        make_row(
            f"{outcome.case} {size}",
            outcome.latencies,
            "s",
            precision,
            steps,
            1,
            digits=3,
            extra={
                "images_per_second": round(outcome.images_per_second, 3),
                "refused": outcome.refused,
                "failed": outcome.failed,
            },
        )
        for outcome in outcomes
        if outcome.latencies
    ]


def plot(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Two panels: images/s against clients, and latency against what is offered."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    closed = [outcome for outcome in outcomes if outcome.case.startswith("closed") and outcome.latencies]
    opened = [outcome for outcome in outcomes if outcome.case.startswith("open") and outcome.latencies]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    left.plot([one.load for one in closed], [one.images_per_second for one in closed], marker="o")
    left.set(xlabel="clients that ask without pause", ylabel="images/s", ylim=(0, None), xscale="log")
    left.set_xticks([one.load for one in closed], [f"{one.load:g}" for one in closed], minor=False)
    left.minorticks_off()
    for share in (0.5, 0.9, 0.99):
        right.plot(
            [one.load for one in opened],
            [percentile(one.latencies, share) for one in opened],
            marker="o",
            label=f"p{share * 100:g}",
        )
    right.set(xlabel="requests/s, Poisson", ylabel="seconds to the picture", ylim=(0, None))
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
