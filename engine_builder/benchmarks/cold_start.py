"""Measure cold starts: from the start of the real server's process to its first finished image.

Each run is a process with its own cache folder. The first run is not counted, because later runs find its files in the
page cache. A start from a bucket is compared with reading the same bytes without using them: the network's share.
"""

import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_builder.benchmarks.rows import Row, make_row, medians
from engine_builder.local_server.client import generate
from engine_builder.local_server.demo import cold_start_phases
from engine_builder.local_server.server import Layout, Server
from model.errors import PreheatError
from model.store.keys import blob_key
from model.store.manifest import Blob
from model.store.options import StoreOptions
from model.store.s3 import split_url
from model.store.s3_client import connect

_CONCURRENT_PHASES = ("stream",)  # they overlap with other phases, so they are left out of the sum
_CONNECTIONS = 16  # of `time_read`
_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Start:
    """One cold start. Durations in seconds, unless stated."""

    first_image: float
    """From the process's start to its first finished image, as the server measured it."""
    phases: dict[str, float]
    """The parts of `first_image`, in order; "other" is the rest."""
    ready: float
    """From the process's start to the answer that it is ready, as the client measured it."""
    stages: dict[str, float]
    """Milliseconds of the first request, by stage."""
    bytes: int
    """Bytes fetched into the cache folder."""


@dataclass(frozen=True)
class NamedStore:
    """A store to start from, and the name that rows give it."""

    name: str
    url: str


def start_once(layout: Layout, origin: NamedStore, release: str, request: dict[str, Any], work: Path) -> Start:
    """Start a server, send it one request, and stop it. Raises ServerFailed or CallFailed."""
    with tempfile.TemporaryDirectory(prefix="cache-", dir=work, ignore_cleanup_errors=True) as cache:
        environment = {"PREHEAT_STORE": origin.url, "PREHEAT_RELEASE": release, "PREHEAT_CACHE_DIR": cache}
        began = time.perf_counter()
        with Server(layout, environment=environment) as server:
            server.wait_ready(_TIMEOUT_SECONDS)
            ready = time.perf_counter() - began
            response = generate(server.url, request, _TIMEOUT_SECONDS)
            phases = cold_start_phases(server.url)
        size = sum(path.stat().st_size for path in Path(cache).rglob("*") if path.is_file())
        return complete_start(phases, response, ready, size)


def complete_start(phases: dict[str, float], response: dict[str, Any], ready: float, size: int) -> Start:
    """Add the phase of the request and "other", the rest: HTTP, Truss, and waiting for the request."""
    first_image = phases["first_image"]
    phases = {name: seconds for name, seconds in phases.items() if name not in (*_CONCURRENT_PHASES, "first_image")}
    phases["first request"] = float(response["time"])
    phases["other"] = max(0.0, first_image - sum(phases.values()))
    return Start(first_image, phases, ready, response["timings"], size)


StartServer = Callable[[Layout, NamedStore, str, dict[str, Any], Path], Start]


def bench_cold_starts(
    layout: Layout,
    origins: Sequence[NamedStore],
    release: str,
    request: dict[str, Any],
    runs: int,
    work: Path,
    report: Callable[[NamedStore, int, Start], None],
    start_server: StartServer = start_once,
) -> list[list[Start]]:
    """Start `runs` times from each store, after one start that is not counted. Returns the counted starts by store.

    The stores alternate, so other work on the machine affects all equally. `report` is called after each start with its
    number. The start that is not counted has number 0.
    """
    starts: list[list[Start]] = [[] for _ in origins]
    for number in range(runs + 1):
        for origin, counted in zip(origins, starts, strict=True):
            start = start_server(layout, origin, release, request, work)
            report(origin, number, start)
            if number:
                counted.append(start)
    return starts


def cold_start_row(origin: NamedStore, release: str, starts: Sequence[Start], precision: str, steps: int) -> Row:
    """Return the row of one store: seconds to the first image, and medians of the phases."""
    size = max(start.bytes for start in starts)
    return make_row(
        f"cold start, {release}, {origin.name}",
        [start.first_image for start in starts],
        "s",
        precision,
        steps,
        1,
        digits=3,
        stages=medians([start.stages for start in starts]),
        phases=medians([start.phases for start in starts], 3),
        best=round(min(start.first_image for start in starts), 3),
        ready=round(statistics.median(start.ready for start in starts), 3),
        **({"bytes_fetched": size} if size else {}),
    )


def time_read(url: str, options: StoreOptions, blobs: Sequence[Blob]) -> float:
    """Read blobs from a bucket and discard them without hashing. Returns the seconds that it took."""
    bucket, prefix = split_url(url)
    client = connect(options, _CONNECTIONS)
    parts = [(blob, start) for blob in blobs for start in range(0, blob.bytes, options.part_bytes)]

    def read(part: tuple[Blob, int]) -> None:
        blob, start = part
        key = f"{prefix}/{blob_key(blob.sha256)}" if prefix else blob_key(blob.sha256)
        last = min(start + options.part_bytes, blob.bytes) - 1
        body = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{last}")["Body"]
        while body.read(2**20):
            pass

    client.list_objects_v2(Bucket=bucket, MaxKeys=1)  # opens a connection, as reading the manifest does in a server
    began = time.perf_counter()
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        list(pool.map(read, parts))
    seconds = time.perf_counter() - began
    client.close()
    return seconds


@contextmanager
def run_test_object_store(root: Path, work: Path) -> Iterator[None]:
    """Run the tests' object store (Ceph's gateway, tests/support/object_store.py) with an empty bucket `preheat`.

    Meanwhile this process's environment names it as the store's endpoint. Raises PreheatError if it is not installed.
    """
    path = root / "tests" / "support" / "object_store.py"
    spec = importlib.util.spec_from_file_location("preheat_object_store", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise PreheatError(f"{path} was not found.", "Name a bucket instead (--s3 s3://bucket).")
    ceph = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ceph)
    if missing := ceph.missing_programs():
        remedy = f"Install them ({ceph.INSTALL}), or name a bucket (--s3 s3://bucket)."
        raise PreheatError(f"{', '.join(missing)} not installed.", remedy)
    with ceph.ObjectStore(work / "ceph") as running:
        previous = dict(os.environ)
        os.environ.update(running.environment)
        try:
            connect(StoreOptions(endpoint=running.url), 1).create_bucket(Bucket="preheat")
            yield
        finally:
            os.environ.clear()
            os.environ.update(previous)
