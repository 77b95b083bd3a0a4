"""Benchmarks of cold starts: real processes, whose phases add up. How long they take is not what is tested."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from engine_builder.benchmarks import cold_start as cold_bench
from engine_builder.benchmarks.cold_start import (
    Place,
    Start,
    _start,
    own_object_store,
    read_alone,
    start_once,
    starts_row,
)
from engine_builder.commands.main import app
from engine_builder.local_server.client import CallFailed
from engine_builder.local_server.server import Layout
from engine_builder.releases.mirror import copy_release
from model.engines.components import BASE_COMPONENTS
from model.errors import PreheatError
from model.store.store import (
    Store,
    StoreOptions,
)
from tests.conftest import REPOSITORY, Opener
from tests.stand_ins import object_store as ceph
from tests.stand_ins import releases
from tests.stand_ins.faulty_proxy import FaultyProxy

H200 = REPOSITORY / "truss" / "configs" / "h200.yaml"
REQUEST = {"prompt": "a red circle", "seed": 1, "num_inference_steps": 1}


def test_phases_and_the_request_add_up_to_the_first_image() -> None:
    measured = {"import": 1.0, "stream": 9.0, "weights": 0.5, "warm_up": 0.25, "first_image": 4.0}
    start = _start(measured, {"time": 2.0, "timings": {"denoise": 1900.0}}, 1.8, 7)
    phases = {"import": 1.0, "weights": 0.5, "warm_up": 0.25, "first request": 2.0, "other": 0.25}
    assert start == Start(4.0, phases, 1.8, {"denoise": 1900.0}, 7)


def test_places_take_turns_and_the_first_start_of_each_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here, there = Place("here", "a", {}, False), Place("there", "b", {}, True)
    layout = Layout(tmp_path, tmp_path, tmp_path, {})
    started: list[Place] = []

    def start(layout: Layout, place: Place, *_: object) -> Start:
        started.append(place)
        return Start(float(len(started)), {}, 0.0, {}, 0)

    told: list[tuple[str, int]] = []
    monkeypatch.setattr(cold_bench, "start_once", start)
    measured = cold_bench.bench_places(
        layout, [here, there], "toy/1", REQUEST, 2, tmp_path, lambda place, number, _: told.append((place.name, number))
    )
    assert started == [here, there] * 3
    assert told == [("here", 0), ("there", 0), ("here", 1), ("there", 1), ("here", 2), ("there", 2)]
    assert [[start.first_image for start in starts] for starts in measured] == [[3.0, 5.0], [4.0, 6.0]]


def test_a_real_server_is_started_and_asked(layout: Layout, store: Store, release: str, tmp_path: Path) -> None:
    start = start_once(layout, Place("here", store.url, {}, False), release, REQUEST, tmp_path)
    assert start.bytes == 0 and not list(tmp_path.iterdir()), "no cache was used, and none is left"
    assert {"import", "resolve", "weights", "engines", "warm_up", "first request", "other"} <= start.phases.keys()
    assert sum(start.phases.values()) == pytest.approx(start.first_image, abs=0.01)
    assert start.phases["import"] < start.ready < start.first_image
    assert 0 < start.stages["denoise"] < 1000 * start.phases["first request"]
    row = starts_row(Place("here", store.url, {}, False), release, [start, start], "fp32", 1).to_dict()
    assert row["unit"] == "s" and row["runs"] == 2 and row["phases"].keys() == start.phases.keys()
    assert row["best"] == row["p50"] == row["value"]
    assert row["ready"] == round(start.ready, 3) and row["stages"].keys() == start.stages.keys()


def cold_start(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "cold-start", *arguments])


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict, dict]]:
    """The request and the deployment's settings of each start; nothing is started."""
    starts: list[tuple[dict, dict]] = []

    def start(layout: Layout, place: Place, release: str, request: dict, work: Path) -> Start:
        config = yaml.safe_load((layout.app / "config.yaml").read_text())
        starts.append((request, config["model_metadata"]["preheat"]))
        return Start(4.0, {"import": 1.0}, 3.0, {"denoise": 900.0}, 0)

    monkeypatch.setattr(cold_bench, "start_once", start)
    return starts


