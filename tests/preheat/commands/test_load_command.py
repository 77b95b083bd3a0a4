"""`preheat load`: the requests that it sends, the rows that it writes, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from benchmarks.rows import read_rows
from model.errors import PreheatError
from model.store.store import Store
from preheat.main import app
from preheat.request_list import BadRequestFile
from tests.support.http_server import HttpServer, QuietHandler

REFUSAL = {"error": "width: 72 is not served here", "kind": "refused", "field": "width"}


class Handler(QuietHandler):
    """Answers requests without `width` 72 with an image."""

    received: list[dict[str, Any]] = []
    others = ["toy-sdxl/1"]

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if request.get("describe"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"release": "other/1", "models": ["other/1", *self.others]}).encode())
            return
        self.received.append(request)
        is_refused = request["width"] == 72
        self.send_response(400 if is_refused else 200)
        self.end_headers()
        self.wfile.write(json.dumps(REFUSAL if is_refused else {"images": [{"data": ""}]}).encode())


def run(store: Store, port: int, *options: str) -> Result:
    arguments = ["load", "toy-sdxl/1", "--store", store.url, "--url", f"http://127.0.0.1:{port}"]
    return CliRunner().invoke(app, [*arguments, *options])


def test_sends_the_requests_of_a_file_in_turns(toy_store: Store, tmp_path: Path) -> None:
    requests, rows = tmp_path / "mix.json", tmp_path / "rows.json"
    requests.write_text(json.dumps([{"num_inference_steps": 3}, {"width": 72}]))
    Handler.received.clear()
    with HttpServer(Handler) as server:
        options = ("--seconds", "1", "--open-seconds", "2", "--steps", "5", "--size", "64x64", "--clients", "1")
        command = (*options, "--shares", "1", "--requests", str(requests), "--out", str(rows))
        first, second = (run(toy_store, server.port, *command) for _ in range(2))
    assert first.exit_code == second.exit_code == 0, first.output
    received = {(each["seed"] % 2, each["width"], each["num_inference_steps"]) for each in Handler.received}
    assert received == {(0, 64, 3), (1, 72, 5)}, "the seed is the request's number"
    assert {each["model"] for each in Handler.received} == {"toy-sdxl/1"}, "the server has another release, too"
    closed, opened, *appended = read_rows(rows)
    assert closed.case == "closed loop, 1 client 64x64, mix" and opened.case.startswith("open loop"), "by their file"
    assert len(appended) == 2 and abs(closed.runs - closed.extra["failed"]) <= 1
    with HttpServer(Handler) as server:
        only_closed = run(toy_store, server.port, *options, "--shares", "")
    assert "closed loop" in only_closed.output and "open loop" not in only_closed.output
    assert REFUSAL["error"] in " ".join(first.output.split()), "the reason of failed requests is printed"


@pytest.mark.parametrize(
    "options, message",
    [
        (["--clients", "1,0"], "'1,0' is not a list of positive integers"),
        (["--clients", "1.5"], "'1.5' is not a list of positive integers"),
        (["--shares", "0.5,"], "'0.5,' is not a list of positive numbers"),
        (["--shares", "inf"], "'inf' is not a list of positive numbers"),
        (["--open-seconds", "inf"], "Invalid value for --open-seconds: inf is not a finite number"),
    ],
)
def test_refuses_numbers(options: list[str], message: str, toy_store: Store) -> None:
    result = run(toy_store, 9, *options)
    assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split())


def test_refuses_requests_without_images(toy_store: Store, tmp_path: Path) -> None:
    path = tmp_path / "requests.json"
    for content, message in (
        ("{}", "is not a list of 1 to 10,000 requests"),
        ("[1]", "request 1 is not a JSON object"),
    ):
        path.write_text(content)
        result = run(toy_store, 9, "--requests", str(path))
        assert isinstance(result.exception, BadRequestFile) and message in str(result.exception)


def test_reports_the_servers_refusal(toy_store: Store) -> None:
    with HttpServer(Handler) as server:
        result = run(toy_store, server.port, "--size", "72x72")
    assert isinstance(result.exception, PreheatError)
    message = str(result.exception)
    assert "generated no image" in message and "400" in message and REFUSAL["error"] in message


def test_refuses_a_server_of_another_release(toy_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "others", [])
    with HttpServer(Handler) as server:
        result = run(toy_store, server.port)
    assert isinstance(result.exception, PreheatError) and "serves other/1, and not toy-sdxl/1" in str(result.exception)


def test_reports_a_missing_server(toy_store: Store) -> None:
    result = run(toy_store, 9)  # the discard port, where no server listens
    assert isinstance(result.exception, PreheatError) and "connection" in str(result.exception).lower()
