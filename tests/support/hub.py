"""A local server with the part of the Hugging Face Hub's protocol that downloads one repository."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.support.http_server import HttpServer, QuietHandler

_COMMIT = "c" * 40


@dataclass
class Hub:
    """A running server."""

    url: str
    downloaded: list[str] = field(default_factory=list)
    """Paths of the downloaded files, in order."""
    interrupted: set[str] = field(default_factory=set)
    """Paths of the files whose downloads break off halfway."""


@contextmanager
def hub(repository: str, folder: Path) -> Iterator[Hub]:
    """Serve the files of `folder` as `repository` (owner/name) on 127.0.0.1."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if path == f"/api/models/{repository}/revision/main":
                self._send_json({"id": repository, "sha": _COMMIT, "siblings": []})
            elif path == f"/api/models/{repository}/tree/{_COMMIT}":
                files = sorted(file for file in folder.rglob("*") if file.is_file())
                self._send_json([self._entry(file) for file in files])
            elif (file := self._file(path)) is not None:
                name = str(file.relative_to(folder))
                data = file.read_bytes()
                etag = hashlib.sha1(data).hexdigest()
                headers = {"ETag": f'"{etag}"', "X-Repo-Commit": _COMMIT}
                if self.command == "GET" and name in running.interrupted:
                    self._send(200, data, headers, sent=len(data) // 2)
                    self.close_connection = True
                    return
                if self.command == "GET":
                    running.downloaded.append(name)
                self._send(200, data, headers)
            else:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

        def _file(self, path: str) -> Path | None:
            prefix = f"/{repository}/resolve/{_COMMIT}/"
            file = folder / path.removeprefix(prefix)
            return file if path.startswith(prefix) and file.is_file() else None

        def _entry(self, file: Path) -> dict[str, object]:
            data = file.read_bytes()
            digest = hashlib.sha1(data).hexdigest()
            return {"type": "file", "path": str(file.relative_to(folder)), "size": len(data), "oid": digest}

        def _send_json(self, value: object) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(self, status: int, data: bytes, headers: dict[str, str], sent: int | None = None) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data[:sent])

    server = HttpServer(Handler)
    running = Hub(f"http://127.0.0.1:{server.port}")
    with server:
        yield running
