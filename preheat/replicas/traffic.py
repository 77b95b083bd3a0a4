"""Rates of requests over time: constant, a daily wave, a spike, or a trace from a CSV file."""

import csv
import io
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine_builder.files import read_file
from model.errors import PreheatError

DAY_SECONDS = 86_400.0


class BadTraffic(PreheatError):
    """The description of the traffic is invalid."""

    remedy = "Give constant:RATE, wave:MEAN:SHARE, spike:BASE:PEAK:MINUTES or a CSV file of lines second,rate."


@dataclass(frozen=True)
class Traffic:
    """`rate(t)` requests a second at second t, never above `peak`, for `seconds`."""

    name: str
    rate: Callable[[float], float]
    peak: float
    seconds: float

    def arrivals(self, seed: int) -> Iterator[float]:
        """Yield the arrivals (seconds) of a Poisson process with this rate, by thinning (Lewis and Shedler 1979)."""
        generator = random.Random(seed)
        moments = poisson_arrivals(self.peak, self.seconds, generator) if self.peak > 0 else ()
        return (at for at in moments if generator.random() * self.peak < self.rate(at))


def poisson_arrivals(rate: float, seconds: float, generator: random.Random) -> Iterator[float]:
    """Yield the arrivals (seconds) of a Poisson process with `rate` arrivals a second."""
    at = 0.0
    while (at := at + generator.expovariate(rate)) < seconds:
        yield at


def read_traffic(text: str, hours: float) -> Traffic:
    """Parse a description of traffic. Raises BadTraffic.

    `constant:RATE`; `wave:MEAN:SHARE`, a daily sine with an amplitude of SHARE of the mean; `spike:BASE:PEAK:MINUTES`,
    in the middle of the time; or the path of a CSV file of lines `second,rate`. A line's rate holds until the next
    line's second. `hours`: duration of all but a CSV file.
    """
    kind, *numbers = text.split(":")
    seconds = hours * 3600
    try:
        values = [float(number) for number in numbers] if kind in ("constant", "wave", "spike") else []
        if any(not 0 <= value < math.inf for value in values):
            raise ValueError("a number is negative or not finite")
        match kind, values:
            case "constant", [rate]:
                return Traffic(f"constant {rate:g}/s", lambda t: rate, rate, seconds)
            case "wave", [mean, share] if share <= 1:
                wave = _wave(mean, share)
                return Traffic(f"daily wave around {mean:g}/s, ±{share:.0%}", wave, mean * (1 + share), seconds)
            case "spike", [base, peak, minutes]:
                name = f"{base:g}/s with {minutes:g} minutes of {peak:g}/s"
                middle, half = seconds / 2, minutes * 30
                return Traffic(name, lambda t: peak if abs(t - middle) <= half else base, max(base, peak), seconds)
        if values:
            raise ValueError("its kind needs other numbers")
        return _read_trace(Path(text))
    except (ValueError, OSError, csv.Error) as error:
        raise BadTraffic(f"{text!r} is not a valid traffic: {error}.") from error


def _wave(mean: float, share: float) -> Callable[[float], float]:
    """Return the rate of a daily wave, which begins at its lowest point."""
    return lambda t: mean * (1 - share * math.cos(2 * math.pi * t / DAY_SECONDS))


def _read_trace(path: Path) -> Traffic:
    text = read_file(path).decode()
    lines = [(float(second), float(rate)) for second, rate in csv.reader(io.StringIO(text, newline=""))]
    seconds, rates = [second for second, _ in lines], [rate for _, rate in lines]
    valid = len(lines) >= 2 and seconds == sorted(set(seconds)) and math.isfinite(seconds[-1] - seconds[0])
    if not valid or any(not 0 <= rate < math.inf for rate in rates):
        raise ValueError("it needs two lines or more, with ascending seconds and rates of 0 or more")
    start = seconds[0]

    def rate(t: float) -> float:
        return rates[max(0, bisect_right(seconds, start + t) - 1)]

    return Traffic(path.name, rate, max(rates), seconds[-1] - start)
