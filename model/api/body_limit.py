"""Bound what bodies take before they are parsed: ASGI middleware of the gateway, and around Truss's application.

Truss reads a whole body into memory before it calls the model, has no limit for it, and gives the model no access to
its application. So `find_in_process` looks for the application among this process's objects.
"""

import asyncio
import gc
import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from model.api.body_scan import scan_of
from model.errors import BodyTooLarge, BodyTooSlow, Overloaded, PreheatError, RequestRefused

MAX_BODY_BYTES = 64 * 2**20
MAX_ARRIVING_BYTES = 160 * 2**20  # of all large bodies that have not arrived completely
MAX_TOTAL_BODY_BYTES = 2**29  # of all requests that are read, waiting or running; Truss keeps a body until the answer
SMALL_BODY_BYTES = 2**17  # a request without images fits; it is accepted whatever the totals are
CLIENT, SCAN, BODY = "preheat.client", "preheat.body_scan", "preheat.body"  # entries of an ASGI scope
_MAX_SMALL_BYTES = 64 * 2**20  # of all small bodies that arrive; beyond it ones that have stopped are given up
_CONNECTION_BYTES = 2**19  # counted besides a body while it arrives: buffers, and time on the event loop
_PROGRESS_BYTES = 2**16  # a body must make this progress within BodyLimits.progress_seconds
_SLOW_BYTES = 2**18  # a second: slower bodies are given up if another client needs their memory
_POLL_SECONDS = 0.1
_MAX_WAITING = 64  # bodies of a client that wait for memory
_DISCARD_SECONDS, _DISCARD_BYTES = 60.0, 256 * 2**20  # of a body that is discarded after its answer
_MAX_DISCARDING = 8  # bodies at once; others lose the rest of their connection
_RETRY_SECONDS = 5
T = TypeVar("T")


@dataclass(frozen=True)
class BodyLimits:
    """Bytes of one body, of all bodies that arrive, and of all bodies until their answer.

    `share`: what one client may hold, as a part of what the other clients leave. 1: there is one client.
    A body must make progress within `progress_seconds`. It waits `wait_seconds` for memory, and after `yield_seconds`
    of them gives up another body: one of its client that sent nothing for as long, or a slow one of another client.
    What is discarded after an early answer may pause for `pause_seconds`. `has_forms`: bodies of the type
    multipart/form-data are not JSON.
    """

    body: int = MAX_BODY_BYTES
    arriving: int = MAX_ARRIVING_BYTES
    total: int = MAX_TOTAL_BODY_BYTES
    share: float = 1.0
    has_forms: bool = False
    progress_seconds: float = 10.0
    wait_seconds: float = 10.0
    yield_seconds: float = 3.0
    pause_seconds: float = 2.0


class Budget:
    """Bytes that are held, by client."""

    def __init__(self, total: int, share: float) -> None:
        self._total, self._share = total, share
        self._held: Counter[str] = Counter()

    def held(self, client: str) -> int:
        """Return the bytes that a client holds."""
        return self._held[client]

    def room(self, client: str) -> int:
        """Return how many bytes more a client may hold. Each other client counts for its share at most."""
        share = self.share()
        others = sum(min(held, share) for other, held in self._held.items() if other != client)
        return max(0, int(self._share * (self._total - others)) - self._held[client])

    def share(self) -> int:
        """Return the bytes that a client may hold if the others hold nothing."""
        return int(self._share * self._total)

    def add(self, client: str, size: int) -> None:
        """Count bytes, negative ones when they are given back."""
        self._held[client] += size
        if not self._held[client]:
            del self._held[client]


class _BodyRefused(Exception):
    """Ends the application's call while it reads a body."""


