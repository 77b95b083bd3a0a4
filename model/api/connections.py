"""HTTP connections that end if the client stops sending a request's headers, or stops reading an answer.

uvicorn has no such limits. Bodies have theirs in `model.api.body_limit`.
"""

import asyncio
from typing import ClassVar
from weakref import WeakKeyDictionary

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

HEADERS_SECONDS = 10.0  # from the connection or the first byte of a request to the end of its headers
UNREAD_SECONDS = 30.0  # in which a client must read UNREAD_PROGRESS_BYTES of an answer, or what is left of it
UNREAD_PROGRESS_BYTES = 2**18
MAX_UNREAD_BYTES = 256 * 2**20  # of all answers; beyond it the connection that reads for longest is closed ...
MAX_WAITING_CONNECTIONS = 1000  # whose headers have not arrived; beyond it the oldest one is closed ...
SPARED_SECONDS = 1.0  # ... unless it is younger than this
# Lines of a request that are accepted: each chunk of a chunked body has two, and takes time on the event loop.
_MAX_LINES, _MAX_LINES_SHARE = 4096, 1 / 64


class BoundedConnection(H11Protocol):
    """uvicorn's connection with these limits."""

    _waiting: ClassVar["WeakKeyDictionary[ServerState, dict[BoundedConnection, float]]"] = WeakKeyDictionary()
    """The connections of a server whose headers have not arrived, the oldest first, and since when they wait."""
    _headers_timer: asyncio.TimerHandle | None = None
    _unread: ClassVar["WeakKeyDictionary[ServerState, dict[BoundedConnection, float]]"] = WeakKeyDictionary()
    """The connections of a server whose client has not read an answer, the oldest first, and since when they wait."""
    _unread_timer: asyncio.TimerHandle | None = None
    _unread_bytes = 0
    _lines = _bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._start_headers_timer()
        waiting = self._waiting[self.server_state]
        if len(waiting) > MAX_WAITING_CONNECTIONS:
            oldest, since = next(iter(waiting.items()))
            if since <= self.loop.time() - SPARED_SECONDS:
                oldest._end_waiting()

    def data_received(self, data: bytes) -> None:
        """Read the next bytes."""
        if self.conn.their_state is not h11.SEND_BODY:
            self._lines = self._bytes = 0
        self._lines += data.count(b"\r\n")
        self._bytes += len(data)
        if self._lines > _MAX_LINES + self._bytes * _MAX_LINES_SHARE:
            self.send_400_response("The chunks of the body are too small.")
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_headers_timer()
        elif self._headers_timer is None:  # the first bytes of a further request
            self._start_headers_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the timers."""
        self._stop_headers_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        if self._unread_timer is not None:
            return
        self._start_unread_timer()
        unread = self._unread.setdefault(self.server_state, {})
        unread[self] = self.loop.time()
        left = sum(connection.transport.get_write_buffer_size() for connection in unread)
        for oldest, since in list(unread.items()):
            if left <= MAX_UNREAD_BYTES or since > self.loop.time() - SPARED_SECONDS:
                break
            left -= oldest.transport.get_write_buffer_size()
            oldest.transport.abort()

    def resume_writing(self) -> None:
        """Go on after the client has read."""
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
            del self._unread[self.server_state][self]

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP. Close the connection if an answer has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def _start_headers_timer(self) -> None:
        self._headers_timer = self.loop.call_later(HEADERS_SECONDS, self._end_waiting)
        self._waiting.setdefault(self.server_state, {})[self] = self.loop.time()

    def _stop_headers_timer(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None
            del self._waiting[self.server_state][self]

    def _end_waiting(self) -> None:
        self._stop_headers_timer()
        if not self.transport.is_closing():
            response = h11.Response(status_code=408, headers=[("connection", "close"), ("content-length", "0")])
            self.transport.write((self.conn.send(response) or b"") + (self.conn.send(h11.EndOfMessage()) or b""))
            self.transport.close()

    def _start_unread_timer(self) -> None:
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(UNREAD_SECONDS, self._check_reading)

    def _check_reading(self) -> None:
        read = self._unread_bytes - self.transport.get_write_buffer_size()
        if read < min(UNREAD_PROGRESS_BYTES, self._unread_bytes):
            self.transport.abort()
        else:
            self._start_unread_timer()


def bound_connections(config: Config) -> None:
    """Use `BoundedConnection` for all further connections of a running server."""
    config.http_protocol_class = BoundedConnection
