"""Replica settings: that they fit the deployment, and what the script sends to the platform (a local stand-in)."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from model.settings import Limits

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "truss" / "autoscaling"
ENVIRONMENTS = ("development", "production")


class Platform:
    """Takes PATCH as the management API does, and keeps what came."""

    def __init__(self) -> None:
        platform = self
        self.asked: list[tuple[str, str, dict[str, str], Any]] = []
        self.status = 200

        class Handler(BaseHTTPRequestHandler):
            def do_PATCH(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                platform.asked.append((self.command, self.path, dict(self.headers), body))
                said = {"status": "ACCEPTED", "message": "2 replicas"} if platform.status == 200 else {"code": "NO"}
                self.send_response(platform.status)
                self.end_headers()
                self.wfile.write(json.dumps(said).encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Platform":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def platform() -> Iterator[Platform]:
    with Platform() as platform:
        yield platform


def apply(*arguments: str, key: str | None = "secret-key", folder: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "NO_PROXY": "*"} | ({"BASETEN_API_KEY": key} if key else {})
    return subprocess.run(
        [sys.executable, str(folder / "apply.py"), *arguments], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_nothing_is_sent_unasked(environment: str, platform: Platform) -> None:
    ran = apply(environment, "--model", "abc", "--api", platform.url)
    assert ran.returncode == 0, ran.stderr
    assert f"/v1/models/abc/deployments/{environment}/autoscaling_settings" in ran.stdout
    assert "Nothing was sent" in ran.stdout
    assert platform.asked == []


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_what_is_sent_is_the_file(environment: str, platform: Platform) -> None:
    ran = apply(environment, "--model", "abc", "--api", platform.url, "--apply")
    assert ran.returncode == 0, ran.stderr
    assert "ACCEPTED: 2 replicas" in ran.stdout and "secret-key" not in ran.stdout
    [(method, path, headers, body)] = platform.asked
    assert (method, path) == ("PATCH", f"/v1/models/abc/deployments/{environment}/autoscaling_settings")
    assert headers["Authorization"] == "Api-Key secret-key"
    assert headers["Content-Type"] == "application/json"
    assert body == json.loads((FOLDER / f"{environment}.json").read_text())


def test_a_deployment_can_be_named_and_cannot_leave_its_place_in_the_path(platform: Platform) -> None:
    apply("production", "--model", "a/../b", "--deployment", "q1", "--api", platform.url, "--apply")
    assert platform.asked[0][1] == "/v1/models/a%2F..%2Fb/deployments/q1/autoscaling_settings"


def test_a_refusal_is_said(platform: Platform) -> None:
    platform.status = 403
    ran = apply("production", "--model", "abc", "--api", platform.url, "--apply")
    assert ran.returncode == 1
    assert "refused: 403" in ran.stderr and "NO" in ran.stderr and "Traceback" not in ran.stderr


def test_nobody_there_is_said() -> None:
    ran = apply("production", "--model", "abc", "--api", "http://127.0.0.1:9", "--apply")
    assert ran.returncode == 1 and "gave no answer" in ran.stderr and "Traceback" not in ran.stderr


def test_without_a_key_nothing_is_sent(platform: Platform) -> None:
    ran = apply("production", "--model", "abc", "--api", platform.url, "--apply", key=None)
    assert ran.returncode == 1 and "BASETEN_API_KEY is not set" in ran.stderr
    assert platform.asked == []


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"min_replica": 3, "max_replica": 2}, "min_replica is above max_replica"),
        ({"replicas": 2}, "replicas is 2"),
        ({"max_replica": "2"}, "max_replica is '2'"),
        ({"target_utilization_percentage": 101}, "target_utilization_percentage is 101"),
        ([], "holds no object"),
    ],
)
def test_settings_that_the_platform_does_not_take_are_refused(wrong: Any, says: str, tmp_path: Path) -> None:
    (tmp_path / "apply.py").write_bytes((FOLDER / "apply.py").read_bytes())
    (tmp_path / "production.json").write_text(json.dumps(wrong))
    ran = apply("production", "--model", "abc", "--apply", folder=tmp_path)
    assert ran.returncode == 1 and says in ran.stderr


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_a_replica_is_asked_for_the_largest_batch_that_pays(environment: str) -> None:
    """As many requests as its bucket draws at once, which its queue and the server's semaphore then hold with ease."""
    settings = json.loads((FOLDER / f"{environment}.json").read_text())
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    images = max(bucket["rows"] for bucket in config["model_metadata"]["preheat"]["buckets"]) // 2
    assert settings["concurrency_target"] == images
    assert images <= Limits().max_queue <= config["runtime"]["predict_concurrency"]
