"""The real Truss server starts from a bucket: the endpoint is in its config, the credentials are Truss secrets."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from engine_builder.local_server.client import generate
from engine_builder.local_server.demo import cold_start_phases
from engine_builder.local_server.server import Layout, Server, ServerFailed, build_context, lay_out
from engine_builder.releases.mirror import copy_release
from model.store.store import Store
from tests.conftest import READY_SECONDS, Opener
from tests.support import object_store as ceph
from tests.support.faulty_proxy import FaultyProxy
from tests.support.repository import REPOSITORY

SECRETS = {
    "TRUSS_SECRET_aws_access_key_id": ceph.ACCESS_KEY,
    "TRUSS_SECRET_aws_secret_access_key": ceph.SECRET_KEY,
}
REQUEST = {"prompt": "a red circle", "num_inference_steps": 2, "seed": 1}


@pytest.fixture
def layout(proxy: FaultyProxy, bucket: str, release: str, tmp_path: Path) -> Layout:
    """An image whose config names the bucket and its endpoint, so it needs no environment."""
    config = yaml.safe_load((REPOSITORY / "truss" / "configs" / "cpu-demo.yaml").read_text())
    config["secrets"] = {"aws_access_key_id": None, "aws_secret_access_key": None}
    config["model_metadata"]["preheat"] |= {
        "store": f"s3://{bucket}/prefix",
        "release": release,
        "endpoint": proxy.url,
        "region": "us-east-1",
        "cache_dir": str(tmp_path / "cache"),
        "cache_bytes": "2GiB",
    }
    written = tmp_path / "config.yaml"
    written.write_text(yaml.safe_dump(config))
    return lay_out(build_context(REPOSITORY, written, tmp_path / "build"), tmp_path / "root")


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove this machine's settings, so that the server does not inherit them."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "PREHEAT_", "TRUSS_SECRET_")):
            monkeypatch.delenv(name)


def test_server_starts_from_bucket_after_killed_fetch(
    store: Store,
    release: str,
    layout: Layout,
    open_bucket: Opener,
    proxy: FaultyProxy,
    clean_environment: None,
    show_progress: Callable[[str], None],
    tmp_path: Path,
) -> None:
    manifest, _ = copy_release(store, open_bucket("prefix", cache_dir=tmp_path / "unused"), release)
    half = sum(blob.bytes for blob in manifest.blobs().values()) // 2

    show_progress("starting a server that is killed")
    with Server(layout, environment=SECRETS) as server:

        def kill(passed: int) -> None:
            if passed > half:
                proxy.on_bytes = lambda passed: None
                os.kill(server.pid, signal.SIGKILL)

        proxy.on_bytes = kill
        with pytest.raises(ServerFailed, match="killed by SIGKILL"):
            server.wait_ready(READY_SECONDS)

    show_progress("starting a server from the bucket")
    with Server(layout, environment=SECRETS, log=tmp_path / "server.log") as server:
        server.wait_ready(READY_SECONDS)
        answer = generate(server.url, REQUEST, READY_SECONDS)
        assert answer["status"] == "success" and answer["engine"]["release"] == release
        assert cold_start_phases(server.url)["fetch"] > 0
    cached = {path.name for path in (tmp_path / "cache" / "blobs" / "sha256").iterdir()}
    assert "prefetch" not in (tmp_path / "server.log").read_text(), "the prefetch process failed"
    assert cached and cached <= set(manifest.blobs()) and not list((tmp_path / "cache" / "partial").iterdir())
