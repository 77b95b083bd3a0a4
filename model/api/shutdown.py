"""End a server gracefully: accepted requests finish within a grace period, and all others are answered with status 503.

At SIGTERM uvicorn itself closes its port at once, which resets connections, and then waits up to an hour in Truss. So
this middleware takes uvicorn's signals on the first request. It passes them on when all requests are answered.
"""

import asyncio
import json
import logging
import math
import signal
import threading
from collections.abc import Callable
from types import FrameType

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from model.api.body_limit import BODY
from model.errors import Cancelled, PreheatError, Unavailable

_BODY_SECONDS = 5.0  # from the beginning of the shutdown to the end of a body
_ANSWER_SECONDS = 5.0  # after the grace period, to send the answers
_KEY = "preheat.shutdown"  # of an ASGI scope
_READING = ("GET", "HEAD")  # health, metrics and pages are answered to the end
_STOPPING = "This server is stopping. Repeat the request."
logger = logging.getLogger("preheat")


class GracefulShutdown:
    """ASGI middleware inside `BodyLimit`. SIGTERM or SIGINT begins the shutdown. A SIGINT during it ends the grace
    period, and the next one the server."""

    def __init__(self, grace_seconds: float, refuse: Callable[[Scope, PreheatError], Response]) -> None:
        """`grace_seconds` may be infinite. `refuse` makes the answer to a request that arrives during the shutdown."""
        self.grace_over = asyncio.Event()
        self._grace_seconds = grace_seconds
        self._refuse = refuse
        self._in_flight: dict[int, Scope] = {}  # by id()
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}  # uvicorn's, by signal
        self._signal: int | None = None

    @property
    def has_begun(self) -> bool:
        """True if this server takes no further requests."""
        return self._signal is not None

    def wrap(self, application: ASGIApp) -> ASGIApp:
        """Return the application with this middleware around it."""

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] in _READING:
                await application(scope, receive, send)
            elif self.has_begun:
                await self._refuse(scope, Unavailable(_STOPPING))(scope, receive, send)
            else:
                self._take_signals()
                scope[_KEY] = self
                self._in_flight[id(scope)] = scope
                try:
                    await application(scope, receive, send)
                finally:
                    del self._in_flight[id(scope)]
                    self._end_if_idle()

        return call

    def _take_signals(self) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        if self._handlers or not callable(handler) or threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = signal.signal(number, lambda number, _: loop.call_soon_threadsafe(self.begin, number))
            if callable(handler):
                self._handlers[number] = handler

    def begin(self, number: int) -> None:
        """Begin the shutdown by a signal. A later SIGINT ends the grace period, one after it the server.

        Other later signals do nothing.
        """
        if not self.has_begun:
            self._signal = number
            logger.info(json.dumps({"event": "stopping", "requests": len(self._in_flight)}))
            loop = asyncio.get_running_loop()
            loop.call_later(_BODY_SECONDS, self._refuse_bodies)
            if not math.isinf(self._grace_seconds):
                loop.call_later(self._grace_seconds, self._end_grace_period)
            self._end_if_idle()
        elif number == signal.SIGINT and self.grace_over.is_set():
            self._end_now()
        elif number == signal.SIGINT:
            self._end_grace_period()

    def _end_grace_period(self) -> None:
        if not self.grace_over.is_set():
            self.grace_over.set()
            self._refuse_bodies()
            asyncio.get_running_loop().call_later(_ANSWER_SECONDS, self._end_now)

    def _refuse_bodies(self) -> None:
        """Answer the requests in flight whose bodies have not arrived."""
        for scope in self._in_flight.values():
            scope[BODY].give_up(Unavailable(_STOPPING))

    def _end_if_idle(self) -> None:
        if self._signal is not None and not self._in_flight:
            self._pass_on(self._signal)

    def _end_now(self) -> None:
        """End uvicorn, which waits for its connections after one signal, but not after a second one."""
        assert self._signal is not None
        if self._in_flight:  # else the first signal was passed on
            self._pass_on(self._signal)
        self._pass_on(signal.SIGINT)

    def _pass_on(self, number: int) -> None:
        if (handler := self._handlers.get(number)) is not None:
            handler(number, None)


async def wait_for_end(http: Request) -> PreheatError:
    """Return Cancelled when the client has left, or Unavailable when the server's grace period is over.

    The body of the request must have been read.
    """

    async def disconnect() -> PreheatError:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        return Cancelled("The client left.")

    ends = [asyncio.create_task(disconnect()), asyncio.create_task(wait_for_shutdown(http))]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return next(end.result() for end in ends if end.done())
    finally:
        for end in ends:
            end.cancel()


async def wait_for_shutdown(http: Request) -> PreheatError:
    """Return Unavailable when the server's grace period is over, if ever."""
    shutdown: GracefulShutdown | None = http.scope.get(_KEY)
    await (asyncio.Event() if shutdown is None else shutdown.grace_over).wait()
    return Unavailable(_STOPPING)
