"""How many requests arrive when: constant, a daily wave, a spike, or a trace from a CSV file."""

import csv
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from model.errors import PreheatError

DAY = 86_400.0


class BadTraffic(PreheatError):
    """A traffic that is not described as it must be."""


@dataclass(frozen=True)
class Traffic:
    """`rate(t)`: requests a second at second t, never above `peak`, for `seconds`."""

    name: str
    rate: Callable[[float], float]
    peak: float
    seconds: float

    def arrivals(self, seed: int) -> Iterator[float]:
        """Moments of a Poisson process of that rate, by thinning (Lewis and Shedler 1979)."""
        chance, at = random.Random(seed), 0.0
        while self.peak > 0 and (at := at + chance.expovariate(self.peak)) < self.seconds:
            if chance.random() * self.peak < self.rate(at):
                yield at


def read_traffic(text: str, hours: float) -> Traffic:
    """`constant:RATE`, `wave:MEAN:SHARE` (a day's sine, SHARE of the mean up and down), `spike:BASE:PEAK:MINUTES` (in
    the middle), or the path of a CSV file of lines `second,rate`, each rate until the next line's second.

    Raises BadTraffic.
    """
    kind, *numbers = text.split(":")
    seconds = hours * 3600
    try:
        values = [float(number) for number in numbers] if kind in ("constant", "wave", "spike") else []
        if any(not 0 <= value < math.inf for value in values):
            raise ValueError("a number is below 0 or none")
        match kind, values:
            case "constant", [rate]:
                return Traffic(f"constant {rate:g}/s", lambda t: rate, rate, seconds)
            case "wave", [mean, share] if share <= 1:
                wave = _wave(mean, share)
                return Traffic(f"daily wave around {mean:g}/s, ±{share:.0%}", wave, mean * (1 + share), seconds)
            case "spike", [base, peak, minutes]:
                half = minutes * 30
                middle = seconds / 2
                return Traffic(
                    f"{base:g}/s with {minutes:g} minutes of {peak:g}/s",
                    lambda t: peak if abs(t - middle) <= half else base,
                    max(base, peak),
                    seconds,
                )
        if values:
            raise ValueError("it has other numbers than its kind takes")
        return _trace(Path(text))
    except (ValueError, OSError) as error:
        raise BadTraffic(
            f"{text!r} is no traffic ({error}): give constant:RATE, wave:MEAN:SHARE, spike:BASE:PEAK:MINUTES or a CSV "
            "file of lines second,rate."
        ) from error


def _wave(mean: float, share: float) -> Callable[[float], float]:
    """Lowest at midnight, where it begins."""
    return lambda t: mean * (1 - share * math.cos(2 * math.pi * t / DAY))


def _trace(path: Path) -> Traffic:
    with path.open(newline="") as file:
        lines = [(float(second), float(rate)) for second, rate in csv.reader(file)]
    seconds, rates = [second for second, _ in lines], [rate for _, rate in lines]
    if len(lines) < 2 or seconds != sorted(set(seconds)) or any(not 0 <= rate < math.inf for rate in rates):
        raise ValueError("its seconds must ascend, from two lines up, and its rates be 0 or more")
    start = seconds[0]

    def rate(t: float) -> float:
        return rates[max(0, bisect_right(seconds, start + t) - 1)]

    return Traffic(path.name, rate, max(rates), seconds[-1] - start)
