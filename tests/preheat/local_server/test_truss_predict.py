"""The real `truss predict` command, whose output the client saves."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from engine_builder.local_server.client import CallFailed, save_predicted
from engine_builder.local_server.server import Server
from tests.support import stub_truss
from tests.support.fake_baseten import FakeBaseten
from tests.support.noise_model import NOISE_MODEL


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(stub_truss.make_layout(tmp_path_factory.mktemp("noise"), NOISE_MODEL)) as server:
        server.wait_ready(120)
        yield server


def run_truss_predict(baseten: FakeBaseten, home: Path, request: dict[str, object]) -> subprocess.CompletedProcess[str]:
    """Run `truss predict` with a request."""
    truss = str(Path(sys.executable).with_name("truss"))
    return subprocess.run(
        [truss, "predict", "--model", baseten.model_id, "-d", json.dumps(request)],
        cwd=home,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **baseten.environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.full
def test_saves_what_truss_predict_prints(server: Server, tmp_path: Path) -> None:
    """Also a refusal, which `truss predict` ignores."""
    with FakeBaseten(server.url) as baseten:
        command = run_truss_predict(baseten, tmp_path, {"prompt": "a lighthouse"})
        refused = run_truss_predict(baseten, tmp_path, {})
    assert command.returncode == 0, command.stderr
    assert command.stdout.startswith("Calling predict on development deployment"), "what save_predicted skips is gone"
    assert baseten.requested_paths == ["/graphql/", "/development/predict"] * 2
    with pytest.raises(CallFailed, match="prompt: is missing"):
        save_predicted(io.BytesIO(refused.stdout.encode()), tmp_path / "out.png")
    assert refused.returncode == 0 and not list(tmp_path.glob("out*"))
    [path] = save_predicted(io.BytesIO(command.stdout.encode()), tmp_path / "out.png")
    assert path == tmp_path / "out.jpg"
    with Image.open(path) as image:
        assert (image.format, image.size) == ("JPEG", (64, 64))
