"""End a server gracefully: accepted requests finish within a grace period, and all others are answered with status 503.

At SIGTERM uvicorn itself closes its port at once, which resets connections, and then waits without limit. So this
middleware takes uvicorn's signals on the first request. It passes them on when all requests are answered.
"""

import asyncio
import json
import logging
import math
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from types import FrameType
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from model.errors import Cancelled, PreheatError, Unavailable

RETRY_SECONDS = 5  # after which a request that found no server is repeated
_ANSWER_SECONDS = 5.0  # after the grace period, to send the answers
_KEY = "preheat.shutdown"  # of an ASGI scope
_READING = ("GET", "HEAD")  # health, metrics and pages are answered to the end
_STOPPING = "This server is stopping. Repeat the request."
logger = logging.getLogger("preheat")
T = TypeVar("T")


class GracefulShutdown:
    """ASGI middleware. SIGTERM or SIGINT begins the shutdown, and a SIGINT during it ends the grace period."""

    def __init__(self, grace_seconds: float, refuse: Callable[[Scope, PreheatError], Response]) -> None:
        """`grace_seconds` may be infinite. `refuse` makes the answer to a request that arrives during the shutdown."""
        self.grace_over = asyncio.Event()
        self._grace_seconds = None if math.isinf(grace_seconds) else grace_seconds
        self._refuse = refuse
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}  # uvicorn's, by signal
        self._task: asyncio.Task[None] | None = None

    @property
    def has_begun(self) -> bool:
        """True if this server takes no further requests."""
        return self._task is not None

    def wrap(self, application: ASGIApp) -> ASGIApp:
        """Return the application with this middleware around it."""

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] in _READING:
                await application(scope, receive, send)
            elif self.has_begun:
                await _discard_body(receive)
                await self._refuse(scope, Unavailable(_STOPPING))(scope, receive, send)
            else:
                self._take_signals()
                self._in_flight += 1
                try:
                    await application({**scope, _KEY: self}, receive, send)
                finally:
                    self._in_flight -= 1
                    if self.has_begun and not self._in_flight:
                        self._idle.set()

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
        """Begin the shutdown by a signal. A later SIGINT ends the grace period; other later signals do nothing."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._shut_down(number))
        elif number == signal.SIGINT:
            self.grace_over.set()

    async def _shut_down(self, number: int) -> None:
        logger.info(json.dumps({"event": "stopping", "requests": self._in_flight}))
        if self._in_flight:
            waits = [asyncio.create_task(event.wait()) for event in (self._idle, self.grace_over)]
            await asyncio.wait(waits, timeout=self._grace_seconds, return_when=asyncio.FIRST_COMPLETED)
        self.grace_over.set()
        if self._in_flight:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), _ANSWER_SECONDS)
        self._end(number)
        if self._in_flight:
            self._end(signal.SIGINT)  # for uvicorn a second signal, so that it does not wait

    def _end(self, number: int) -> None:
        if (handler := self._handlers.get(number)) is not None:
            handler(number, None)


async def wait_for_end(http: Request) -> PreheatError:
    """Return Cancelled when the client has left, or Unavailable when the server's grace period is over.

    The body of the request must have been read.
    """

    async def disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.create_task(disconnect())
    stopping = asyncio.create_task(_wait_for_shutdown(http))
    try:
        await asyncio.wait((leaving, stopping), return_when=asyncio.FIRST_COMPLETED)
        return Cancelled("The client left.") if leaving.done() else Unavailable(_STOPPING)
    finally:
        leaving.cancel()
        stopping.cancel()


async def until_shutdown(http: Request, events: AsyncIterator[T]) -> AsyncIterator[T]:
    """Yield the events of a request. Raises Unavailable when the server's grace period is over."""

    async def take() -> T:
        return await anext(events)

    stopping = asyncio.create_task(_wait_for_shutdown(http))
    try:
        while True:
            taking = asyncio.create_task(take())
            try:
                await asyncio.wait((taking, stopping), return_when=asyncio.FIRST_COMPLETED)
                if not taking.done():
                    raise Unavailable(_STOPPING)
                event = taking.result()
            except StopAsyncIteration:
                return
            finally:
                taking.cancel()
                await asyncio.gather(taking, return_exceptions=True)
            yield event
    finally:
        stopping.cancel()


async def _wait_for_shutdown(http: Request) -> None:
    shutdown: GracefulShutdown | None = http.scope.get(_KEY)
    await (asyncio.Event() if shutdown is None else shutdown.grace_over).wait()


async def _discard_body(receive: Receive) -> None:
    """Read a body: a connection that is closed before is reset, and the client may not see the answer."""
    while (await receive()).get("more_body"):
        pass
