"""Cold-start benchmarks: real processes whose phases add up. Their times are not tested."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from engine_builder.benchmarks import cold_start as cold_bench
from engine_builder.benchmarks.cold_start import (
    NamedStore,
    Start,
    cold_start_row,
    complete_start,
    run_test_object_store,
    start_once,
    time_read,
)
from engine_builder.commands.main import app
from engine_builder.local_server.client import CallFailed
from engine_builder.local_server.server import Layout
from engine_builder.releases.mirror import copy_release
from model.errors import PreheatError
from model.store.options import StoreOptions
from model.store.store import Store
from tests.conftest import REPOSITORY, Opener
from tests.support import object_store as ceph
from tests.support.faulty_proxy import FaultyProxy

H200 = REPOSITORY / "truss" / "configs" / "h200.yaml"
REQUEST = {"prompt": "a red circle", "seed": 1, "num_inference_steps": 1}


def test_phases_and_request_add_up_to_the_first_image() -> None:
    measured = {"import": 1.0, "stream": 9.0, "weights": 0.5, "warm_up": 0.25, "first_image": 4.0}
    start = complete_start(measured, {"time": 2.0, "timings": {"denoise": 1900.0}}, 1.8, 7)
    phases = {"import": 1.0, "weights": 0.5, "warm_up": 0.25, "first request": 2.0, "other": 0.25}
    assert start == Start(4.0, phases, 1.8, {"denoise": 1900.0}, 7)


def test_interleaves_places_and_drops_the_first_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here, there = NamedStore("here", "a"), NamedStore("there", "b")
    layout = Layout(tmp_path, tmp_path, tmp_path, {})
    started: list[NamedStore] = []

    def start(layout: Layout, place: NamedStore, *_: object) -> Start:
        started.append(place)
        return Start(float(len(started)), {}, 0.0, {}, 0)

    reported: list[tuple[str, int]] = []
    monkeypatch.setattr(cold_bench, "start_once", start)
    measured = cold_bench.bench_cold_starts(
        layout,
        [here, there],
        "toy/1",
        REQUEST,
        2,
        tmp_path,
        lambda place, number, _: reported.append((place.name, number)),
    )
    assert started == [here, there] * 3
    assert reported == [("here", 0), ("there", 0), ("here", 1), ("there", 1), ("here", 2), ("there", 2)]
    assert [[start.first_image for start in starts] for starts in measured] == [[3.0, 5.0], [4.0, 6.0]]


def test_starts_a_real_server(layout: Layout, store: Store, release: str, tmp_path: Path) -> None:
    start = start_once(layout, NamedStore("here", store.url), release, REQUEST, tmp_path)
    assert start.bytes == 0 and not list(tmp_path.iterdir()), "no cache was used, and none is left"
    assert {"import", "resolve", "weights", "engines", "warm_up", "first request", "other"} <= start.phases.keys()
    assert sum(start.phases.values()) == pytest.approx(start.first_image, abs=0.01)
    assert start.phases["import"] < start.ready < start.first_image
    assert 0 < start.stages["denoise"] < 1000 * start.phases["first request"]
    row = cold_start_row(NamedStore("here", store.url), release, [start, start], "fp32", 1).to_dict()
    assert row["unit"] == "s" and row["runs"] == 2 and row["phases"].keys() == start.phases.keys()
    assert row["best"] == row["p50"] == row["value"]
    assert row["ready"] == round(start.ready, 3) and row["stages"].keys() == start.stages.keys()


def cold_start(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "cold-start", *arguments])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict, dict]]:
    """Record the request and the deployment's settings of each start, without starting anything."""
    starts: list[tuple[dict, dict]] = []

    def start(layout: Layout, place: NamedStore, release: str, request: dict, work: Path) -> Start:
        config = yaml.safe_load((layout.app / "config.yaml").read_text())
        starts.append((request, config["model_metadata"]["preheat"]))
        return Start(4.0, {"import": 1.0}, 3.0, {"denoise": 900.0}, 0)

    monkeypatch.setattr(cold_bench, "start_once", start)
    return starts


