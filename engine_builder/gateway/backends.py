"""The Preheat servers behind the gateway: which one gets a request, and whether it may be sent to another one.

Every request is sent as a stream. A server's first line, "accepted", divides it in two: before it nothing was started,
so a connection that cannot be made, 429 and 503 lead to the next server. After it, and whenever the work may have
begun, a failure is an error of the request. Connections are not reused, because a reused one may be closed before the
server has read the request, and then it is not known whether it was started.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from engine_builder.gateway.errors import ApiError, GatewayConfigError

KEY_VARIABLE = "PREHEAT_BACKEND_API_KEY"
PREDICT_PATH = "/v1/models/model:predict"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_CHECK_SECONDS = 2.0  # between two health checks of a local server
_DOWN_SECONDS = 5.0  # a server that failed is the last choice for this long
_DESCRIPTION_SECONDS = 60.0  # a description is read again after this time
_DESCRIPTION_WAIT_SECONDS = 5.0  # a request that others may answer waits so long for a server's description
_CONNECT_SECONDS = 5.0
_ACCEPT_SECONDS = 600.0  # a replica may have to start
_EVENT_SECONDS = 60.0  # servers send a heartbeat every second
_DESCRIBE = {"prompt": "description", "describe": True}
Event = dict[str, Any]


@dataclass(eq=False)
class Backend:
    """A server. `health_url`: None for a deployed model, which checks would keep from scaling to zero."""

    name: str
    predict_url: str
    health_url: str | None
    headers: Mapping[str, str] = field(repr=False)
    is_loopback: bool = False
    images: int = 0
    """Images of requests in flight."""
    down_until: float = 0.0
    description: Event | None = None
    described_at: float = -_DESCRIPTION_SECONDS
    reading: asyncio.Task[None] | None = field(default=None, repr=False)
    """The task that reads the description, or the last one that did."""
    reading_since: float = 0.0

    def is_being_described(self) -> bool:
        """True while a task reads the description."""
        return self.reading is not None and not self.reading.done()

    def wait_left(self) -> float:
        """Return the seconds left in which the description may be waited for by requests that others may answer."""
        return self.reading_since + _DESCRIPTION_WAIT_SECONDS - time.monotonic() if self.is_being_described() else 0.0

    def is_up(self) -> bool:
        """True unless it failed within the last seconds."""
        return time.monotonic() >= self.down_until

    def forget_description(self, release: str) -> None:
        """Read the description again before its next use, if it is still that of `release`, which the server left."""
        if (self.description or {}).get("release") == release:
            self.description = None
            self.described_at = -_DESCRIPTION_SECONDS

    def mark_down(self) -> None:
        """Choose it last for a while."""
        self.down_until = time.monotonic() + _DOWN_SECONDS
        self.described_at = -_DESCRIPTION_SECONDS  # it may come back with another release


def parse_backend(url: str, variables: Mapping[str, str] = os.environ) -> Backend:
    """Return the backend of a URL: a server without a path, or the whole URL of a deployed model's `predict`.

    A deployed model gets the key in PREHEAT_BACKEND_API_KEY, over https only. Raises GatewayConfigError.
    """
    remedy = "Give one like http://127.0.0.1:8080 or https://model-ID.api.baseten.co/environments/production/predict."
    try:
        parts = urlsplit(url)
        port = parts.port
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL) as error:
        raise GatewayConfigError(f"{url!r} is not the URL of a server: {error}.", remedy) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise GatewayConfigError(f"{url!r} is not the URL of a server.", remedy)
    if port == 0 or not url.isascii() or not url.isprintable() or " " in url:
        raise GatewayConfigError(f"{url!r} is not the URL of a server.", remedy)
    is_loopback = parts.hostname in _LOOPBACK
    if not parts.path.rstrip("/").endswith("/predict"):
        base = url.rstrip("/")
        return Backend(url, base + PREDICT_PATH, f"{base}/v1/models/model", {}, is_loopback)
    key = variables.get(KEY_VARIABLE)
    if key and parts.scheme != "https":
        raise GatewayConfigError(f"{url!r} would receive the key in {KEY_VARIABLE} unencrypted.", "Give an https URL.")
    return Backend(url, url, None, {"Authorization": f"Api-Key {key}"} if key else {}, is_loopback)


@dataclass
class Accepted:
    """A request that a server has accepted. `events`: the lines that follow, parsed, up to "done"."""

    backend: Backend
    event: Event
    events: AsyncIterator[Event]


class Backends:
    """All servers of a gateway. Use `running` around its lifetime."""

    def __init__(self, backends: list[Backend]) -> None:
        if not backends:
            raise GatewayConfigError("The gateway has no server.", "Name at least one with --backend.")
        self.all = backends
        timeout = httpx.Timeout(_ACCEPT_SECONDS, connect=_CONNECT_SECONDS)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        # A proxy of the environment cannot reach this machine's loopback address.
        self._clients = {
            is_loopback: httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=not is_loopback)
            for is_loopback in {backend.is_loopback for backend in backends}
        }
        self._turn = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Check the health of local servers meanwhile. At the end stop reading descriptions, and close connections."""
        checks = [asyncio.create_task(self._check(backend)) for backend in self.all if backend.health_url]
        try:
            yield
        finally:
            tasks = [*checks, *(backend.reading for backend in self.all if backend.reading is not None)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for client in self._clients.values():
                await client.aclose()

    async def _check(self, backend: Backend) -> None:
        client, url = self._clients[backend.is_loopback], backend.health_url
        assert url is not None
        while True:
            try:
                healthy = (await client.get(url, timeout=_CONNECT_SECONDS)).status_code == 200
            except httpx.HTTPError:
                healthy = False
            if healthy:
                backend.down_until = 0.0
            else:
                backend.mark_down()
            await asyncio.sleep(_CHECK_SECONDS)

    async def descriptions(self) -> list[tuple[Backend, Event]]:
        """Return each server with its description, as far as it is known after a few seconds.

        See `model.api.describe`. A server that needs longer is described in the background.
        """
        await self._wait(self._start_reading(), lambda: False, until_all=False)
        return self._known()

    def _known(self) -> list[tuple[Backend, Event]]:
        return [(backend, backend.description) for backend in self.all if backend.description is not None]

    def _start_reading(self) -> dict[asyncio.Task[None], Backend]:
        """Start to read the descriptions that are due. Return the tasks in progress, which all requests share."""
        now = time.monotonic()
        for backend in self.all:
            if not backend.is_being_described() and _is_due(backend, now):
                backend.reading_since = now
                backend.reading = asyncio.create_task(self._describe(backend))
        return self._readings()

    def _readings(self) -> dict[asyncio.Task[None], Backend]:
        readings = ((backend.reading, backend) for backend in self.all)
        return {task: backend for task, backend in readings if task is not None and not task.done()}

    async def _wait(
        self, readings: Mapping[asyncio.Task[None], Backend], is_enough: Callable[[], bool], *, until_all: bool
    ) -> None:
        """Wait for descriptions until `is_enough` is true or all have arrived or failed.

        Without `until_all`, ignore servers that were asked more than a few seconds ago.
        """
        while not is_enough():
            left = {task: backend.wait_left() for task, backend in readings.items() if not task.done()}
            if not until_all:
                left = {task: seconds for task, seconds in left.items() if seconds > 0}
            if not left:
                return
            timeout = None if until_all else min(left.values())
            await asyncio.wait(left, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

    async def _describe(self, backend: Backend) -> None:
        now = time.monotonic()
        # A replica of a deployed model may have to start for its first answer.
        seconds = _CONNECT_SECONDS if backend.health_url else _ACCEPT_SECONDS
        with suppress(ValueError, KeyError, TypeError):
            client = self._clients[backend.is_loopback]
            timeout = httpx.Timeout(seconds, connect=_CONNECT_SECONDS)
            try:
                answer = await client.post(
                    backend.predict_url, json=_DESCRIBE, headers=backend.headers, timeout=timeout
                )
            except httpx.HTTPError:
                backend.mark_down()
                return
            if answer.status_code == 200 and isinstance((found := answer.json())["release"], str):
                backend.description, backend.described_at = found, now

    async def description_of(self, model: str | None) -> Event:
        """Return the description of a release, by default that of the first server. Raises ApiError.

        A named release whose server is up and described is answered at once. Its server may be down, or no release be
        named and the first server's description be due: then wait a few seconds for other descriptions. Until one fits,
        wait for all servers: a replica may have to start.
        """
        readings = self._start_reading()
        await self._wait(readings, lambda: self._is_settled(model), until_all=False)
        await self._wait(readings, lambda: self._is_known(model), until_all=True)
        known = self._known()
        if not known:
            raise ApiError(503, "No backend can be reached.", None, "backend_unavailable", int(_DOWN_SECONDS))
        wanted = known[0][1]["release"] if model is None else model
        for _, description in known:
            if description["release"] == wanted:
                return description
        names = ", ".join(dict.fromkeys(description["release"] for _, description in known))
        raise ApiError(
            404, f"The model {wanted[:80]!r} does not exist. Available: {names}.", "model", "model_not_found"
        )

    def _is_known(self, model: str | None) -> bool:
        """True if a server of the release is described; of any release for None."""
        return any(model in (None, description["release"]) for _, description in self._known())

    def _is_settled(self, model: str | None) -> bool:
        """True if a description fits that no later one would replace: of a server that is up, or the first for None."""
        if model is not None:
            return any(backend.is_up() and description["release"] == model for backend, description in self._known())
        first = next((backend for backend in self.all if backend.description or backend.wait_left() > 0), None)
        return first is not None and not first.wait_left() > 0

    @asynccontextmanager
    async def start(self, request: Event, model: str, request_id: str) -> AsyncIterator[Accepted]:
        """Send a request to the least loaded server of a release; yields once one has accepted it.

        Its connection is closed at the end of the `with` block, which stops the work of a request that is not
        finished. A server that has started again with another release is left out, and described again. Raises
        ApiError: the server's own refusal, 429 if all are busy, 502 or 503.
        """
        images = request.get("num_images", 1)
        waits: list[int] = []
        is_replaced = False
        tried: list[Backend] = []
        while (backend := await self._next_candidate(model, tried)) is not None:
            tried.append(backend)
            backend.images += images
            try:
                async with self._clients[backend.is_loopback].stream(
                    "POST",
                    backend.predict_url,
                    # Escaped, because a text may hold half of a surrogate pair, which UTF-8 cannot encode.
                    content=json.dumps(request | {"stream": True}),
                    headers={**backend.headers, "Content-Type": "application/json", "X-Request-Id": request_id},
                ) as answer:
                    if answer.status_code == 429:
                        waits.append(_retry_after(answer))
                    elif answer.status_code == 503:
                        backend.mark_down()
                    elif answer.status_code != 200:
                        await answer.aread()
                        raise _refusal(backend, answer)
                    else:
                        async with aclosing(_events(backend, answer)) as events:
                            accepted = await anext(events)
                            if accepted.get("release", model) == model:  # older servers do not name it
                                yield Accepted(backend, accepted, events)
                                return
                            is_replaced = True
                            backend.forget_description(model)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                backend.mark_down()
            except (httpx.HTTPError, TimeoutError) as error:
                backend.mark_down()
                raise _broken() from error
            finally:
                backend.images -= images
        if waits:
            seconds = min(waits)
            raise ApiError(
                429, f"All backends are busy. Repeat the request in {seconds} s.", None, "overloaded", seconds
            )
        if is_replaced:
            raise ApiError(
                503,
                f"The backend no longer serves {model}. Repeat the request without naming a release, or name one of "
                "GET /v1/models.",
                None,
                "release_changed",
                1,
            )
        raise ApiError(503, "No backend can be reached.", None, "backend_unavailable", int(_DOWN_SECONDS))

    async def _next_candidate(self, model: str, tried: Sequence[Backend]) -> Backend | None:
        """Return a server of a release that is not in `tried`: one that is up, the least loaded, else by turns.

        If there is none, wait a few seconds for the descriptions that are being read. Returns None without a server.
        """
        if not tried:
            self._turn += 1

        def untried() -> list[Backend]:
            serving = [backend for backend in self.all if (backend.description or {}).get("release") == model]
            turn = self._turn % max(1, len(serving))
            return [backend for backend in serving[turn:] + serving[:turn] if not any(backend is one for one in tried)]

        await self._wait(self._readings(), lambda: bool(untried()), until_all=False)
        return min(untried(), key=lambda backend: (not backend.is_up(), backend.images), default=None)


def _is_due(backend: Backend, now: float) -> bool:
    """True if the description of a server should be read again."""
    if now - backend.described_at < _DESCRIPTION_SECONDS or not backend.is_up():
        return False
    # A question would keep a deployed model from scaling to zero.
    return backend.description is None or backend.health_url is not None


async def _events(backend: Backend, answer: httpx.Response) -> AsyncGenerator[Event, None]:
    """Yield the events of a stream. Raises ApiError for the event "error", and if the stream ends without "done"."""
    lines = answer.aiter_lines()
    first = True
    while True:
        try:
            async with asyncio.timeout(_ACCEPT_SECONDS if first else _EVENT_SECONDS):
                event = json.loads(await anext(lines))
            kind = event["event"]
        except (StopAsyncIteration, httpx.HTTPError, TimeoutError, ValueError, KeyError, TypeError) as error:
            backend.mark_down()
            raise _broken() from error
        if kind == "error":
            raise backend_error(event.get("status", 500), event)
        yield event
        if kind == "done":
            return
        first = False


def backend_error(status: int, body: Event) -> ApiError:
    """Return the error of a server's refusal, in OpenAI's form. `body`: {"error", "kind", "field"} of Preheat."""
    field = body.get("field")
    param = field if isinstance(field, str) else None
    return ApiError(status, str(body.get("error", "The server gave no reason.")), param, body.get("kind"))


def _refusal(backend: Backend, answer: httpx.Response) -> ApiError:
    try:
        body = answer.json()
    except ValueError:
        body = None
    if answer.status_code in (401, 403):  # the gateway's own key, not the caller's
        backend.mark_down()
        return ApiError(502, "A backend refused the gateway's own API key.", None, "backend_refused")
    if not isinstance(body, dict):
        return ApiError(502, f"A backend answered {answer.status_code}.", None, "backend_failed")
    return backend_error(answer.status_code, body)


def _broken() -> ApiError:
    return ApiError(
        502,
        "The backend's connection ended before the images were finished. They may have been started, so the request "
        "was not repeated. Send it again.",
        None,
        "backend_failed",
    )


def _retry_after(answer: httpx.Response) -> int:
    value = answer.headers.get("Retry-After", "")
    return int(value) if value.isdecimal() and len(value) < 6 else 1
