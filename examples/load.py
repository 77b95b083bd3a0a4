#!/usr/bin/env python3
"""Send requests at a given rate for a given time, and report the latency: an open-loop load test.

    python load.py --rate 2 --seconds 30 --fields '{"num_inference_steps": 20}'

Arrivals are random (a Poisson process) and do not wait for earlier answers. A latency counts from the moment when the
request was due, so a slow client does not hide a slow server. A request that is refused with 429 is not repeated. The
last line of the output is JSON. Exits with status 1 if a request failed, or if none finished.

MODEL_URL or --url is the address of the model; the default is a local server. The key in BASETEN_API_KEY is sent only
over https. Requests to a deployed model cost money.
"""

import asyncio
import json
import math
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from client import (  # type: ignore[import-not-found]  # of this folder
    ANSWER_SECONDS,
    Failed,
    connection,
    exit_status,
    failures_of,
    make_parser,
    positive,
    read_reason,
)


@dataclass
class Results:
    """The answers so far. `latencies`: seconds of each finished request."""

    latencies: list[float] = field(default_factory=list)
    refused: int = 0
    failed: int = 0
    first_failure: str = ""


async def send_first_request(client: httpx.AsyncClient, url: str, body: str) -> tuple[int, dict[str, str]]:
    """Send one request that is not measured. Return the number of its images, and its engine. Raises Failed."""
    with failures_of(url):
        answer = await client.post(url, content=body)
    if not answer.is_success:
        raise Failed(f"The first request returned no image. {answer.status_code}: {read_reason(answer)}")
    try:
        response = answer.json()
        return len(response["images"]), response["engine"]
    except (ValueError, KeyError, TypeError) as error:
        raise Failed("The answer holds no images. Check that MODEL_URL is a Preheat model.") from error


async def request_once(client: httpx.AsyncClient, url: str, body: str, due: float, results: Results) -> None:
    """Send one request that was due at the time `due`, and add its answer to `results`."""
    try:
        answer = await client.post(url, content=body)
    except httpx.RequestError as error:
        failure = f"{type(error).__name__}: {error}"
    else:
        if answer.is_success:
            results.latencies.append(time.perf_counter() - due)
            return
        if answer.status_code == 429:
            results.refused += 1
            return
        failure = f"{answer.status_code}: {read_reason(answer)}"
    results.failed += 1
    results.first_failure = results.first_failure or failure


async def run(url: str, body: str, rate: float, seconds: float, timeout: float, seed: int) -> dict[str, Any]:
    """Send the requests and return the report. `seed` selects the arrivals. Raises Failed."""
    results, arrivals, generator = Results(), 0, random.Random(seed)
    # Without a limit of connections, no request waits for the end of another. So arrivals keep the given rate.
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=timeout, limits=limits, **connection(url)) as client:
        images, engine = await send_first_request(client, url, body)
        began = due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            while (due := due + generator.expovariate(rate)) < began + seconds:
                await asyncio.sleep(due - time.perf_counter())
                group.create_task(request_once(client, url, body, due, results))
                arrivals += 1
        elapsed = time.perf_counter() - began
    if results.first_failure:
        print(f"The first failure: {results.first_failure}", file=sys.stderr)
    ordered = sorted(results.latencies)
    return {
        "rate": rate,
        "arrivals": arrivals,
        "finished": len(ordered),
        "refused": results.refused,
        "failed": results.failed,
        "p50_seconds": percentile(ordered, 50),
        "p90_seconds": percentile(ordered, 90),
        "p99_seconds": percentile(ordered, 99),
        "images_per_second": round(len(ordered) * images / elapsed, 3),
        "seconds": round(elapsed, 3),
        "engine": engine,
    }


def percentile(ordered: list[float], percent: int) -> float | None:
    """Return the smallest value that `percent` % of the values do not exceed, or None without values."""
    return round(ordered[math.ceil(len(ordered) * percent / 100) - 1], 4) if ordered else None


def show(report: dict[str, Any]) -> None:
    """Print the report as a table, then as one line of JSON."""
    for name, value in report.items():
        if name != "engine":
            print(f"{name:18} {'-' if value is None else value}")
    print(json.dumps(report))


def main() -> int:
    parser = make_parser("Send requests at a rate for a time, and report the latency.", "every request")
    parser.add_argument("--prompt", default="a red circle on a white background")
    parser.add_argument("--rate", type=positive, default=1.0, help="requests per second on average")
    parser.add_argument("--seconds", type=positive, default=10.0, help="seconds in which requests arrive")
    parser.add_argument(
        "--arrivals-seed", dest="seed", type=int, default=0, help="the same seed gives the same arrivals"
    )
    parser.add_argument("--timeout", type=positive, default=ANSWER_SECONDS, help="seconds to wait for one answer")
    options = parser.parse_args()
    body = json.dumps(options.fields | {"prompt": options.prompt, "stream": False})
    report = asyncio.run(run(options.url, body, options.rate, options.seconds, options.timeout, options.seed))
    show(report)
    return 1 if report["failed"] or not report["finished"] else 0


if __name__ == "__main__":
    sys.exit(exit_status(main, "Interrupted. The requests in flight are cancelled."))
