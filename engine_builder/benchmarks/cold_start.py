"""A cold start as a caller meets it: from the start of the real server's process to its first finished picture.

Each run is a process of its own with a cache folder of its own. Files that earlier runs have read are in the page cache
by then, so the first run is not counted. Beside a start from a bucket stands what reading the same bytes takes when
nothing is done with them, for that is the network's part.
"""

import importlib.util
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_builder.benchmarks.rows import Row, make_row, medians
from engine_builder.local_server.demo import cold_start_phases
from engine_builder.local_server.server import (
    Layout,
    Server,
)
from model.errors import PreheatError
from model.store.manifest import Blob
from model.store.store import StoreOptions

FIRST_IMAGE = "first_image"
_OVERLAPPING = ("stream",)  # phases that run beside others and so are no part of the sum
_TIMEOUT = 600.0


@dataclass(frozen=True)
class Start:
    """One cold start. Seconds."""

    first_image: float
    """From the process's start to its first finished picture, as the server itself measured it."""
    phases: dict[str, float]
    """What of that went where, in order; what is left over is the server's own."""
    ready: float
    """From the process's start to the answer that it is ready, as its caller saw it."""
    stages: dict[str, float]
    """Milliseconds of the first request, by stage."""
    bytes: int
    """Fetched into the cache folder."""


@dataclass(frozen=True)
class Place:
    """Where a server finds its release."""

    name: str
    store: str
    environment: Mapping[str, str]
    fetched: bool
    """Whether blobs come over a network, into a cache folder that is empty at first."""


def start_once(layout: Layout, place: Place, release: str, request: dict[str, Any], work: Path) -> Start:
    """Start a server, ask it for a picture, end it. Raises ServerFailed or CallFailed."""
    from engine_builder.local_server.client import generate

    cache = Path(tempfile.mkdtemp(prefix="cache-", dir=work))
    try:
        environment = {
            **place.environment,
            "PREHEAT_STORE": place.store,
            "PREHEAT_RELEASE": release,
            "PREHEAT_CACHE_DIR": str(cache),
        }
        began = time.perf_counter()
        with Server(layout, environment=environment) as server:
            server.wait_ready(_TIMEOUT)
            ready = time.perf_counter() - began
            answer = generate(server.url, request, _TIMEOUT)
            measured = cold_start_phases(server.url)
        size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
        return _start(measured, answer, ready, size)
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def _start(measured: dict[str, float], answer: dict[str, Any], ready: float, size: int) -> Start:
    """Phases up to the first request, the request itself, and what is left: HTTP, Truss, waiting for the request."""
    first = measured.pop(FIRST_IMAGE)
    phases = {name: seconds for name, seconds in measured.items() if name not in _OVERLAPPING}
    phases["first request"] = float(answer["time"])
    phases["other"] = max(0.0, first - sum(phases.values()))
    return Start(first, phases, ready, answer["timings"], size)


def bench_places(
    layout: Layout,
    places: Sequence[Place],
    release: str,
    request: dict[str, Any],
    runs: int,
    work: Path,
    report: Callable[[Place, int, Start], None],
) -> list[list[Start]]:
    """By place, the starts that count: `runs` of each, after one that does not. The places take turns, so that what
    else the machine does meets them alike. `report` is told of each start as it ends (0: not counted)."""
    starts: list[list[Start]] = [[] for _ in places]
    for number in range(runs + 1):
        for place, counted in zip(places, starts, strict=True):
            start = start_once(layout, place, release, request, work)
            report(place, number, start)
            if number:
                counted.append(start)
    return starts


def starts_row(place: Place, release: str, starts: Sequence[Start], precision: str, steps: int) -> Row:
    """The row of one place: seconds to the first image, and medians of the phases."""
    return make_row(
        f"cold start, {release}, {place.name}",
        [start.first_image for start in starts],
        "s",
        precision,
        steps,
        1,
        digits=3,
        stages=medians([start.stages for start in starts]),
        phases=medians([start.phases for start in starts], 3),
        extra={
            "best": round(min(start.first_image for start in starts), 3),
            "ready": round(statistics.median(start.ready for start in starts), 3),
        }
        | _fetched(starts),
    )


def _fetched(starts: Sequence[Start]) -> dict[str, int]:
    size = max(start.bytes for start in starts)
    return {"bytes_fetched": size} if size else {}


def read_alone(url: str, options: StoreOptions, blobs: Sequence[Blob]) -> float:
    """Seconds that reading these blobs from a bucket takes when they are thrown away: not hashed, kept or looked at."""
    from model.store.keys import blob_key
    from model.store.s3 import PART, split_url
    from model.store.s3_client import connect

    connections = 16
    bucket, prefix = split_url(url)
    client = connect(options, connections)
    parts = [(blob, at) for blob in blobs for at in range(0, blob.bytes, PART)]

    def read(part: tuple[Blob, int]) -> None:
        blob, at = part
        key = f"{prefix}/{blob_key(blob.sha256)}" if prefix else blob_key(blob.sha256)
        body = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={at}-{min(at + PART, blob.bytes) - 1}")["Body"]
        while body.read(2**20):
            pass

    client.list_objects_v2(Bucket=bucket, MaxKeys=1)  # as a server's reading of the manifest, it opens the connection
    began = time.perf_counter()
    with ThreadPoolExecutor(connections) as pool:
        list(pool.map(read, parts))
    seconds = time.perf_counter() - began
    client.close()
    return seconds


@contextmanager
def own_object_store(root: Path, work: Path) -> Iterator[dict[str, str]]:
    """The tests' object store (Ceph's gateway, tests/stand_ins/object_store.py), with a bucket `preheat` in it.

    Gives the environment that leads there. Raises PreheatError where it is not installed.
    """
    path = root / "tests" / "stand_ins" / "object_store.py"
    spec = importlib.util.spec_from_file_location("preheat_object_store", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise PreheatError(f"There is no {path}: name a bucket instead (--s3 s3://bucket).")
    ceph = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ceph)
    if missing := ceph.missing_programs():
        raise PreheatError(f"{', '.join(missing)} not installed: {ceph.INSTALL}, or name a bucket (--s3 s3://bucket).")
    with ceph.ObjectStore(work / "ceph") as running:
        environment: dict[str, str] = running.environment
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            import boto3  # type: ignore[import-untyped]

            boto3.client("s3", endpoint_url=running.url).create_bucket(Bucket="preheat")
            yield environment
        finally:
            os.environ.clear()
            os.environ.update(before)
