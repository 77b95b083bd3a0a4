"""Benchmarks of cold starts: phases of real processes add up. How long they take is not tested."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from benchmarks import cold_start as starts
from benchmarks.cold_start import MeasuredStart, StartCase
from engine_builder.releases.mirror import copy_release
from model.deployment import Deployment
from model.errors import PreheatError
from model.loading import select as selecting
from model.settings import read_settings
from model.store.manifest import Manifest
from model.store.options import StoreOptions
from model.store.store import Store
from preheat.local_server import server
from preheat.local_server.server import Layout
from preheat.main import app
from tests.conftest import Opener
from tests.support import object_store as ceph
from tests.support.faulty_proxy import FaultyProxy
from tests.support.repository import REPOSITORY

H200 = REPOSITORY / "truss" / "configs" / "h200.yaml"
REQUEST = {"prompt": "a red circle", "seed": 1, "num_inference_steps": 1}
Recorded = list[tuple[int, dict[str, Any], list[tuple[str, dict[str, Any]]]]]


def test_phases_and_request_add_up_to_the_first_image() -> None:
    measured = {"import": 1.0, "weights": 0.5, "warm_up": 0.25, "first_image": 4.0}
    phases = {"import": 1.0, "weights": 0.5, "warm_up": 0.25, "first request": 2.0, "other": 0.25}
    assert starts.split_phases(measured | {"stream": 9.0, "warm_up_unet_2": 0.125}, 2.0) == (4.0, phases)


def test_alternates_stores_and_drops_the_first_starts(tmp_path: Path) -> None:
    layout = Layout(tmp_path, tmp_path, tmp_path, {})
    local, bucket = (StartCase(name, layout, name, ("toy/1",)) for name in ("local", "bucket"))
    started: list[StartCase] = []
    reported: list[tuple[str, int]] = []

    def measure(case: StartCase, *_: object) -> MeasuredStart:
        started.append(case)
        return MeasuredStart(float(len(started)), {}, 0.0, {}, 0)

    def report(case: StartCase, number: int, start: MeasuredStart) -> None:
        reported.append((case.name, number))

    measured = starts.bench_cold_starts([local, bucket], REQUEST, 2, tmp_path, report, measure)
    assert started == [local, bucket] * 3
    assert reported == [(name, number) for number in range(3) for name in ("local", "bucket")]
    assert [[start.first_image_seconds for start in of_case] for of_case in measured] == [[3.0, 5.0], [4.0, 6.0]]


def test_starts_a_real_server(layout: Layout, store: Store, release: str, tmp_path: Path) -> None:
    start = starts.measure_start(StartCase("local", layout, store.url, (release,)), REQUEST, tmp_path)
    assert start.fetched_bytes == 0, "a local store needs no cache"
    assert not list(tmp_path.iterdir()), "the cache folder remains"
    phases = {"import", "resolve", "weights", "engines", "warm_up", "first request", "other"}
    assert phases <= start.phase_seconds.keys()
    assert sum(start.phase_seconds.values()) == pytest.approx(start.first_image_seconds, abs=0.01)
    assert start.phase_seconds["import"] < start.ready_seconds < start.first_image_seconds
    assert 0 < start.stage_milliseconds["denoise"] < 1000 * start.phase_seconds["first request"]
    row = starts.cold_start_row("local", release, [start, start], "fp32", 1).to_dict()
    assert row["unit"] == "s" and row["runs"] == 2 and row["phases"].keys() == start.phase_seconds.keys()
    assert row["best"] == row["p50"] == row["value"]
    assert row["ready"] == round(start.ready_seconds, 3) and row["stages"].keys() == start.stage_milliseconds.keys()


def cold_start(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "cold-start", *arguments])


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Record the runs, the request and the deployment's settings of each case, without starting a server."""
    recorded: Recorded = []

    def record(cases: Sequence[StartCase], request: dict[str, Any], runs: int, *_: object) -> list[list[MeasuredStart]]:
        configs = [yaml.safe_load((case.layout.app / "config.yaml").read_text()) for case in cases]
        settings = [config["model_metadata"]["preheat"] for config in configs]
        recorded.append((runs, request, list(zip([case.store for case in cases], settings, strict=True))))
        return [[MeasuredStart(4.0, {"import": 1.0}, 3.0, {"denoise": 900.0}, 0)] * runs for _ in cases]

    monkeypatch.setattr(starts, "bench_cold_starts", record)
    return recorded


