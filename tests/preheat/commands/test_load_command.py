"""`preheat load` fails at once, with the reason, if the server returns no images."""

import json

from typer.testing import CliRunner

from model.errors import PreheatError
from model.store.store import Store
from preheat.main import app
from tests.support.http_server import HttpServer, QuietHandler

REFUSAL = {"error": "width: 72 is not served here", "kind": "refused", "field": "width"}


class RefusingHandler(QuietHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(400)
        self.end_headers()
        self.wfile.write(json.dumps(REFUSAL).encode())


def error_of(store: Store, url: str) -> str:
    result = CliRunner().invoke(app, ["load", "toy-sdxl/1", "--store", store.url, "--url", url])
    assert isinstance(result.exception, PreheatError)
    return str(result.exception)


def test_reports_the_servers_refusal(toy_store: Store) -> None:
    with HttpServer(RefusingHandler) as server:
        message = error_of(toy_store, f"http://127.0.0.1:{server.port}")
    assert "generated no image" in message and "400" in message and REFUSAL["error"] in message


def test_reports_a_missing_server(toy_store: Store) -> None:
    message = error_of(toy_store, "http://127.0.0.1:9")  # the discard port, where no server listens
    assert "connection" in message.lower()
