"""Measure a server of several releases over HTTP: releases in slots of their own in turns, and swaps of a slot."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from benchmarks.measure import Work, measure
from benchmarks.rows import Row, make_row
from model.errors import PreheatError
from preheat.local_server.client import generate
from preheat.local_server.demo import read_metrics

_TIMEOUT_SECONDS = 600.0
_POLL_SECONDS = 0.2
_SWAPS_A_ROUND = 4  # even, so that a round ends with the release that it began with
_RESIDENT = 'preheat_release_resident{{release="{release}"}}'
_FAILED = 'preheat_release_loads_total{outcome="failed"}'
_FILLS = 'preheat_release_load_seconds_{kind}{{outcome="fill"}}'


@dataclass(frozen=True)
class Turns:
    """Milliseconds of requests of one client: for one release, and for two in turns."""

    alone: list[float]
    alternating: list[float]


@dataclass
class Swaps:
    """Seconds of swaps, and of requests for a release in the other slot."""

    swaps: list[float] = field(default_factory=list)
    with_swaps: list[float] = field(default_factory=list)
    """Requests while two releases are swapped."""
    without_swaps: list[float] = field(default_factory=list)
    """Requests while images of another release are generated, without swaps."""


class NotSwapped(PreheatError):
    """A server does not put releases into slots as the measurement needs it."""

    remedy = "Start it with `preheat serve` and the same releases and config, and read its log."


def wait_resident(url: str, releases: Sequence[str], timeout: float) -> None:
    """Return when the weights of `releases` are on the device.

    Raises NotSwapped after `timeout` seconds, or if a release cannot be loaded.
    """
    deadline = time.monotonic() + timeout
    while True:
        metrics = read_metrics(url)
        missing = [name for name in releases if not metrics.get(_RESIDENT.format(release=name))]
        if not missing:
            return
        if metrics.get(_FAILED):
            raise NotSwapped(f"A release cannot be loaded; {', '.join(missing)} without a slot.")
        if time.monotonic() > deadline:
            raise NotSwapped(f"After {timeout:g} s no slot was opened for {', '.join(missing)}.")
        time.sleep(_POLL_SECONDS)


def measure_turns(url: str, releases: Sequence[str], request: Mapping[str, Any], warm_ups: int, runs: int) -> Turns:
    """Measure requests for the first of `releases`, and for all of them in turns. All have slots."""
    works = [_asking(url, releases[:1], request), _asking(url, releases, request)]
    alone, alternating = measure(works, warm_ups, runs)
    return Turns(alone[0], alternating[0])


def measure_swaps(url: str, releases: Sequence[str], request: Mapping[str, Any], runs: int) -> Swaps:
    """Measure at least `runs` swaps. Two slots hold the first two of three `releases`. Raises NotSwapped.

    One client asks for the first release all the time, so that it keeps its slot. Another one asks for the third and
    the second in turns, so that each request waits for a swap, and in other rounds as often for the second alone.
    """
    resident, second, third = releases
    found = Swaps()
    while len(found.swaps) < runs:
        before = len(found.swaps)
        names = [second] * _SWAPS_A_ROUND
        found.without_swaps += _ask_concurrently(url, request, resident, names, found.swaps.append)
        names = [third, second] * (_SWAPS_A_ROUND // 2)
        found.with_swaps += _ask_concurrently(url, request, resident, names, found.swaps.append)
        if len(found.swaps) - before < _SWAPS_A_ROUND:  # more: the first release had to leave, too
            raise NotSwapped(f"{_SWAPS_A_ROUND} requests in turns made {len(found.swaps) - before} swaps.")
    return found


def make_rows(turns: Turns, swaps: Swaps, size: str, precision: str, steps: int, **extra: Any) -> list[Row]:
    """Return a row for each list of times, in milliseconds. `extra`: entries of all rows."""
    times = {
        "one release": turns.alone,
        "two releases in turns": turns.alternating,
        "a swap": [1000 * seconds for seconds in swaps.swaps],
        "one release while another one generates": [1000 * seconds for seconds in swaps.without_swaps],
        "one release while others are swapped": [1000 * seconds for seconds in swaps.with_swaps],
    }
    return [
        make_row(f"several releases, {name} {size}", values, "ms", precision, steps, 1, **extra)
        for name, values in times.items()
    ]


def _asking(url: str, releases: Sequence[str], request: Mapping[str, Any]) -> Work:
    """Return a function that generates the request with the next of `releases`."""
    names = itertools.cycle(releases)

    def work() -> dict[str, float]:
        timings: dict[str, float] = generate(url, {**request, "model": next(names)}, _TIMEOUT_SECONDS)["timings"]
        return timings

    return work


def _ask_concurrently(
    url: str, request: Mapping[str, Any], resident: str, names: Sequence[str], swapped: Callable[[float], None]
) -> list[float]:
    """Ask for the releases `names`, and meanwhile for `resident`. Returns the seconds of the answers of `resident`.

    `swapped` is called with the seconds of each swap.
    """
    seconds = []
    ask, ask_others = _asking(url, [resident], request), _asking(url, names, request)

    def ask_each() -> None:
        for _ in names:
            count, before = _fills(url)
            ask_others()
            new_count, after = _fills(url)
            if new_count > count:
                swapped((after - before) / (new_count - count))

    with ThreadPoolExecutor(1) as others:
        asked = others.submit(ask_each)
        while not asked.done():
            began = time.perf_counter()
            ask()
            seconds.append(time.perf_counter() - began)
        asked.result()
    return seconds


def _fills(url: str) -> tuple[float, float]:
    """Return how many swaps the server has made, and their seconds."""
    metrics = read_metrics(url)
    count, seconds = (metrics.get(_FILLS.format(kind=kind), 0.0) for kind in ("count", "sum"))
    return count, seconds
