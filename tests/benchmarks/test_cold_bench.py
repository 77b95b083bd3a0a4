"""Benchmarks of cold starts: phases of real processes add up. How long they take is not tested."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from engine_builder.benchmarks import cold_start as cold_bench
from engine_builder.benchmarks.cold_start import (
    MeasuredStart,
    NamedStore,
    Requests,
    StartCase,
    cold_start_row,
    combine_measurements,
    measure_read_seconds,
    measure_start,
    run_test_object_store,
)
from engine_builder.commands.main import app
from engine_builder.local_server.client import CallFailed
from engine_builder.local_server.server import Layout
from engine_builder.releases.mirror import copy_release
from model.errors import PreheatError
from model.store.options import StoreOptions
from model.store.store import Store
from tests.conftest import Opener
from tests.support import object_store as ceph
from tests.support.faulty_proxy import FaultyProxy
from tests.support.repository import REPOSITORY

H200 = REPOSITORY / "truss" / "configs" / "h200.yaml"
REQUEST = {"prompt": "a red circle", "seed": 1, "num_inference_steps": 1}


def test_phases_and_request_add_up_to_the_first_image() -> None:
    parts = {"stream": 9.0, "warm_up_unet_2": 0.125}
    measured = {"import": 1.0, "weights": 0.5, "warm_up": 0.25, "first_image": 4.0} | parts
    start = combine_measurements(measured, {"time": 2.0, "timings": {"denoise": 1900.0}}, 1.8, 7)
    phases = {"import": 1.0, "weights": 0.5, "warm_up": 0.25, "first request": 2.0, "other": 0.25}
    assert start == MeasuredStart(4.0, phases, 1.8, {"denoise": 1900.0}, 7, parts)


def test_alternates_stores_and_drops_the_first_starts(tmp_path: Path) -> None:
    layout = Layout(tmp_path, tmp_path, tmp_path, {})
    local, bucket = (StartCase(name, layout, NamedStore(name, name)) for name in ("local", "bucket"))
    started: list[StartCase] = []

    def measure(case: StartCase, *_: object) -> MeasuredStart:
        started.append(case)
        return MeasuredStart(float(len(started)), {}, 0.0, {}, 0)

    reported: list[tuple[str, int]] = []
    measured = cold_bench.bench_cold_starts(
        [local, bucket],
        "toy/1",
        Requests((REQUEST,)),
        2,
        tmp_path,
        lambda case, number, _: reported.append((case.name, number)),
        measure,
    )
    assert started == [local, bucket] * 3
    assert reported == [(name, number) for number in range(3) for name in ("local", "bucket")]
    assert [[start.first_image_seconds for start in starts] for starts in measured] == [[3.0, 5.0], [4.0, 6.0]]


def test_starts_a_real_server(layout: Layout, store: Store, release: str, tmp_path: Path) -> None:
    case = StartCase("local", layout, NamedStore("local", store.url))
    start = measure_start(case, release, Requests((REQUEST, REQUEST | {"seed": 2}), repeats=2), tmp_path)
    assert [len(times) for times in start.repeated_milliseconds] == [2, 2]
    assert start.fetched_bytes == 0, "a local store needs no cache"
    assert not list(tmp_path.iterdir()), "the cache folder remains"
    assert {
        "import",
        "resolve",
        "weights",
        "engines",
        "warm_up",
        "first request",
        "other",
    } <= start.phase_seconds.keys()
    assert sum(start.phase_seconds.values()) == pytest.approx(start.first_image_seconds, abs=0.01)
    assert start.phase_seconds["import"] < start.ready_seconds < start.first_image_seconds
    assert 0 < start.stage_milliseconds["denoise"] < 1000 * start.phase_seconds["first request"]
    row = cold_start_row(NamedStore("local", store.url), release, [start, start], "fp32", 1).to_dict()
    assert row["unit"] == "s" and row["runs"] == 2 and row["phases"].keys() == start.phase_seconds.keys()
    assert row["best"] == row["p50"] == row["value"]
    assert row["ready"] == round(start.ready_seconds, 3) and row["stages"].keys() == start.stage_milliseconds.keys()


def cold_start(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "cold-start", *arguments])


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, Any], dict[str, Any]]]:
    """Record the runs, the request and the deployment's settings of each benchmark, without starting a server."""
    recorded: list[tuple[int, dict[str, Any], dict[str, Any]]] = []

    def record(
        cases: Sequence[StartCase], release: str, requests: Requests, runs: int, *_: object
    ) -> list[list[MeasuredStart]]:
        config = yaml.safe_load((cases[0].layout.app / "config.yaml").read_text())
        recorded.append((runs, requests.kinds[0], config["model_metadata"]["preheat"]))
        return [[MeasuredStart(4.0, {"import": 1.0}, 3.0, {"denoise": 900.0}, 0)] * runs]

    monkeypatch.setattr(cold_bench, "bench_cold_starts", record)
    return recorded


