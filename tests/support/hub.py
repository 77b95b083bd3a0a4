"""A server with the part of the Hub's protocol that downloads one repository."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

_COMMIT = "c" * 40


@dataclass
class Hub:
    """A running server. `served`: paths of the downloaded files; `cut`: paths whose downloads are interrupted."""

    url: str
    served: list[str] = field(default_factory=list)
    cut: set[str] = field(default_factory=set)


@contextmanager
def hub(repository: str, folder: Path) -> Iterator[Hub]:
    """Serve the files of `folder` as `repository` (owner/name) on 127.0.0.1."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if path == f"/api/models/{repository}/revision/main":
                self._json({"id": repository, "sha": _COMMIT, "siblings": []})
            elif path == f"/api/models/{repository}/tree/{_COMMIT}":
                files = sorted(file for file in folder.rglob("*") if file.is_file())
                self._json([self._entry(file) for file in files])
            elif (file := self._file(path)) is not None:
                name = str(file.relative_to(folder))
                data = file.read_bytes()
                etag = hashlib.sha1(data).hexdigest()
                headers = {"ETag": f'"{etag}"', "X-Repo-Commit": _COMMIT}
                if self.command == "GET" and name in running.cut:
                    self._answer(200, data, headers, sent=len(data) // 2)
                    self.close_connection = True
                    return
                if self.command == "GET":
                    running.served.append(name)
                self._answer(200, data, headers)
            else:
                self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

        def _file(self, path: str) -> Path | None:
            prefix = f"/{repository}/resolve/{_COMMIT}/"
            file = folder / path.removeprefix(prefix)
            return file if path.startswith(prefix) and file.is_file() else None

        def _entry(self, file: Path) -> dict[str, object]:
            data = file.read_bytes()
            digest = hashlib.sha1(data).hexdigest()
            return {"type": "file", "path": str(file.relative_to(folder)), "size": len(data), "oid": digest}

        def _json(self, value: object) -> None:
            self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _answer(self, status: int, data: bytes, headers: dict[str, str], sent: int | None = None) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data[:sent])

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield running
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
