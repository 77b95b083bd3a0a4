"""Cold starts of several images and stores alternate, also over a network of a known rate."""

import json
import time
from pathlib import Path

import httpx
import pytest

from engine_builder.benchmarks import compare_starts
from engine_builder.benchmarks.cold_start import MeasuredStart
from engine_builder.benchmarks.range_server import BUCKET, Rate, run_range_server
from engine_builder.local_server.server import Layout
from model.store.options import StoreOptions
from model.store.s3 import S3Store
from model.store.store import Store


def test_compares_images_and_networks(
    layout: Layout, store: Store, release: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "starts.json"
    folder = store.url.removeprefix("file://")
    compare_starts.main(
        ["run", "--image", f"old={layout.root}", "--image", f"new={layout.root}", "--store", f"local={folder}",
         "--network", "1e9@0.001", "--release", release, "--runs", "1", "--steps", "1", "--repeats", "2",
         "--out", str(out)]
    )  # fmt: skip
    results = json.loads(out.read_text())
    assert [result["case"] for result in results] == [
        f"{i}, {s}" for s in ("local", "1e9@0.001") for i in ("old", "new")
    ]
    for result in results:
        assert sum(result["phases"].values()) == pytest.approx(result["first_image"], abs=0.05)
        assert {"stream", "warm_up_texts", "warm_up_preview"} <= result["parts"].keys()
        assert len(result["first_over_later"]) == 1 and len(result["requests"][0][0]) == 2
        assert bool(result["bytes_fetched"]) == bool(result["network_alone"]) == ("1e9" in result["case"])
    printed = capsys.readouterr().out
    assert "first/later" in printed and json.loads(printed.splitlines()[-1]) == results


def test_summarizes_medians() -> None:
    starts = [
        MeasuredStart(seconds, {"import": 1.0}, 1.0, {}, 10**9, {}, ((900.0, first, 1000.0),))
        for seconds, first in ((4.0, 1000.0), (2.0, 800.0), (9.0, 900.0))
    ]
    result = compare_starts.summarize("new", starts, rate=2e9)
    assert (result["first_image"], result["network_alone"], result["first_over_later"]) == (4.0, 0.5, [0.947])


def test_range_server_serves_a_store(store: Store, release: str, tmp_path: Path) -> None:
    folder = Path(store.url.removeprefix("file://"))
    blob = max(store.read_release(release).weights, key=lambda record: record.blobs[0].bytes).blobs[0]
    with run_range_server(folder, rate=0, latency=0) as url:
        options = StoreOptions(
            tmp_path, endpoint=url, region="us-east-1", access_key_id="any", secret_access_key="any", part_bytes=2**20
        )
        bucket = S3Store(f"s3://{BUCKET}", options)
        assert bucket.read_release(release) == store.read_release(release)
        assert bucket.get(blob.sha256, blob.bytes).stat().st_size == blob.bytes  # verified, from several ranges
        missing = httpx.get(f"{url}/{BUCKET}/blobs/none", trust_env=False)
        assert (missing.status_code, "NoSuchKey" in missing.text) == (404, True)


def test_connections_share_the_rate() -> None:
    rate = Rate(1e6)
    began = time.monotonic()
    for _ in range(4):
        rate.take(50_000)
    assert time.monotonic() - began >= 0.15, "four pieces at one megabyte a second"
