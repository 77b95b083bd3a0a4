"""`preheat load` fails at once, with the reason, if the server returns no images."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from typer.testing import CliRunner

from engine_builder.commands.main import app
from model.errors import PreheatError
from model.store.store import Store

REFUSAL = {"error": "width: 72 is not served here", "kind": "refused", "field": "width"}


class Refusing(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(400)
        self.end_headers()
        self.wfile.write(json.dumps(REFUSAL).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def error_of(store: Store, url: str) -> str:
    result = CliRunner().invoke(app, ["load", "toy-sdxl/1", "--store", store.url, "--url", url])
    assert isinstance(result.exception, PreheatError)
    return str(result.exception)


def test_reports_the_servers_refusal(toy_store: Store, refusing: str) -> None:
    message = error_of(toy_store, refusing)
    assert "generated no image" in message and "400" in message and REFUSAL["error"] in message


def test_reports_a_missing_server(toy_store: Store) -> None:
    message = error_of(toy_store, "http://127.0.0.1:9")  # the discard port, where no server listens
    assert "connection" in message.lower()