def test_command_sets_size_and_buckets(
    store: Store, release: str, started: list[tuple[dict, dict]], tmp_path: Path
) -> None:
    out = tmp_path / "rows.json"
    options = [
        "--size",
        "512x768",
        "--bucket",
        "512x768@4",
        "--bucket",
        "1024x1024@2",
        "--steps",
        "7",
        "--out",
        str(out),
    ]
    result = cold_start(release, "--store", store.url, "--config", str(H200), "--runs", "2", *options)
    assert result.exit_code == 0, result.output
    assert started[0] == started[1] == started[2] and len(started) == 3
    request, settings = started[0]
    assert (request["width"], request["height"], request["num_inference_steps"]) == (512, 768, 7)
    assert settings["buckets"] == [
        {"height": 768, "width": 512, "rows": 4},
        {"height": 1024, "width": 1024, "rows": 2},
    ]
    [row] = json.loads(out.read_text())
    assert (row["value"], row["ready"], row["stages"], row["steps"]) == (4.0, 3.0, {"denoise": 900.0}, 7)
    assert [row] == json.loads(result.output.splitlines()[-1])


def test_command_defaults_to_config_and_release(store: Store, release: str, started: list[tuple[dict, dict]]) -> None:
    result = cold_start(release, "--store", store.url, "--config", str(H200), "--runs", "1")
    assert result.exit_code == 0, result.output
    request, settings = started[0]
    assert settings == yaml.safe_load(H200.read_text())["model_metadata"]["preheat"]
    assert request.keys() == {"prompt", "seed", "num_inference_steps"}


def test_serves_only_the_named_buckets(store: Store, release: str) -> None:
    unserved = cold_start(release, "--store", store.url, "--size", "128x128", "--bucket", "256x256@2", "--steps", "1")
    assert isinstance(unserved.exception, CallFailed) and unserved.exception.status == 400
    assert "256x256" in str(unserved.exception)


@pytest.mark.parametrize("arguments", [["--size", "1024"], ["--bucket", "1024@2"], ["--bucket", "1024x1024@two"]])
def test_refuses_an_invalid_size(arguments: list[str], store: Store, release: str) -> None:
    refused = cold_start(release, "--store", store.url, *arguments)
    assert refused.exit_code == 2 and arguments[0] in refused.output and arguments[1] in refused.output


def test_read_alone_reads_every_byte_once(
    store: Store, release: str, open_bucket: Opener, proxy: FaultyProxy, bucket: str, tmp_path: Path
) -> None:
    there = open_bucket("a/prefix", cache_dir=tmp_path / "unused")
    manifest, _ = copy_release(store, there, release)
    blobs = list(manifest.blobs().values())
    passed = 0

    def count(total: int) -> None:
        nonlocal passed
        passed = total

    proxy.on_bytes = count
    options = StoreOptions(
        endpoint=proxy.url, access_key_id=ceph.ACCESS_KEY, secret_access_key=ceph.SECRET_KEY, region="us-east-1"
    )
    assert time_read(f"s3://{bucket}/a/prefix", options, blobs) > 0
    for blob in blobs:
        offsets = sorted(
            int(range_.partition("=")[2].partition("-")[0]) for range_ in proxy.requested_ranges(blob.sha256)
        )
        assert offsets == list(range(0, blob.bytes, 16 * 2**20))
    assert passed >= sum(blob.bytes for blob in blobs)


def test_reports_a_missing_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PreheatError, match="Name a bucket instead"):
        run_test_object_store(tmp_path, tmp_path).__enter__()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PreheatError, match="not installed. Install them .apt-get install"):
        run_test_object_store(REPOSITORY, tmp_path).__enter__()


def run(*arguments: object) -> tuple[list[str], dict]:
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
