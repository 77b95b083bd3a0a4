"""An HTTP proxy between a client and an object store that injects the faults of networks and disks.

It forwards every request unchanged (with its Host header, which the signature covers) and every response, except those
that an injected fault matches. It records the requests. It does not know S3.
"""

import http.client
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Literal, Self
from urllib.parse import urlsplit

_CHUNK_BYTES = 64 * 2**10  # forwarded at a time
_LONG_AGO = "Wed, 01 Jan 2020 00:00:00 GMT"

Kind = Literal["drop", "reset", "status", "corrupt", "truncate", "stall", "drop_answer", "old"]


@dataclass
class Fault:
    """A fault of the next `times` requests that match.

    drop: the connection ends after `at` bytes of the body. reset: the same, with a TCP reset. status: the proxy answers
    `status` itself. corrupt: one bit of byte `at` is flipped. truncate: the body ends at `at`, and the headers agree.
    stall: after `at` bytes nothing more is sent until the proxy ends. drop_answer: the store serves the request, and
    its response is lost. old: Last-Modified is years ago.
    """

    kind: Kind
    times: int = 1
    at: int = 0
    status: int = 503
    code: str = "SlowDown"
    method: str = "GET"
    path: str = ""
    """A part of the request's path."""
    range: str = ""
    """The request's Range header; "" matches any."""


@dataclass(frozen=True)
class RecordedRequest:
    """A request that arrived."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass
class FaultyProxy:
    """Listens on 127.0.0.1 in front of `upstream` (an http:// URL)."""

    upstream: str
    requests: list[RecordedRequest] = field(default_factory=list)
    on_request: Callable[[RecordedRequest], None] = lambda request: None
    """Called before each request is forwarded, which waits for its return."""
    on_bytes: Callable[[int], None] = lambda count: None
    """Called with the total number of body bytes forwarded so far."""

    def __post_init__(self) -> None:
        self._faults: list[Fault] = []
        self._lock = Lock()
        self._forwarded = 0
        self.closed = Event()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def inject(self, fault: Fault) -> None:
        """Inject a fault from now on."""
        with self._lock:
            self._faults.append(fault)

    @property
    def pending(self) -> int:
        """Number of injected faults that have not happened."""
        with self._lock:
            return sum(fault.times for fault in self._faults)

    def clear(self) -> None:
        """Forget the faults, the recorded requests and `on_bytes`."""
        with self._lock:
            self._faults.clear()
            self.requests.clear()
            self._forwarded = 0
            self.on_bytes = lambda count: None

    def requested_ranges(self, path: str) -> list[str]:
        """Return the Range headers of the GET requests whose path contains `path`."""
        gets = (request for request in self.requests if request.method == "GET" and path in request.path)
        return [request.headers.get("Range", "") for request in gets]

    def next_fault(self, request: RecordedRequest) -> Fault | None:
        """Return the fault for this request, or None."""
        with self._lock:
            for fault in self._faults:
                matches = request.method == fault.method and fault.path in request.path
                if fault.times > 0 and matches and fault.range in ("", request.headers.get("Range")):
                    fault.times -= 1
                    return fault
        return None

    def record(self, request: RecordedRequest) -> None:
        with self._lock:
            self.requests.append(request)
        self.on_request(request)

    def count_bytes(self, count: int) -> None:
        with self._lock:
            self._forwarded += count
            total = self._forwarded
        self.on_bytes(total)

    def __enter__(self) -> Self:
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    owner: FaultyProxy
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        with suppress(ConnectionError):  # clients may disconnect between two requests
            super().handle()

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = RecordedRequest(self.command, self.path, dict(self.headers.items()))
        self.owner.record(request)
        fault = self.owner.next_fault(request)
        if fault is not None and fault.kind == "status":
            return self._refuse(fault)
        parts = urlsplit(self.owner.upstream)
        upstream = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                # The body is complete, so the gateway must not wait for a "continue".
                if name.lower() not in ("expect", "connection"):
                    upstream.putheader(name, value)
            upstream.endheaders(body or None)
            self._respond(upstream.getresponse(), fault)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client has disconnected
        finally:
            upstream.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _forward

    def _refuse(self, fault: Fault) -> None:
        body = f"<Error><Code>{fault.code}</Code><Message>injected</Message></Error>".encode()
        self.send_response_only(fault.status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _respond(self, response: http.client.HTTPResponse, fault: Fault | None) -> None:
        length = int(response.headers.get("Content-Length") or 0)
        kind = fault.kind if fault else ""
        at = fault.at if fault else 0
        if kind == "drop_answer":
            response.read()
            return self._disconnect(reset=False)
        self.send_response_only(response.status, response.reason)
        for name, value in response.headers.items():
            if name.lower() == "content-length" and kind == "truncate":
                value = str(min(at, length))
            if name.lower() == "last-modified" and kind == "old":
                value = _LONG_AGO
            if name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        if "Content-Length" not in response.headers:
            # Chunked, as lists are. They are short, so they are forwarded whole.
            body = response.read()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.end_headers()
        sent = 0
        for chunk in () if self.command == "HEAD" else iter(lambda: response.read(_CHUNK_BYTES), b""):
            if kind in ("drop", "reset", "truncate", "stall") and sent + len(chunk) >= at:
                self._send(chunk[: at - sent])
                if kind == "stall":
                    self.owner.closed.wait()
                if kind != "truncate":
                    self._disconnect(reset=kind == "reset")
                return
            if kind == "corrupt" and sent <= at < sent + len(chunk):
                changed = bytearray(chunk)
                changed[at - sent] ^= 1
                chunk = bytes(changed)
            self._send(chunk)
            sent += len(chunk)

    def _send(self, chunk: bytes) -> None:
        self.wfile.write(chunk)
        self.owner.count_bytes(len(chunk))

    def _disconnect(self, reset: bool) -> None:
        self.close_connection = True
        with suppress(OSError):
            if reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            else:
                self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        pass
