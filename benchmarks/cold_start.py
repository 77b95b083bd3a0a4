"""Measure cold starts: from the start of the real server's process to its first finished image.

Each start is a process with its own cache folder. The first start of each case is not counted: it reads files from the
disk, and later starts find these files in the page cache. `measure_read_seconds` reads the same bytes from an S3 bucket
without using them. This is the time that the network alone takes.
"""

import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, make_row, medians
from model.errors import PreheatError
from model.store.keys import blob_key
from model.store.manifest import Blob
from model.store.options import StoreOptions
from model.store.s3 import split_url
from model.store.s3_client import connect
from preheat.local_server.client import generate
from preheat.local_server.demo import cold_start_phases, release_variables
from preheat.local_server.server import Layout, Server

_CONCURRENT_PHASES = ("stream", "libraries")  # left out of the sum of the phases, which they overlap with
_PART_PREFIX = "warm_up_"  # of the parts of the phase warm_up
_READ_CONNECTIONS = 16  # of `measure_read_seconds`
_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class MeasuredStart:
    """The times of one cold start and of its first request."""

    first_image_seconds: float
    """From the process's start to its first finished image, as the server measured it."""
    phase_seconds: dict[str, float]
    """The parts of `first_image_seconds`, in order. "other" is the rest."""
    ready_seconds: float
    """From the process's start to the answer that the server is ready, as the client measured it."""
    stage_milliseconds: dict[str, float]
    """The parts of the first request, in order."""
    fetched_bytes: int
    """The size of the cache folder after the first request."""


@dataclass(frozen=True)
class StartCase:
    """A server image, and the store and the releases that it serves. `name` identifies it in a report."""

    name: str
    layout: Layout
    store: str
    releases: tuple[str, ...]


def measure_start(case: StartCase, request: dict[str, Any], work_folder: Path) -> MeasuredStart:
    """Start a server, send a request to it, and stop it. Raises ServerFailed or CallFailed.

    `work_folder`: the folder of the server's cache, which is deleted afterwards.
    """
    with tempfile.TemporaryDirectory(prefix="cache-", dir=work_folder, ignore_cleanup_errors=True) as cache:
        environment = {**release_variables(case.store, case.releases), "PREHEAT_CACHE_DIR": cache}
        began = time.perf_counter()
        with Server(case.layout, environment=environment) as server:
            server.wait_ready(_TIMEOUT_SECONDS)
            ready_seconds = time.perf_counter() - began
            response = generate(server.url, request, _TIMEOUT_SECONDS)
            measured = cold_start_phases(server.url)
        fetched_bytes = sum(path.stat().st_size for path in Path(cache).rglob("*") if path.is_file())
    first_image, phases = split_phases(measured, float(response["time"]))
    return MeasuredStart(first_image, phases, ready_seconds, response["timings"], fetched_bytes)


def split_phases(measured: Mapping[str, float], request_seconds: float) -> tuple[float, dict[str, float]]:
    """Return the seconds to the first image, and phases that add up to them.

    `measured`: the seconds of each phase from the server's metrics, with "first_image". The phase "first request" is
    added, and "other" as the rest: HTTP, Truss, and the time until the request arrived. Phases that overlap with
    others, and parts of a phase, are left out.
    """
    left_out = ("first_image", *_CONCURRENT_PHASES)
    phases = {
        name: seconds
        for name, seconds in measured.items()
        if name not in left_out and not name.startswith(_PART_PREFIX)
    }
    phases["first request"] = request_seconds
    phases["other"] = max(0.0, measured["first_image"] - sum(phases.values()))
    return measured["first_image"], phases


def bench_cold_starts(
    cases: Sequence[StartCase],
    request: dict[str, Any],
    runs: int,
    work_folder: Path,
    report: Callable[[StartCase, int, MeasuredStart], None],
    measure: Callable[[StartCase, dict[str, Any], Path], MeasuredStart] = measure_start,
) -> list[list[MeasuredStart]]:
    """Start each case `runs` times, after one start that is not counted. Returns the counted starts by case.

    The cases alternate, so that other work on the machine affects all of them equally. `report` is called after each
    start with the case, the start's number and the result. The start that is not counted has number 0.
    """
    counted_starts: list[list[MeasuredStart]] = [[] for _ in cases]
    for number in range(runs + 1):
        for case, starts_of_case in zip(cases, counted_starts, strict=True):
            start = measure(case, request, work_folder)
            report(case, number, start)
            if number > 0:
                starts_of_case.append(start)
    return counted_starts


