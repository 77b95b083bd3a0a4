"""Serve a store's folder like a bucket, over a network of known rate and latency, to measure starts from a bucket.

The server answers GET of whole objects and of one range, as S3 does for `/bucket/key`, and ignores signatures and all
else. It has no TLS. Bytes go from the page cache to the socket (sendfile), so that it serves many gigabytes a second.
All connections share the rate. The latency passes before each answer, also of requests on an open connection.

    python -m engine_builder.benchmarks.range_server FOLDER --rate 3e9 --latency 0.02

Prints its URL. It ends with the end of its standard input.
"""

import argparse
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from model.errors import PreheatError

BUCKET = "bench"
_PIECE_BYTES = 2**20  # sent at a time; small, so that connections share the rate evenly
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class Rate:
    """Bytes per second that all connections share. `rate` 0: unlimited."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0  # by time.monotonic(), when all bytes taken so far have passed

    def take(self, count: int) -> None:
        """Wait until `count` bytes may be sent."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self._rate
            pause = self._free_at - now
        time.sleep(pause)


class RangeServer(ThreadingHTTPServer):
    """Serves `folder` as the bucket `BUCKET` on a free port of 127.0.0.1. `rate` in bytes/s, `latency` in seconds."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, folder: Path, rate: float, latency: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.rate, self.latency = folder, Rate(rate), latency

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RangeServer

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_GET(self) -> None:
        time.sleep(self.server.latency)
        key = unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")
        try:
            file = (self.server.folder / key).open("rb")
        except OSError:
            self._refuse(404, "NoSuchKey")
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            asked = _RANGE.fullmatch(self.headers.get("Range", ""))
            first, last = (int(asked[1]), min(int(asked[2]), size - 1)) if asked else (0, size - 1)
            if asked and first > last:
                self._refuse(416, "InvalidRange")
                return
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.send_header("Content-Length", str(last + 1 - first))
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("ETag", f'"{size:x}-1"')  # not an MD5, as of an object in parts
            self.send_header("Last-Modified", self.date_time_string(0))
            self.end_headers()
            self.wfile.flush()
            self._send(file.fileno(), first, last + 1)

    def _send(self, file: int, at: int, end: int) -> None:
        while at < end:
            count = min(_PIECE_BYTES, end - at)
            self.server.rate.take(count)
            while count and (sent := os.sendfile(self.connection.fileno(), file, at, count)):
                at, count = at + sent, count - sent

    def _refuse(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/xml")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def run_range_server(folder: Path, rate: float, latency: float) -> Iterator[str]:
    """Run the server in a process of its own, so that it shares no interpreter lock. Yields its URL."""
    command = [sys.executable, "-m", __name__, str(folder), "--rate", str(rate), "--latency", str(latency)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise PreheatError("The range server did not start.", "Its standard error has the reason.")
            yield url
        finally:
            process.stdin.close()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rate", type=float, default=0.0, help="bytes per second of all connections; 0: unlimited")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
    options = parser.parse_args()
    server = RangeServer(options.folder, options.rate, options.latency)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.url, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
