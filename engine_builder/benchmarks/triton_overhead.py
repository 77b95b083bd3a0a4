"""Compare the wall time of one request on Triton with that on the Truss server. Both run already, with one release.

    python -m engine_builder.benchmarks.triton_overhead http://127.0.0.1:8080 127.0.0.1:8000 --out rows.json

The same requests go to the Truss server, to `generate_loop`, and to the ensembles that --ensemble names, one at a time
and in random order. Ensembles have a fixed number of steps, which --steps must be. An ensemble returns pixels, the
others a PNG.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine_builder.benchmarks.rows import Row, finish, make_row
from engine_builder.local_server import client as truss
from engine_builder.triton_repository import client as triton
from engine_builder.triton_repository.loop_model import GENERATE_LOOP

_TRUSS = "truss"
_TIMEOUT_SECONDS = 600
Call = Callable[[int], Any]
"""Sends one request with this seed and waits for its image."""


def measure(calls: dict[str, Call], runs: int, warmups: int, seed: int = 0) -> dict[str, list[float]]:
    """Return the milliseconds of each server's calls. Each round has one seed, and a random order."""
    order = random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(warmups + runs):
        for name in order.sample(list(calls), len(calls)):
            start = time.perf_counter()
            calls[name](number)
            if number >= warmups:
                times[name].append(1000 * (time.perf_counter() - start))
    return times


def server_calls(
    url: str, address: str, ensembles: Sequence[str], prompt: str, steps: int, guidance: float
) -> dict[str, Call]:
    """Return what sends a request to each server, by name."""
    request = {"prompt": prompt, "num_inference_steps": steps, "guidance_scale": guidance, "output_format": "png"}
    request["use_refiner"] = False  # which ensembles do not have

    def to_ensemble(name: str) -> Call:
        return lambda seed: triton.generate_pixels("http", address, name, prompt, seed, guidance, _TIMEOUT_SECONDS)

    return {
        _TRUSS: lambda seed: truss.generate(url, request | {"seed": seed}, _TIMEOUT_SECONDS),
        GENERATE_LOOP: lambda seed: triton.generate("http", address, request | {"seed": seed}, _TIMEOUT_SECONDS),
        **{name: to_ensemble(name) for name in ensembles},
    }


def make_rows(times: dict[str, list[float]], precision: str, steps: int) -> list[Row]:
    """Return a row for each server, with the ratios of its median and its minimum to those of the Truss server."""
    truss_times = times[_TRUSS]
    return [
        make_row(
            f"one request, {name}", values, "ms", precision, steps, 1,
            of_truss=round(statistics.median(values) / statistics.median(truss_times), 3),
            of_truss_min=round(min(values) / min(truss_times), 3),
        )
        for name, values in times.items()
    ]  # fmt: skip


def main() -> None:
    """Measure the servers of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("truss", help="URL of the Truss server")
    parser.add_argument("triton", help="HOST:PORT of Triton's HTTP endpoint")
    parser.add_argument("--ensemble", action="append", default=[], help="ensemble of the unrolled pipeline; repeatable")
    parser.add_argument("--prompt", default="a small orange star")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--warmups", type=int, default=3)
    parser.add_argument("--precision", default="fp32", help="of the release's UNet, for the rows")
    parser.add_argument("--out", type=Path, help="file of rows that is extended")
    given = parser.parse_args()
    calls = server_calls(given.truss, given.triton, given.ensemble, given.prompt, given.steps, given.guidance)
    rows = make_rows(measure(calls, given.runs, given.warmups), given.precision, given.steps)
    for row in rows:
        print(f"{row.case:<36} p50 {row.p50:8.1f} ms   {row.extra['of_truss']:.3f} of Truss's median")
    finish(rows, given.out)


if __name__ == "__main__":
    main()