def cold_start_row(name: str, release: str, starts: Sequence[MeasuredStart], precision: str, steps: int) -> Row:
    """Return the row of one case: seconds to the first image, and medians of the phases and of the stages."""
    fetched_bytes = max(start.fetched_bytes for start in starts)
    first_images = [start.first_image_seconds for start in starts]
    return make_row(
        f"cold start, {release}, {name}", first_images, "s", precision, steps, 1, digits=3,
        stages=medians([start.stage_milliseconds for start in starts]),
        phases=medians([start.phase_seconds for start in starts], 3),
        best=round(min(first_images), 3),
        ready=round(statistics.median(start.ready_seconds for start in starts), 3),
        **({"bytes_fetched": fetched_bytes} if fetched_bytes else {}),
    )  # fmt: skip


def describe_ratio(starts: Sequence[MeasuredStart], others: Sequence[MeasuredStart]) -> str:
    """Return the ratios of the medians until a server is ready and to the first image.

    With the quartiles of the ratios of pairs in turns.
    """

    def ratio(seconds: Sequence[float], other_seconds: Sequence[float]) -> str:
        pairs = [one / other for one, other in zip(seconds, other_seconds, strict=True)]
        low, _, high = statistics.quantiles(pairs, n=4, method="inclusive") if len(pairs) > 1 else pairs * 3
        return f"{statistics.median(seconds) / statistics.median(other_seconds):.3f} ({low:.3f} to {high:.3f})"

    ready = ratio([start.ready_seconds for start in starts], [start.ready_seconds for start in others])
    first = ratio([start.first_image_seconds for start in starts], [start.first_image_seconds for start in others])
    return f"{ready} times the seconds until ready, {first} times the seconds to the first image"


def read_row(
    url: str, options: StoreOptions, blobs: Sequence[Blob], runs: int, release: str, precision: str, steps: int
) -> Row:
    """Return the row of reading blobs alone from an S3 bucket, after one reading that is not counted."""
    seconds = [measure_read_seconds(url, options, blobs) for _ in range(runs + 1)][1:]
    return make_row(
        f"reading alone, {release}, S3", seconds, "s", precision, steps, 1, digits=3, best=round(min(seconds), 3),
        bytes_fetched=sum(blob.bytes for blob in blobs),
    )  # fmt: skip


def measure_read_seconds(url: str, options: StoreOptions, blobs: Sequence[Blob]) -> float:
    """Read blobs from an S3 bucket, discard their bytes without hashing, and return the seconds of the reading."""
    bucket, prefix = split_url(url)
    client = connect(options, _READ_CONNECTIONS)
    parts = [(blob, start) for blob in blobs for start in range(0, blob.bytes, options.part_bytes)]

    def read_part(part: tuple[Blob, int]) -> None:
        blob, start = part
        key = f"{prefix}/{blob_key(blob.sha256)}" if prefix else blob_key(blob.sha256)
        last = min(start + options.part_bytes, blob.bytes) - 1
        body = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{last}")["Body"]
        while body.read(2**20):
            pass

    client.list_objects_v2(Bucket=bucket, MaxKeys=1)  # opens a connection, as a server does for the manifest
    began = time.perf_counter()
    with ThreadPoolExecutor(_READ_CONNECTIONS) as pool:
        list(pool.map(read_part, parts))
    seconds = time.perf_counter() - began
    client.close()
    return seconds


@contextmanager
def run_test_object_store(root: Path, work_folder: Path) -> Iterator[None]:
    """Run the tests' object store (Ceph's gateway, tests/support/object_store.py) with an empty S3 bucket `preheat`.

    While the store runs, variables of this process's environment name its endpoint and credentials. `root`: the folder
    of the repository. Raises PreheatError if a file or a program of the object store is missing.
    """
    path = root / "tests" / "support" / "object_store.py"
    spec = importlib.util.spec_from_file_location("preheat_object_store", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise PreheatError(f"{path} was not found.", "Name an S3 bucket instead (--s3 s3://bucket).")
    ceph = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ceph)
    if missing := ceph.missing_programs():
        raise PreheatError(
            f"The object store cannot run: {', '.join(missing)} not installed.",
            f"Install them ({ceph.INSTALL}), or name an S3 bucket (--s3 s3://bucket).",
        )
    previous = dict(os.environ)
    try:
        with ceph.ObjectStore(work_folder / "ceph") as running:
            os.environ.update(running.environment)
            connect(StoreOptions(endpoint=running.url), connections=1).create_bucket(Bucket="preheat")
            yield
    finally:
        for name in os.environ.keys() - previous.keys():
            del os.environ[name]
        os.environ.update(previous)
