"""A local server that answers the requests of `truss predict` as Baseten does.

It answers the GraphQL query for a model, and forwards predictions to a running model server. The installed package
truss has the code that sends these requests and reads the responses: truss.remote.baseten.api and
truss.remote.baseten.service.
"""

import json
import re

import httpx

from tests.support.http_server import HttpServer, QuietHandler

FORWARD_TIMEOUT_SECONDS = 120


class FakeBaseten(HttpServer):
    """Serves one model, `model_id`. Its development deployment is the model server at `server_url`."""

    def __init__(self, server_url: str, model_id: str = "m", api_key: str = "key") -> None:
        self.model_id = model_id
        self.api_key = api_key
        self.requested_paths: list[str] = []
        """The path of each request, in order."""
        fake = self

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                fake.requested_paths.append(self.path)
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers["Authorization"] != f"Bearer {fake.api_key}":
                    return self.respond(401, b'{"error": "unauthorized"}')
                if self.path == "/graphql/":
                    return self.respond(200, json.dumps(fake.answer_query(json.loads(body)["query"])).encode())
                if self.path == "/development/predict":
                    response = httpx.post(
                        f"{server_url}/v1/models/model:predict",
                        content=body,
                        trust_env=False,
                        timeout=FORWARD_TIMEOUT_SECONDS,
                    )
                    return self.respond(response.status_code, response.content)
                return self.respond(404, b'{"error": "no such path"}')

            def respond(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        super().__init__(Handler)
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which the truss command contacts only this server."""
        return {
            "BASETEN_TRUSS_AUTH_REMOTE_URL": self.url,
            "BASETEN_TRUSS_AUTH_API_KEY": self.api_key,
            "TRUSS_NO_UPDATE_CHECK": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def answer_query(self, query: str) -> dict[str, object]:
        """Return the response to a GraphQL query for a model."""
        match = re.search(r'model\(id: "([^"]*)"\)', query)
        if match is None or match[1] != self.model_id:
            return {"errors": [{"message": "No such model.", "extensions": {"code": "RESOURCE_NOT_FOUND"}}]}
        version = {"id": "v1", "semver": "0.1.0", "truss_hash": "", "truss_signature": "", "is_draft": True}
        model = {"id": self.model_id, "name": "stub", "hostname": self.url, "primary_version": version}
        return {"data": {"model": model}}