def test_command_sets_size_and_buckets(
    store: Store, release: str, benchmarks: list[tuple[int, dict[str, Any], dict[str, Any]]], tmp_path: Path
) -> None:
    out = tmp_path / "rows.json"
    result = cold_start(
        release, "--store", store.url, "--config", str(H200), "--runs", "2", "--steps", "7", "--size", "512x768",
        "--bucket", "512x768@4", "--bucket", "1024x1024@2", "--out", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    [(runs, request, settings)] = benchmarks
    assert (runs, request["width"], request["height"], request["num_inference_steps"]) == (2, 512, 768, 7)
    assert settings["buckets"] == [
        {"height": 768, "width": 512, "rows": 4},
        {"height": 1024, "width": 1024, "rows": 2},
    ]
    [row] = json.loads(out.read_text())
    assert (row["value"], row["ready"], row["stages"], row["steps"]) == (4.0, 3.0, {"denoise": 900.0}, 7)
    assert [row] == json.loads(result.output.splitlines()[-1])


def test_command_defaults_to_config_and_release(
    store: Store, release: str, benchmarks: list[tuple[int, dict[str, Any], dict[str, Any]]]
) -> None:
    result = cold_start(release, "--store", store.url, "--config", str(H200), "--runs", "1")
    assert result.exit_code == 0, result.output
    [(_, request, settings)] = benchmarks
    assert settings == yaml.safe_load(H200.read_text())["model_metadata"]["preheat"]
    assert request.keys() == {"prompt", "seed", "num_inference_steps"}


def test_server_has_only_the_named_buckets(store: Store, release: str) -> None:
    result = cold_start(release, "--store", store.url, "--size", "128x128", "--bucket", "256x256@2", "--steps", "1")
    assert isinstance(result.exception, CallFailed) and result.exception.status == 400
    assert "256x256" in str(result.exception)


@pytest.mark.parametrize("arguments", [["--size", "1024"], ["--bucket", "1024@2"], ["--bucket", "1024x1024@two"]])
def test_refuses_an_invalid_size(arguments: list[str], store: Store, release: str) -> None:
    refused = cold_start(release, "--store", store.url, *arguments)
    assert refused.exit_code == 2 and arguments[0] in refused.output and arguments[1] in refused.output


def test_measured_reading_reads_every_byte_once(
    store: Store, release: str, open_bucket: Opener, proxy: FaultyProxy, bucket: str, tmp_path: Path
) -> None:
    destination = open_bucket("a/prefix", cache_dir=tmp_path / "unused")
    manifest, _ = copy_release(store, destination, release)
    blobs = list(manifest.blobs().values())
    totals: list[int] = []
    proxy.on_bytes = totals.append
    options = StoreOptions(
        endpoint=proxy.url, access_key_id=ceph.ACCESS_KEY, secret_access_key=ceph.SECRET_KEY, region="us-east-1"
    )
    assert measure_read_seconds(f"s3://{bucket}/a/prefix", options, blobs) > 0
    for blob in blobs:
        ranges = proxy.requested_ranges(blob.sha256)
        starts = sorted(int(requested.partition("=")[2].partition("-")[0]) for requested in ranges)
        assert starts == list(range(0, blob.bytes, 16 * 2**20))
    assert totals[-1] >= sum(blob.bytes for blob in blobs)


def test_reports_a_missing_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PreheatError, match="Name an S3 bucket instead"):
        run_test_object_store(tmp_path, tmp_path).__enter__()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        PreheatError, match="The object store cannot run: .* not installed. Install them .apt-get install"
    ):
        run_test_object_store(REPOSITORY, tmp_path).__enter__()


def run(*arguments: object) -> tuple[list[str], dict[str, Any]]:
    """Run a module in its own process. Returns its lines, and the last one parsed as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)], cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    return lines, json.loads(last)


def test_bare_start_reports_its_phases(store: Store, release: str) -> None:
    lines, result = run("engine_builder.benchmarks.bare_start", store.url, release, "--steps", 1)
    assert result["phases"]["first_image"] > result["phases"]["import"] > 0
    assert result["engine"]["release"] == release and result["timings"]["denoise"] > 0
    assert any(line.endswith(" s  warm_up") for line in lines)
