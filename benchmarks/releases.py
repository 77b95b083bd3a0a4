"""Measure a server of several releases over HTTP: releases in slots of their own in turns, and swaps of a slot."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from benchmarks.measure import Work, measure
from benchmarks.rows import Row, make_row
from preheat.local_server.client import generate
from preheat.local_server.demo import read_metrics

_TIMEOUT_SECONDS = 600.0
_SWAPS_A_ROUND = 4  # even, so that a round ends with the release that it began with
_RESIDENT = 'preheat_release_resident{{release="{release}"}}'
_FILLS = 'preheat_release_load_seconds_{kind}{{outcome="fill"}}'


@dataclass(frozen=True)
class Turns:
    """Milliseconds of requests of one client: for one release, and for two in turns."""

    alone: list[float]
    alternating: list[float]


@dataclass
class Swaps:
    """Seconds of each swap, and of the requests for another release while slots are swapped and while they are not."""

    swaps: list[float] = field(default_factory=list)
    beside_swaps: list[float] = field(default_factory=list)
    beside_none: list[float] = field(default_factory=list)


def wait_resident(url: str, releases: Sequence[str], timeout: float) -> None:
    """Return when the weights of `releases` are on the device. Raises TimeoutError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not all(read_metrics(url).get(_RESIDENT.format(release=release)) for release in releases):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{', '.join(releases)} are not in slots after {timeout:g} s.")
        time.sleep(0.2)


def measure_turns(url: str, releases: Sequence[str], request: Mapping[str, Any], warm_ups: int, runs: int) -> Turns:
    """Measure requests for the first of `releases`, and for all of them in turns. All have slots."""
    works = [_asking(url, releases[:1], request), _asking(url, releases, request)]
    alone, alternating = measure(works, warm_ups, runs)
    return Turns(alone[0], alternating[0])


def measure_swaps(url: str, releases: Sequence[str], request: Mapping[str, Any], runs: int) -> Swaps:
    """Measure at least `runs` swaps. Two slots hold the first two of three `releases`.

    One client asks for the first release all the time, so that it keeps its slot. Another one asks for the third and
    the second in turns, so that each request waits for a swap, and in other rounds as often for the second alone.
    """
    resident, second, third = releases
    found = Swaps()
    while len(found.swaps) < runs:
        found.beside_none += _ask_beside(url, request, resident, [second] * _SWAPS_A_ROUND, lambda _: None)
        names = [third, second] * (_SWAPS_A_ROUND // 2)
        found.beside_swaps += _ask_beside(url, request, resident, names, found.swaps.append)
    return found


def make_rows(turns: Turns, swaps: Swaps, size: str, precision: str, steps: int, **extra: Any) -> list[Row]:
    """Return a row for each list of times, in milliseconds. `extra`: entries of all of them."""
    times = {
        "one release": turns.alone,
        "two releases in turns": turns.alternating,
        "a swap": [1000 * seconds for seconds in swaps.swaps],
        "beside another release": [1000 * seconds for seconds in swaps.beside_none],
        "beside two that are swapped": [1000 * seconds for seconds in swaps.beside_swaps],
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


def _ask_beside(
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
