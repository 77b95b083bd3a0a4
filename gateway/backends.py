"""The Preheat servers behind the gateway: which one gets a request, and whether it may be sent to another one.

Every request is sent as a stream. A server's first line, "accepted", divides it in two: before it nothing was started,
so a connection that cannot be made, 429 and 503 lead to the next server. After it, and whenever the work may have
begun, a failure is an error of the request. Connections are not reused, because a reused one may be closed before the
server has read the request, and then it is not known whether it was started.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from gateway.backend import CONNECT_SECONDS, DESCRIPTION_SECONDS, DOWN_SECONDS, Backend
from gateway.backend_answers import (
    ACCEPT_SECONDS,
    Event,
    max_line_bytes,
    parse_description,
    read_events,
    retry_after,
)
from gateway.backend_failures import failure_of, refusal_of, with_errors
from gateway.bounded_reading import (
    MAX_DESCRIPTION_BYTES,
    HeldLines,
    InvalidAnswer,
    read_body,
)
from gateway.endpoint import DESCRIBE
from gateway.errors import ApiError, GatewayConfigError
from model.api.fair_queue import CLIENT_HEADER
from model.api.json_bytes import json_bytes
from model.api.resolve import find_release
from model.errors import RequestRefused
from model.statuses import OF_REQUEST_KINDS

_CHECK_SECONDS = 2.0  # between two health checks of a local server
_PIECE_BYTES = 2**18  # of a body that is sent
logger = logging.getLogger("preheat.gateway")


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
        timeout = httpx.Timeout(ACCEPT_SECONDS, connect=CONNECT_SECONDS)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        # A proxy of the environment cannot reach this machine's loopback address. Cookies are not kept.
        self._clients = {
            is_loopback: httpx.AsyncClient(
                timeout=timeout,
                limits=limits,
                trust_env=not is_loopback,
                headers={"Accept-Encoding": "identity"},
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            )
            for is_loopback in {backend.is_loopback for backend in backends}
        }
        self._turn = 0
        self._held = HeldLines()

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

    @asynccontextmanager
    async def _send(
        self, backend: Backend, seconds: float, request: Event | None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[httpx.Response]:
        """Send a request to a server, or ask for its health. Yields the answer without its body.

        Raises TimeoutError if its headers take longer than `seconds`, and httpx.HTTPError.
        """
        client = self._clients[backend.is_loopback]
        if request is None:
            assert backend.health_url is not None
            sent = client.build_request("GET", backend.health_url)
        else:
            parts = [json_bytes(request)]
            headers = {**backend.headers, "Content-Type": "application/json", **(headers or {})}
            headers["Content-Length"] = str(len(parts[0]))
            sent = client.build_request("POST", backend.predict_url, content=_in_pieces(parts), headers=headers)
        async with asyncio.timeout(seconds):
            answer = await client.send(sent, stream=True)
        try:
            yield answer
        finally:
            await answer.aclose()

    async def _check(self, backend: Backend) -> None:
        while True:
            try:
                async with self._send(backend, CONNECT_SECONDS, None) as answer:
                    healthy = answer.status_code == 200
            except (httpx.HTTPError, TimeoutError):
                healthy = False
            if healthy:
                backend.down_until = 0.0
            else:
                backend.mark_down()
            await asyncio.sleep(_CHECK_SECONDS)

    async def descriptions(self) -> list[tuple[Backend, Event]]:
        """Return each server with each of its descriptions, as far as they are known after a few seconds.

        See `model.api.describe`. A server that needs longer is described in the background.
        """
        await self._wait(self._start_reading(), lambda: False, until_all=False)
        return self._known()

    def _known(self) -> list[tuple[Backend, Event]]:
        return [(backend, description) for backend in self.all for description in backend.descriptions.values()]

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
        seconds = CONNECT_SECONDS if backend.health_url else ACCEPT_SECONDS
        problem = ""
        try:
            async with asyncio.timeout(seconds):
                found: dict[str, Event] = {}
                models: list[str | None] = [None]
                left = MAX_DESCRIPTION_BYTES
                while models:
                    description, size = await self._read_description(backend, seconds, models.pop(0), left)
                    if not found:
                        models += (description.get("models") or [])[1:]
                    found[description["release"]] = description
                    left -= size
            backend.descriptions, backend.described_at = found, now
        except (httpx.HTTPError, TimeoutError) as error:
            backend.mark_down()
            problem = type(error).__name__
        except InvalidAnswer as error:
            problem = str(error)
        if problem and problem != backend.description_problem:
            logger.warning("Backend %s has no description: %s.", backend.name, problem)
        backend.description_problem = problem

    async def _read_description(
        self, backend: Backend, seconds: float, model: str | None, max_bytes: int
    ) -> tuple[Event, int]:
        """Return the description of a server's release, by default of its first one, and its bytes.

        Raises InvalidAnswer.
        """
        request = DESCRIBE if model is None else DESCRIBE | {"model": model}
        async with self._send(backend, seconds, request) as answer:
            if answer.status_code != 200:
                raise InvalidAnswer(f"its status is {answer.status_code}")
            body = await read_body(answer, max_bytes)
        description = parse_description(body)
        if model not in (None, description["release"]):
            raise InvalidAnswer(f"it describes {description['release']!r} in place of {model!r}")
        return description, len(body)

    async def description_of(self, model: str | None) -> Event:
        """Return the description of a release, by default the first of the first server that is up. Raises ApiError.

        A release may be named by its model's name, if no other version of it is served.

        A named release whose server is up and described is answered at once. Its server may be down, or no release be
        named and the first server's description be due: then wait a few seconds for other descriptions. Until one fits,
        wait for all servers: a replica may have to start.
        """
        readings = self._start_reading()
        await self._wait(readings, lambda: self._is_settled(model), until_all=False)
        await self._wait(readings, lambda: self._is_known(model), until_all=True)
        known = self._known()
        if not known:
            raise ApiError(503, "No backend can be reached.", None, "backend_unavailable", int(DOWN_SECONDS))
        by_name: dict[str, Event] = {}
        for _, description in sorted(known, key=lambda one: not one[0].is_up()):
            by_name.setdefault(description["release"], description)
        names = list(by_name)
        try:
            return by_name[names[find_release(names, model)]]
        except RequestRefused as error:
            message = f"The model {(model or '')[:80]!r} does not exist. Available: {', '.join(names)}."
            raise ApiError(404, message, "model", "model_not_found") from error

    def _is_known(self, model: str | None) -> bool:
        """True if a server of the release is described; of any release for None."""
        return any(_fits(description["release"], model) for _, description in self._known())

    def _is_settled(self, model: str | None) -> bool:
        """True if a description fits that no later one would replace: of a server that is up, the first for None."""
        if model is not None:
            return any(backend.is_up() and one["release"] == model for backend, one in self._known())
        up = [backend for backend in self.all if backend.is_up()]
        first = next((backend for backend in up if backend.descriptions or backend.wait_left() > 0), None)
        return first is not None and not first.wait_left() > 0

    @asynccontextmanager
    async def start(self, request: Event, model: str, request_id: str, client_id: str = "") -> AsyncIterator[Accepted]:
        """Send a request to a server of a release, see `_next_candidate`; yields once one has accepted it.

        Its connection is closed at the end of the `with` block, which stops the work of a request that is not
        finished. A server that has started again with another release is left out, and described again. One that cannot
        load what the request names is left out. `client_id`: "", or the client that shares the server's queues with
        others. Raises ApiError: the server's own refusal, 429 if all are busy, 502 or 503.
        """
        images = request.get("num_images", 1)
        sent = request | {"stream": True}
        waits: list[int] = []
        is_replaced = False
        not_loaded: ApiError | None = None
        tried: list[Backend] = []
        while (backend := await self._next_candidate(model, _named_adapters(request), tried)) is not None:
            tried.append(backend)
            backend.images += images
            try:
                headers = {"X-Request-Id": request_id, CLIENT_HEADER: client_id}
                # Servers of one release may be older than the field.
                named = {"model": model} if len(backend.descriptions) > 1 else {}
                async with self._send(backend, ACCEPT_SECONDS, sent | named, headers) as answer:
                    if answer.status_code == 429:
                        waits.append(retry_after(answer))
                    elif answer.status_code == 503:
                        refused = await refusal_of(backend, answer)
                        if refused.code in OF_REQUEST_KINDS:
                            not_loaded = refused
                        else:
                            backend.mark_down()
                    elif answer.status_code != 200:
                        refused = await refusal_of(backend, answer)
                        if not named or (refused.status, refused.param) != (400, "model"):
                            raise refused
                        is_replaced = True
                        backend.forget_descriptions(model)
                    else:
                        max_bytes = max_line_bytes(request, backend.descriptions.get(model, {}))
                        lines = read_events(answer, images, max_bytes, self._held)
                        async with aclosing(with_errors(backend, request_id, lines)) as events:
                            accepted = await anext(events)
                            if accepted.get("release", model) == model:  # older servers do not name it
                                yield Accepted(backend, accepted, events)
                                return
                            is_replaced = True
                            backend.forget_descriptions(model)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                backend.mark_down()
            except (httpx.HTTPError, TimeoutError) as error:
                raise failure_of(backend, request_id, error) from error
            finally:
                backend.images -= images
        if waits:
            seconds = min(waits)
            raise ApiError(
                429, f"All backends are busy. Repeat the request in {seconds} s.", None, "overloaded", seconds
            )
        if not_loaded is not None:
            raise not_loaded
        if is_replaced:
            raise ApiError(
                503,
                f"The backend no longer serves {model}. Repeat the request without naming a release, or name one of "
                "GET /v1/models.",
                None,
                "release_changed",
                1,
            )
        raise ApiError(503, f"No backend of {model} can be reached.", None, "backend_unavailable", int(DOWN_SECONDS))

    async def _next_candidate(self, model: str, adapters: frozenset[str], tried: Sequence[Backend]) -> Backend | None:
        """Return a server of a release that is not in `tried`: one that is up, has the adapters, is the least loaded,
        else by turns.

        If none has the adapters, wait a few seconds for the descriptions that are being read. Returns None without a
        server.
        """
        if not tried:
            self._turn += 1

        def untried() -> list[Backend]:
            serving = [backend for backend in self.all if model in backend.descriptions]
            turn = self._turn % max(1, len(serving))
            return [backend for backend in serving[turn:] + serving[:turn] if not any(backend is one for one in tried)]

        def has_adapters(backend: Backend) -> bool:
            described = backend.descriptions[model].get("adapters") or []
            return adapters <= {one["name"] for one in described}

        def rank(backend: Backend) -> tuple[bool, bool, int]:
            return not backend.is_up(), not has_adapters(backend), backend.images

        await self._wait(self._readings(), lambda: any(map(has_adapters, untried())), until_all=False)
        return min(untried(), key=rank, default=None)


def _fits(release: str, model: str | None) -> bool:
    """True if a request that names `model` may mean a release; None means any."""
    return model in (None, release, release.rpartition("/")[0])


def _named_adapters(request: Event) -> frozenset[str]:
    """Return the names of the adapters in a request, which the server checks."""
    given = request.get("loras")
    names = [one.get("name") for one in given if isinstance(one, dict)] if isinstance(given, list) else []
    return frozenset(name for name in names if isinstance(name, str))


async def _in_pieces(parts: list[bytes]) -> AsyncIterator[bytes]:
    """Yield the bytes of `parts`, which are freed as soon as they are sent: the request lives until its answer ends."""
    content = parts.pop()
    for start in range(0, len(content), _PIECE_BYTES):
        yield content[start : start + _PIECE_BYTES]


def _is_due(backend: Backend, now: float) -> bool:
    """True if the description of a server should be read again."""
    if now - backend.described_at < DESCRIPTION_SECONDS or not backend.is_up():
        return False
    # A question would keep a deployed model from scaling to zero.
    return not backend.descriptions or backend.health_url is not None
