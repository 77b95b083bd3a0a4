"""An HTTP proxy between a client and an object store that injects the faults of networks and disks.

It forwards every request unchanged (with its Host header, which the signature covers) and every answer, except those
that an ordered fault matches by method and path. It records the requests. It does not know S3.
"""

import http.client
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlsplit

_CHUNK_BYTES = 64 * 2**10  # forwarded at a time

Kind = Literal["drop", "reset", "status", "corrupt", "truncate", "stall", "drop_answer"]


@dataclass
class Fault:
    """A fault of the next `times` requests that match.

    drop: the connection ends after `at` bytes of the body. reset: the same, with a TCP reset. status: the proxy answers
    `status` itself. corrupt: one bit of byte `at` is flipped. truncate: the body ends at `at`, and the headers agree.
    stall: after `at` bytes nothing more is sent until the proxy ends. drop_answer: the store serves the request, and
    its answer is lost.
    """

    kind: Kind
    times: int = 1
    at: int = 0
    status: int = 503
    code: str = "SlowDown"
    method: str = "GET"
    path: str = ""
    """A part of the request's path."""


@dataclass(frozen=True)
class Seen:
    """A request that arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: int
    """Bytes of its body."""


@dataclass
class FaultyProxy:
    """Listens on 127.0.0.1 in front of `upstream` (an http:// URL)."""

    upstream: str
    seen: list[Seen] = field(default_factory=list)
    on_bytes: Callable[[int], None] = lambda count: None
    """Called with the total number of body bytes forwarded so far."""

    def __post_init__(self) -> None:
        self._faults: list[Fault] = []
        self._lock = Lock()
        self._passed = 0
        self._ended = Event()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def order(self, fault: Fault) -> None:
        """Inject a fault from now on."""
        with self._lock:
            self._faults.append(fault)

    @property
    def pending(self) -> int:
        """Number of ordered faults that have not happened."""
        with self._lock:
            return sum(fault.times for fault in self._faults)

    def clear(self) -> None:
        """Delete the orders and the recorded requests."""
        with self._lock:
            self._faults.clear()
            self.seen.clear()
            self._passed = 0
            self.on_bytes = lambda count: None

    def bytes_asked(self, path: str) -> list[str]:
        """Return the Range headers of the GET requests whose path contains `path`."""
        return [seen.headers.get("Range", "") for seen in self.seen if seen.method == "GET" and path in seen.path]

    def take(self, method: str, path: str) -> Fault | None:
        """Return the fault for this request, or None."""
        with self._lock:
            for fault in self._faults:
                if fault.times > 0 and method == fault.method and fault.path in path:
                    fault.times -= 1
                    return fault
        return None

    def note(self, seen: Seen) -> None:
        with self._lock:
            self.seen.append(seen)

    def passed(self, count: int) -> None:
        with self._lock:
            self._passed += count
            total = self._passed
        self.on_bytes(total)

    def hold(self) -> None:
        """Wait until the proxy ends."""
        self._ended.wait()

    def __enter__(self) -> Self:
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    owner: FaultyProxy
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        with suppress(ConnectionError):  # clients may disconnect between two requests
            super().handle()

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.owner.note(Seen(self.command, self.path, dict(self.headers.items()), len(body)))
        fault = self.owner.take(self.command, self.path)
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
            self._answer(upstream.getresponse(), fault)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client has disconnected
        finally:
            upstream.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on

    def _refuse(self, fault: Fault) -> None:
        body = f"<Error><Code>{fault.code}</Code><Message>ordered</Message></Error>".encode()
        self.send_response_only(fault.status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _answer(self, answer: http.client.HTTPResponse, fault: Fault | None) -> None:
        length = int(answer.headers.get("Content-Length") or 0)
        kind = fault.kind if fault else ""
        at = fault.at if fault else 0
        if kind == "drop_answer":
            answer.read()
            return self._cut(reset=False)
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.headers.items():
            if name.lower() == "content-length" and kind == "truncate":
                value = str(min(at, length))
            if name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        if "Content-Length" not in answer.headers:
            # Chunked, as lists are. They are short, so they are forwarded whole.
            body = answer.read()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.end_headers()
        sent = 0
        for chunk in _chunks(answer, self.command):
            if kind in ("drop", "reset", "truncate", "stall") and sent + len(chunk) >= at:
                self._send(chunk[: at - sent])
                if kind == "stall":
                    self.owner.hold()
                if kind != "truncate":
                    self._cut(reset=kind == "reset")
                return
            if kind == "corrupt" and sent <= at < sent + len(chunk):
                changed = bytearray(chunk)
                changed[at - sent] ^= 1
                chunk = bytes(changed)
            self._send(chunk)
            sent += len(chunk)

    def _send(self, chunk: bytes) -> None:
        self.wfile.write(chunk)
        self.owner.passed(len(chunk))

    def _cut(self, reset: bool) -> None:
        self.close_connection = True
        with suppress(OSError):
            if reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            else:
                self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _chunks(answer: http.client.HTTPResponse, method: str) -> Iterator[bytes]:
    if method == "HEAD":
        return
    while chunk := answer.read(_CHUNK_BYTES):
        yield chunk