def test_the_command_asks_for_the_size_and_serves_the_buckets_it_is_told(
    store: Store, release: str, told: list[tuple[dict, dict]], tmp_path: Path
) -> None:
    out = tmp_path / "rows.json"
    asked = ["--size", "512x768", "--bucket", "512x768@4", "--bucket", "1024x1024@2", "--steps", "7", "--out", str(out)]
    result = cold_start(release, "--store", store.url, "--config", str(H200), "--runs", "2", *asked)
    assert result.exit_code == 0, result.output
    assert told[0] == told[1] == told[2] and len(told) == 3
    request, settings = told[0]
    assert (request["width"], request["height"], request["num_inference_steps"]) == (512, 768, 7)
    assert settings["buckets"] == [
        {"height": 768, "width": 512, "rows": 4},
        {"height": 1024, "width": 1024, "rows": 2},
    ]
    [row] = json.loads(out.read_text())
    assert (row["value"], row["ready"], row["stages"], row["steps"]) == (4.0, 3.0, {"denoise": 900.0}, 7)
    assert [row] == json.loads(result.output.splitlines()[-1])


def test_what_the_command_is_not_told_is_the_config_s_and_the_release_s(
    store: Store, release: str, told: list[tuple[dict, dict]]
) -> None:
    result = cold_start(release, "--store", store.url, "--config", str(H200), "--runs", "1")
    assert result.exit_code == 0, result.output
    request, settings = told[0]
    assert settings == yaml.safe_load(H200.read_text())["model_metadata"]["preheat"]
    assert request.keys() == {"prompt", "seed", "num_inference_steps"}


def test_a_real_server_serves_the_named_buckets_and_no_others(store: Store, release: str) -> None:
    unserved = cold_start(release, "--store", store.url, "--size", "128x128", "--bucket", "256x256@2", "--steps", "1")
    assert isinstance(unserved.exception, CallFailed) and unserved.exception.status == 400
    assert "256x256" in str(unserved.exception)


@pytest.mark.parametrize("wrong", [["--size", "1024"], ["--bucket", "1024@2"], ["--bucket", "1024x1024@two"]])
def test_a_size_that_is_none_is_refused(wrong: list[str], store: Store, release: str) -> None:
    refused = cold_start(release, "--store", store.url, *wrong)
    assert refused.exit_code == 2 and wrong[0] in refused.output and wrong[1] in refused.output


def test_reading_alone_reads_every_byte_once(
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
    assert read_alone(f"s3://{bucket}/a/prefix", options, blobs) > 0
    for blob in blobs:
        asked = sorted(int(range_.partition("=")[2].partition("-")[0]) for range_ in proxy.bytes_asked(blob.sha256))
        assert asked == list(range(0, blob.bytes, 16 * 2**20))
    assert passed >= sum(blob.bytes for blob in blobs)


def test_an_object_store_that_is_not_here_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PreheatError, match="name a bucket instead"):
        own_object_store(tmp_path, tmp_path).__enter__()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PreheatError, match="not installed: apt-get install"):
        own_object_store(REPOSITORY, tmp_path).__enter__()


def run(*arguments: object) -> tuple[list[str], dict]:
    """A module with a command line, in a process of its own: its lines, and the last one as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)], cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    return lines, json.loads(last)


def test_a_bare_start_draws_a_picture_and_says_its_phases(store: Store, release: str) -> None:
    lines, said = run("engine_builder.benchmarks.bare_start", store.url, release, "--steps", 1)
    assert said["phases"]["first_image"] > said["phases"]["import"] > 0
    assert said["engine"]["release"] == release and said["timings"]["denoise"] > 0
    assert any(line.endswith(" s  warm_up") for line in lines)


def test_streaming_is_measured_for_each_number_of_threads(tmp_path: Path) -> None:
    from model.store.local import LocalStore

    store = LocalStore(tmp_path / "store")
    store.write_release(releases.draft(store))
    lines, said = run(
        "engine_builder.benchmarks.streaming",
        "--store",
        store.url,
        "--release",
        "toy/1",
        "--threads",
        "1,3",
        "--runs",
        1,
    )
    assert [row["threads"] for row in said["rows"]] == [1, 3]
    assert said["bytes"] == sum(blob.bytes for record in store.read_release("toy/1").weights for blob in record.blobs)
    assert f"{2 * len(BASE_COMPONENTS)} blobs" in lines[0] and all("GB/s hashed" in line for line in lines[1:])