class BodyLimit:
    """ASGI middleware. `refuse` makes the response to a request, from its ASGI scope.

    A body is refused by its Content-Length before its first byte is read, a chunked one once it has sent too much. Its
    client is counted when the application starts to read it: the scope's entry CLIENT, which the application sets. An
    answer that is sent before its body has arrived closes the connection, but only after the rest was discarded,
    because a client that still sends would lose the answer.
    """

    def __init__(
        self, application: ASGIApp, refuse: Callable[[Scope, PreheatError], Response], limits: BodyLimits = BodyLimits()
    ) -> None:
        self._application = application
        self._refuse = refuse
        self.limits = limits
        self.arriving = Budget(limits.arriving, limits.share)
        self.arriving_small = Budget(_MAX_SMALL_BYTES, limits.share)
        self.held = Budget(limits.total, limits.share)
        self.bodies: set[_Body] = set()
        """The bodies that arrive."""
        self.waiting: Counter[str] = Counter()
        """How many bodies of a client wait for memory."""
        self.discarding = 0
        """How many bodies are discarded after their answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse its body. Other scopes (lifespan, websocket) are passed on."""
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        body = scope[BODY] = _Body(self, scope, receive, send)
        try:
            with suppress(_BodyRefused):
                body.check_size(body.stated)
                await self._application(scope, body.receive, body.send)
            # The exception is gone here, and with it the frames that held the body.
            if body.error is not None:
                body.give_back()
                await self._refuse(scope, body.error)(scope, receive, body.send_last)
        finally:
            del scope[BODY]  # a reference cycle
            body.give_back()

    def give_up_for(self, waiting: "_Body", size: int) -> bool:
        """Give up a body, so that another one can hold `size` bytes more. Returns False if no body can be given up.

        First the body of the same client that has sent nothing for longest. Then, if the client holds less than its
        share, a slow body of another client: of the one that holds most.
        """
        now = asyncio.get_running_loop().time()
        bodies = [body for body in self.bodies if body.budget is waiting.budget and body is not waiting]
        stopped = [
            body for body in bodies if body.client == waiting.client and body.part_at <= now - self.limits.yield_seconds
        ]
        if stopped:
            min(stopped, key=lambda body: body.part_at).give_up(_not_arrived())
            return True
        held = waiting.budget.held
        if waiting.budget is self.arriving_small or held(waiting.client) + size > waiting.budget.share():
            return False
        slow = [body for body in bodies if body.client != waiting.client and body.rate(now) < _SLOW_BYTES]
        if slow:
            max(slow, key=lambda body: (held(body.client), -body.rate(now))).give_up(_not_arrived())
        return bool(slow)


def _not_arrived() -> Overloaded:
    return Overloaded(
        f"The body has not arrived, and other requests need its memory. Repeat it in {_RETRY_SECONDS} s.",
        _RETRY_SECONDS,
    )


