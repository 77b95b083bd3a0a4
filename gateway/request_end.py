"""Ends of a request before its answer: its client leaves, or the grace period of a shutdown is over."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.errors import api_error
from model.api.shutdown import wait_for_end, wait_for_shutdown
from model.errors import Unavailable

T = TypeVar("T")


async def unless_disconnected(http: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. Cancel it if the client leaves first (ClientDisconnect), or the grace period of a
    shutdown is over (ApiError)."""
    working, ending = asyncio.ensure_future(work), asyncio.create_task(wait_for_end(http))
    try:
        await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise api_error(error) if isinstance(error := ending.result(), Unavailable) else ClientDisconnect
        return working.result()
    finally:
        for task in (working, ending):
            task.cancel()
        await asyncio.gather(working, ending, return_exceptions=True)


async def until_shutdown(http: Request, events: AsyncIterator[T]) -> AsyncIterator[T]:
    """Yield the events of a server. Raises ApiError when the grace period of a shutdown is over."""

    loop = asyncio.get_running_loop()
    ending = asyncio.create_task(wait_for_shutdown(http))
    try:
        while True:
            # In this task: a task of its own would still run when a client leaves and the events are closed.
            async with asyncio.timeout(None) as limit:
                end = partial(_end_at_once, limit, loop)
                ending.add_done_callback(end)
                try:
                    event = await anext(events)
                except StopAsyncIteration:
                    return
                finally:
                    ending.remove_done_callback(end)
            yield event
    except TimeoutError:
        if not limit.expired():
            raise
        raise api_error(ending.result()) from None
    finally:
        ending.cancel()


def _end_at_once(limit: asyncio.Timeout, loop: asyncio.AbstractEventLoop, _: object) -> None:
    limit.reschedule(loop.time())


class ClosingStream(StreamingResponse):
    """A stream that ends its request also if the client leaves before its first byte is sent."""

    def __init__(self, content: AsyncIterator[bytes], stack: AsyncExitStack, **options: Any) -> None:
        super().__init__(content, **options)
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stack.aclose()
