"""Autoscaling settings: they fit the deployment, and the script sends them to the platform (a local server)."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from model.settings import Limits
from tests.support.http_server import HttpServer, QuietHandler
from tests.support.repository import REPOSITORY

FOLDER = REPOSITORY / "truss" / "autoscaling"
ENVIRONMENTS = ("development", "production")


class ManagementApi(HttpServer):
    """Answers PATCH with `status`, and records the requests: method, path, headers, body."""

    def __init__(self) -> None:
        api = self
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []
        self.status = 200

        class Handler(QuietHandler):
            def do_PATCH(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                api.requests.append((self.command, self.path, dict(self.headers), body))
                answer = {"status": "ACCEPTED", "message": "2 replicas"} if api.status == 200 else {"code": "NO"}
                self.send_response(api.status)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

        super().__init__(Handler)
        self.url = f"http://127.0.0.1:{self.port}"


@pytest.fixture
def api() -> Iterator[ManagementApi]:
    with ManagementApi() as running:
        yield running


def apply(*arguments: str, key: str | None = "secret-key", folder: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "NO_PROXY": "*"} | ({"BASETEN_API_KEY": key} if key else {})
    return subprocess.run(
        [sys.executable, str(folder / "apply.py"), *arguments], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_sends_the_settings_file_only_with_apply(environment: str, api: ManagementApi) -> None:
    shown = apply(environment, "--model", "abc", "--api", api.url)
    assert shown.returncode == 0 and "Nothing was sent" in shown.stdout and api.requests == [], shown.stderr
    assert f"/v1/models/abc/deployments/{environment}/autoscaling_settings" in shown.stdout
    ran = apply(environment, "--model", "abc", "--api", api.url, "--apply")
    assert ran.returncode == 0, ran.stderr
    assert "ACCEPTED: 2 replicas" in ran.stdout and "secret-key" not in ran.stdout
    [(method, path, headers, body)] = api.requests
    assert (method, path) == ("PATCH", f"/v1/models/abc/deployments/{environment}/autoscaling_settings")
    assert headers["Authorization"] == "Api-Key secret-key" and headers["Content-Type"] == "application/json"
    assert body == json.loads((FOLDER / f"{environment}.json").read_text())


def test_escapes_a_model_id_and_reports_a_refusal(api: ManagementApi) -> None:
    api.status = 403
    ran = apply("production", "--model", "a/../b", "--deployment", "q1", "--api", api.url, "--apply")
    assert api.requests[0][1] == "/v1/models/a%2F..%2Fb/deployments/q1/autoscaling_settings"
    assert ran.returncode == 1 and "refused: 403" in ran.stderr and "NO" in ran.stderr and "Traceback" not in ran.stderr


def test_reports_a_missing_platform_or_key() -> None:
    for key, message in (("key", "gave no answer"), (None, "BASETEN_API_KEY is not set")):
        ran = apply("production", "--model", "abc", "--api", "http://127.0.0.1:9", "--apply", key=key)
        assert ran.returncode == 1 and message in ran.stderr and "Traceback" not in ran.stderr


def test_refuses_invalid_settings(tmp_path: Path) -> None:
    (tmp_path / "apply.py").write_bytes((FOLDER / "apply.py").read_bytes())
    settings: Any
    for settings, message in (
        ({"min_replica": 3, "max_replica": 2}, "min_replica is above max_replica"),
        ({"replicas": 2}, "replicas is 2"),
        ({"max_replica": "2"}, "max_replica is '2'"),
        ({"target_utilization_percentage": 101}, "target_utilization_percentage is 101"),
        ([], "does not hold an object"),
    ):
        (tmp_path / "production.json").write_text(json.dumps(settings))
        ran = apply("production", "--model", "abc", "--apply", folder=tmp_path)
        assert ran.returncode == 1 and message in ran.stderr


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_concurrency_target_is_the_bucket_in_images(environment: str) -> None:
    """The batch of the largest bucket in guided images. The queue and the server's semaphore can hold as many."""
    settings = json.loads((FOLDER / f"{environment}.json").read_text())
    config = yaml.safe_load((REPOSITORY / "config.yaml").read_text())
    images = max(bucket["rows"] for bucket in config["model_metadata"]["preheat"]["buckets"]) // 2
    assert settings["concurrency_target"] == images
    assert images <= Limits().max_queue <= config["runtime"]["predict_concurrency"]