class _Body:
    """The body of one request: its ASGI `receive` and `send`. The entry BODY of its scope."""

    def __init__(self, limit: BodyLimit, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        self.error: PreheatError | None = None
        self.client = ""
        self.stated = _content_length(headers)
        self.part_at = 0.0
        self.budget = limit.arriving_small
        self._limit, self._limits, self._scope = limit, limit.limits, scope
        self._receive, self._send = receive, send
        self._is_complete = not self.stated and "Transfer-Encoding" not in headers
        content_type = headers.get("Content-Type", "")
        is_form = self._limits.has_forms and content_type.startswith("multipart/form-data")
        self._scan = scope[SCAN] = None if is_form else scan_of(content_type)
        self._is_admitted = self._is_answered = False
        self._received = self._progress = self._measured = 0  # bytes
        self._progress_at = self._measured_at = 0.0
        self._rate = math.inf
        self._arriving = self._held = 0  # what is counted in the budgets
        self._timeout: asyncio.Timeout | None = None

    def check_size(self, size: int) -> None:
        """Refuse a body of `size` bytes, received or stated, if it is too large."""
        if size > self._limits.body:
            self._fail(BodyTooLarge(f"The body has more than {self._limits.body / 2**20:g} MiB."))

    async def receive(self) -> Message:
        """Return the next part of the body, and after it what the server reports."""
        if self._is_complete:
            return await self._receive()
        if not self._is_admitted:
            await self._admit()
        message = await self._next_part()
        if message["type"] == "http.request":  # else the client has left, which the application must learn
            part = message.get("body", b"")
            self._received += len(part)
            self._is_complete = not message.get("more_body", False)
            if self.error is not None:  # given up while the part arrived
                raise _BodyRefused
            self.check_size(self._received)
            if self._received > self.stated:  # a chunked body
                await self._grow(self._received)
            self.part_at = asyncio.get_running_loop().time()
            self.rate(self.part_at)
            if self._received - self._progress >= _PROGRESS_BYTES:
                self._progress, self._progress_at = self._received, self.part_at
            if self._scan is not None:
                try:
                    self._scan.feed(part)
                except RequestRefused as refusal:
                    self._fail(refusal)
            if self._is_complete:
                self._limit.bodies.discard(self)
                self._count(arriving=0, held=self._received)
        return message

    async def send(self, message: Message) -> None:
        """Send the application's answer, but not its answer to `_BodyRefused`."""
        if self.error is None:
            await self.send_last(message)

    async def send_last(self, message: Message) -> None:
        """Send an answer. If the body has not arrived completely, discard the rest before the answer ends."""
        self._is_answered = True
        self._limit.bodies.discard(self)
        if not self._is_complete:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            elif not message.get("more_body", False):
                await self._send({**message, "more_body": True})
                message = {"type": "http.response.body"}
                await self._discard()
        await self._send(message)

    def rate(self, now: float) -> float:
        """Return the bytes a second of the last `yield_seconds` or more. Infinite while it is not yet measured."""
        seconds = now - self._measured_at
        if seconds >= self._limits.yield_seconds:
            self._rate = (self._received - self._measured) / seconds
            self._measured, self._measured_at = self._received, now
        return self._rate

    def give_up(self, error: PreheatError) -> None:
        """Refuse the body with `error`, unless it has arrived completely or its answer has begun."""
        if self._is_complete or self._is_answered or self.error is not None:
            return
        self.give_back()
        self.error = error
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def give_back(self) -> None:
        """Count the body no longer."""
        self._limit.bodies.discard(self)
        self._count(arriving=0, held=0)

    async def _admit(self) -> None:
        """Wait until the stated size can be held. Raises _BodyRefused."""
        self.client = self._scope.get(CLIENT, "")
        await self._grow(self.stated)
        self._is_admitted = True
        self.part_at = self._progress_at = self._measured_at = asyncio.get_running_loop().time()
        self._limit.bodies.add(self)

    async def _grow(self, size: int) -> None:
        """Wait until `size` bytes can be held, and count them. Raises _BodyRefused."""
        if size > SMALL_BODY_BYTES:
            if self.budget is self._limit.arriving_small:
                self.budget.add(self.client, -self._arriving)
                self._arriving, self.budget = 0, self._limit.arriving
            await self._wait_for_memory(size)
            more = size - self._held
            if more > self._limit.held.room(self.client):
                self._fail_overloaded(more, self._limit.held)
        elif not self._is_admitted:
            more = size + _CONNECTION_BYTES
            while more > self.budget.room(self.client) and self._limit.give_up_for(self, more):
                pass
        self._count(arriving=size + _CONNECTION_BYTES, held=size)

    async def _wait_for_memory(self, size: int) -> None:
        loop = asyncio.get_running_loop()
        more = size + _CONNECTION_BYTES - self._arriving
        if more <= self.budget.room(self.client):
            return
        start, waiting = loop.time(), self._limit.waiting
        end = start + (self._limits.wait_seconds if waiting[self.client] < _MAX_WAITING else 0)
        waiting[self.client] += 1
        try:
            while more > self.budget.room(self.client):
                now = loop.time()
                if now - start >= self._limits.yield_seconds and self._limit.give_up_for(self, more):
                    continue
                if now >= end:
                    self._fail_overloaded(more, self.budget)
                await asyncio.sleep(min(_POLL_SECONDS, self._limits.yield_seconds))
                if self.error is not None:  # given up meanwhile
                    raise _BodyRefused
        finally:
            waiting[self.client] -= 1
        self._progress_at = loop.time()

    def _count(self, arriving: int, held: int) -> None:
        self.budget.add(self.client, arriving - self._arriving)
        self._limit.held.add(self.client, held - self._held)
        self._arriving, self._held = arriving, held

    async def _next_part(self) -> Message:
        if self.error is not None:
            raise _BodyRefused
        seconds = self._limits.progress_seconds
        try:
            async with asyncio.timeout_at(self._progress_at + seconds) as self._timeout:
                return await self._receive()
        except TimeoutError:
            self._fail(
                self.error
                or BodyTooSlow(
                    f"{self._received} bytes of the body have arrived, and fewer than {_PROGRESS_BYTES // 2**10} KiB "
                    f"of them in the last {seconds:g} s."
                )
            )
        finally:
            self._timeout = None

    async def _discard(self) -> None:
        if self._limit.discarding >= _MAX_DISCARDING:
            return
        loop = asyncio.get_running_loop()
        end, left = loop.time() + _DISCARD_SECONDS, _DISCARD_BYTES
        self._limit.discarding += 1
        try:
            while left > 0 and not self._is_complete:
                async with asyncio.timeout_at(min(end, loop.time() + self._limits.pause_seconds)):
                    message = await self._receive()
                left -= len(message.get("body", b""))
                self._is_complete = not message.get("more_body", False)  # also if the client has left
        except TimeoutError:
            pass
        finally:
            self._limit.discarding -= 1

    def _fail_overloaded(self, size: int, budget: Budget) -> NoReturn:
        self._fail(
            Overloaded(
                f"The bodies of the requests in flight leave {budget.room(self.client) / 2**20:.1f} MiB, and this one "
                f"needs {size / 2**20:.1f} MiB. Repeat the request in {_RETRY_SECONDS} s.",
                _RETRY_SECONDS,
            )
        )

    def _fail(self, error: PreheatError) -> NoReturn:
        self.error = error
        raise _BodyRefused


def find_in_process(kind: type[T]) -> T | None:
    """Return an object of this process of that type or a subclass, or None. Finds the application of a server."""
    # By type(), because isinstance calls code of unknown objects.
    return next((found for found in gc.get_objects() if issubclass(type(found), kind)), None)


def limit_bodies(
    application: Starlette, refuse: Callable[[Scope, PreheatError], Response], wrap: Callable[[ASGIApp], ASGIApp]
) -> None:
    """Put a `BodyLimit` around a running application and the middleware `wrap`, for all requests from now on."""
    stack = application.middleware_stack or application.build_middleware_stack()
    application.middleware_stack = BodyLimit(wrap(stack), refuse)


def _content_length(headers: Headers) -> int:
    """Return the stated length of the body, 0 if there is none; the server has checked its form."""
    value = headers.get("Content-Length", "")
    return int(value) if value.isdecimal() else 0
