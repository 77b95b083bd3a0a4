"""Refuse large bodies before the server reads and parses them: ASGI middleware around Truss's application.

Truss reads a whole body into memory before it calls the model, has no limit for it, and gives the model no access to
its application. So `find_application` looks for the application among this process's objects.
"""

import gc
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from model.errors import BodyTooLarge, Overloaded, PreheatError

MAX_BODY_BYTES = 64 * 2**20
MAX_TOTAL_BODY_BYTES = 2**30  # of all requests that are read, waiting or running; Truss keeps a body until the answer
SMALL_BODY_BYTES = 2**20  # a request without images fits; it is accepted whatever the total is
_RETRY_SECONDS = 5


class _BodyRefused(Exception):
    """Ends the application's call while it reads a body."""

    def __init__(self, error: PreheatError) -> None:
        super().__init__(str(error))
        self.error = error


class BodyLimit:
    """ASGI middleware. `refuse` makes the response to a request, from its ASGI scope.

    A body is refused by its Content-Length before its first byte is read. A chunked body is refused once it has sent
    too much. A client that goes on sending gets the answer all the same; uvicorn discards the rest.
    """

    def __init__(
        self,
        application: ASGIApp,
        refuse: Callable[[Scope, PreheatError], Response],
        max_bytes: int = MAX_BODY_BYTES,
        max_total_bytes: int = MAX_TOTAL_BODY_BYTES,
    ) -> None:
        self._application = application
        self._refuse = refuse
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse its body. Other scopes (lifespan, websocket) are passed on."""
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        received = 0
        refused = False

        async def receive_within_limit() -> Message:
            nonlocal received, refused
            message = await receive()
            if message["type"] != "http.request":  # the client has left, which the application must learn
                return message
            size = len(message.get("body", b""))
            received += size
            self._held_bytes += size
            try:
                self._check(received)
            except _BodyRefused:
                refused = True
                raise
            return message

        async def send_unless_refused(message: Message) -> None:
            if not refused:  # otherwise it is the application's own answer to _BodyRefused
                await send(message)

        try:
            self._check(_content_length(Headers(scope=scope)))
            await self._application(scope, receive_within_limit, send_unless_refused)
        except _BodyRefused as refusal:
            await self._refuse(scope, refusal.error)(scope, receive, send)
        finally:
            self._held_bytes -= received

    def _check(self, size: int) -> None:
        """Raise _BodyRefused for a body of `size` bytes, received or stated."""
        if size > self._max_bytes:
            raise _BodyRefused(BodyTooLarge(f"The body has more than {self._max_bytes / 2**20:g} MiB."))
        if size > SMALL_BODY_BYTES and self._held_bytes > self._max_total_bytes:
            raise _BodyRefused(
                Overloaded(
                    f"The bodies of all requests in flight exceed {self._max_total_bytes / 2**20:g} MiB. Repeat "
                    f"the request in {_RETRY_SECONDS} s.",
                    _RETRY_SECONDS,
                )
            )


def find_application() -> Starlette | None:
    """Return the application that serves this process's model, or None outside of a server."""
    # By type(), because isinstance calls code of unknown objects.
    return next((found for found in gc.get_objects() if issubclass(type(found), Starlette)), None)


def limit_bodies(application: Starlette, refuse: Callable[[Scope, PreheatError], Response]) -> None:
    """Put a `BodyLimit` around a running application, for all requests from now on."""
    stack = application.middleware_stack or application.build_middleware_stack()
    application.middleware_stack = BodyLimit(stack, refuse)


def _content_length(headers: Headers) -> int:
    """Return the stated length of the body, 0 if there is none; the server has checked its form."""
    value = headers.get("Content-Length", "")
    return int(value) if value.isdecimal() else 0
