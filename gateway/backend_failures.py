"""Errors of requests that a server refused, or that it may have started and did not finish."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import httpx

from gateway.backend import CONNECT_SECONDS, Backend
from gateway.backend_answers import Event, parse_refusal, retry_after
from gateway.bounded_reading import MAX_ERROR_BYTES, InvalidAnswer, read_body
from gateway.errors import ApiError

logger = logging.getLogger("preheat.gateway")


async def with_errors(
    backend: Backend, request_id: str, events: AsyncGenerator[Event, None]
) -> AsyncGenerator[Event, None]:
    """Yield the events of a stream, see `read_events`. Raises ApiError in place of all errors."""
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except (InvalidAnswer, EOFError, httpx.HTTPError, TimeoutError) as error:
        raise failure_of(backend, request_id, error) from error


async def refusal_of(backend: Backend, answer: httpx.Response) -> ApiError:
    """Return the error of a request that a server has refused."""
    if answer.status_code in (401, 403):  # the gateway's own key, not the caller's
        backend.mark_down()
        return ApiError(502, "A backend refused the gateway's own API key.", None, "backend_refused")
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            refusal = parse_refusal(answer.status_code, await read_body(answer, MAX_ERROR_BYTES))
            refusal.retry_after = retry_after(answer) if "Retry-After" in answer.headers else None
            return refusal
    except (InvalidAnswer, httpx.HTTPError, TimeoutError) as error:
        logger.warning("Backend %s answered %d: %s", backend.name, answer.status_code, str(error) or repr(error))
        return ApiError(502, f"A backend answered {answer.status_code}.", None, "backend_failed")


def failure_of(backend: Backend, request_id: str, error: Exception) -> ApiError:
    """Count and log a request that a server may have started. Return its error."""
    backend.mark_down()
    backend.failures += 1
    reason = str(error) or type(error).__name__
    logger.warning("Backend %s failed in request %s: %s", backend.name, request_id, reason)
    fact = (
        f"The backend's answer is not valid: {reason}."
        if isinstance(error, InvalidAnswer)
        else "The backend did not answer in time."
        if isinstance(error, TimeoutError | httpx.TimeoutException)
        else "The backend's connection ended before the images were finished."
    )
    again = "The images may have been started, so the request was not repeated. Send it again."
    return ApiError(502, f"{fact} {again}", None, "backend_failed")