def test_command_sets_size_and_buckets(store: Store, release: str, benchmarks: Recorded, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    result = cold_start(
        release, "--store", store.url, "--config", str(H200), "--runs", "2", "--steps", "7", "--size", "512x768",
        "--bucket", "512x768@4", "--bucket", "1024x1024@2", "--out", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    [(runs, request, [(_, settings)])] = benchmarks
    assert (runs, request["width"], request["height"], request["num_inference_steps"]) == (2, 512, 768, 7)
    assert settings["buckets"] == [
        {"height": 768, "width": 512, "rows": 4},
        {"height": 1024, "width": 1024, "rows": 2},
    ]
    [row] = json.loads(out.read_text())
    assert (row["value"], row["ready"], row["stages"], row["steps"]) == (4.0, 3.0, {"denoise": 900.0}, 7)
    assert [row] == json.loads(result.output.splitlines()[-1])


def test_command_compares_with_the_code_of_a_commit(
    store: Store, release: str, benchmarks: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config that the commit lacks is copied. Each config is compared with the same one of the commit."""
    other = tmp_path / "other.yaml"
    other.write_text(H200.read_text())
    roots: list[Path] = []
    context = server.build_context
    monkeypatch.setattr(server, "build_context", lambda root, *rest: roots.append(root) or context(root, *rest))
    configs = ("--config", str(H200), "--config", str(other))
    result = cold_start(release, "--store", store.url, "--runs", "2", *configs, "--against", "HEAD")
    assert result.exit_code == 0, result.output
    [(_, _, cases)] = benchmarks
    assert len(cases) == 4 and roots[:2] == [REPOSITORY] * 2 and REPOSITORY not in roots[2:]
    text = " ".join(result.output.split())
    assert text.count("1.000 (1.000 to 1.000) times the seconds to the first image of HEAD") == 2
    refused = cold_start(release, "--store", store.url, "--against", "no-such-commit")
    assert refused.exit_code == 2 and "'no-such-commit' is not a commit of" in " ".join(refused.output.split())


def test_command_starts_several_releases(store: Store, release: str, benchmarks: Recorded) -> None:
    result = cold_start(release, "--store", store.url, "--runs", "2", "--with", release, "--with", release)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output.splitlines()[-1])
    assert [row["case"] for row in rows] == [
        f"cold start, {release}, local store", f"cold start, {release}, local store, 3 releases",
    ]  # fmt: skip
    text = " ".join(result.output.split())
    assert "local store, 3 releases: 1.000 (1.000 to 1.000) times the seconds until ready" in text


def test_command_compares_configs_and_reading_alone(
    store: Store, release: str, benchmarks: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config's own buckets are served. Reading alone reads what the first config's server reads."""
    config = yaml.safe_load(H200.read_text())
    config["model_metadata"]["preheat"] |= {"safety": "flag", "bands_per_image": 2, "gpus_per_image": 2}
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump(config))
    selected: list[Deployment] = []

    def select(manifest: Manifest, targets: object, deployment: Deployment) -> SimpleNamespace:
        selected.append(deployment)
        return SimpleNamespace(blobs=lambda: [])

    monkeypatch.setattr(selecting, "select", select)
    monkeypatch.setattr(starts, "measure_read_seconds", lambda *_: 0.5)
    configs = ("--config", str(other), "--config", str(H200))
    result = cold_start(release, "--store", store.url, "--s3", "s3://bucket", "--runs", "1", *configs)
    assert result.exit_code == 0, result.output
    [(_, request, cases)] = benchmarks
    assert request.keys() == {"prompt", "seed", "num_inference_steps"}
    assert [url for url, _ in cases] == [store.url] * 2 + ["s3://bucket"] * 2
    assert cases[1][1] == yaml.safe_load(H200.read_text())["model_metadata"]["preheat"]
    assert selected == [Deployment.of(read_settings(config["model_metadata"]["preheat"] | {"release": release}))]
    assert (selected[0].safety, selected[0].bands) == ("flag", 2)
    rows = json.loads(result.output.splitlines()[-1])
    assert [row["case"].partition(",")[0] for row in rows] == ["cold start"] * 2 + ["reading alone"] + [
        "cold start"
    ] * 2
    assert rows[0]["case"] == f"cold start, {release}, local store, {other}"


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
    assert starts.measure_read_seconds(f"s3://{bucket}/a/prefix", options, blobs) > 0
    for blob in blobs:
        ranges = proxy.requested_ranges(blob.sha256)
        offsets = sorted(int(requested.partition("=")[2].partition("-")[0]) for requested in ranges)
        assert offsets == list(range(0, blob.bytes, 16 * 2**20))
    assert totals[-1] >= sum(blob.bytes for blob in blobs)


def test_reports_a_missing_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PreheatError, match="Name an S3 bucket instead"):
        starts.run_test_object_store(tmp_path, tmp_path).__enter__()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        PreheatError, match="The object store cannot run: .* not installed. Install them .apt-get install"
    ):
        starts.run_test_object_store(REPOSITORY, tmp_path).__enter__()
