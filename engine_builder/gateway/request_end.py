"""Ends of a request before its answer: its client leaves, or the grace period of a shutdown is over."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from engine_builder.gateway.errors import ApiError
from model.api.shutdown import RETRY_SECONDS, wait_for_end, wait_for_shutdown
from model.errors import PreheatError, Unavailable

T = TypeVar("T")


async def unless_disconnected(http: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. Cancel it if the client leaves first (ClientDisconnect), or the grace period of a
    shutdown is over (ApiError)."""
    working, ending = asyncio.ensure_future(work), asyncio.create_task(wait_for_end(http))
    try:
        await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise stopping(error) if isinstance(error := ending.result(), Unavailable) else ClientDisconnect
        return working.result()
    finally:
        for task in (working, ending):
            task.cancel()
        await asyncio.gather(working, ending, return_exceptions=True)


async def until_shutdown(http: Request, events: AsyncIterator[T]) -> AsyncIterator[T]:
    """Yield the events of a server. Raises ApiError when the grace period of a shutdown is over."""

    async def take() -> T:
        return await anext(events)

    ending = asyncio.create_task(wait_for_shutdown(http))
    try:
        while True:
            taking = asyncio.create_task(take())
            try:
                await asyncio.wait((taking, ending), return_when=asyncio.FIRST_COMPLETED)
                if not taking.done():
                    raise stopping(ending.result())
                event = taking.result()
            except StopAsyncIteration:
                return
            finally:
                taking.cancel()
                await asyncio.gather(taking, return_exceptions=True)
            yield event
    finally:
        ending.cancel()


def stopping(error: PreheatError) -> ApiError:
    """Return the error of a request that the stopping gateway does not finish."""
    return ApiError(503, str(error), None, "unavailable", RETRY_SECONDS)
